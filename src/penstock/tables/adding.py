"""What a continuous query, which only adds rows, does not do to a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.arguments import in_quotes
from penstock.errors import ContinuousRefused
from penstock.lake.delta_location import is_delta

if TYPE_CHECKING:
    from penstock.tables.sink import TableSink

_OTHERWISE = "or use ps.Trigger.processing_time"


def require_added(table: TableSink, url: str, guarantee: str, output_mode: str) -> None:
    """Refuse what does more to a table than to add rows to it.

    Raises
    ------
    ContinuousRefused
    """
    called, wrong = f"ps.TableSink({in_quotes(table.name)})", ""
    if is_delta(url):
        wrong = f"{called} is a Delta table, which would get a version for each epoch: use a SQL table, {_OTHERWISE}"
    elif table.apply_changes:
        wrong = f"{called} applies changes, and a continuous query only adds rows: leave apply_changes out, {_OTHERWISE}"
    elif output_mode != "append":
        wrong = (
            f"output mode {in_quotes(output_mode)} puts rows of {called} in the place of others, and a continuous query only "
            f"adds rows: use output_mode='append', {_OTHERWISE}"
        )
    elif table.keys and guarantee == "at_least_once":
        wrong = (
            f"{called} has the keys {', '.join(table.keys)}, and with guarantee=at_least_once rows come again after a failure, "
            "when their keys are there already: use guarantee=exactly_once, or leave the keys out"
        )
    if wrong:
        raise ContinuousRefused(
            wrong,
            condition="CONTINUOUS_REFUSED.SINK",
            sink="TableSink",
            table=table.name,
            guarantee=guarantee,
            output_mode=output_mode,
        )
