"""``penstock query``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import typer

from penstock.cli.commands.shared import Run, command, note_missing
from penstock.cli.output import Column
from penstock.cli.units import age_text, count_text
from penstock.store.records.queries import FAILED

if TYPE_CHECKING:
    from penstock.json_text import Json
    from penstock.store.database import Transaction
    from penstock.ui.reading import QueriesState

group = typer.Typer(help="Show the streaming queries of a store.", no_args_is_help=True)


def _rate_text(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.1f}"


def _count_or_blank(count: int | None) -> str:
    return "" if count is None else count_text(count)


_COLUMNS = (
    Column("query", "query"),
    Column("state", "state"),
    Column("engine", "engine"),
    Column("batch", "batch", _count_or_blank, right=True),
    Column("rows_in_per_second", "rows/s", _rate_text, right=True),
    Column("source", "source"),
    Column("sink", "sink"),
    Column("reported_seconds", "reported", age_text, right=True),
    Column("error", "error"),
    Column("id", "id"),
)


@command(group, "list", "penstock query list", "penstock query list --json")
def list_queries(run: Run) -> None:
    """List the queries that report to the store.

    Those that need attention come first. "state" is failed, silent (has stopped reporting: its process is
    gone, suspended, or cannot reach the store), running or stopped. A killed query is silent after 30
    seconds. "batch" is the last micro-batch or epoch. "reported" is the time since the last report, which a
    running query makes every 10 seconds. "error" is the code of the error that ended this run; --json has the
    last error of any run, with its message. "id" is the query id in the checkpoint. The list has the 1,000
    that have reported last, and a note says how many are left out.
    """
    from penstock.ui.queries import Queries
    from penstock.ui.reading import read_queries
    from penstock.ui.unreadable import UnreadableRecords

    def read(tx: Transaction) -> tuple[int, QueriesState]:
        return tx.now(), read_queries(tx, since=0)

    with run.connect() as store:
        now, state = store.database.run(read, write=False)
    unreadable = UnreadableRecords()
    rows = [_row(query, now) for query in Queries().update(state, now, (), unreadable)]
    note_missing(run.output, unreadable, state.omitted, "queries", "those that have reported last")
    run.output.table("queries", _COLUMNS, rows)


def _row(query: Json, now: int) -> Json:
    """Return the fields of a query on the monitor page, without charts; ``now`` is in microseconds."""
    reported = datetime.fromisoformat(query["updated_at"]).timestamp()
    last = query["last_error"]
    return {
        **{name: value for name, value in query.items() if name != "history"},
        "query": query["name"] or query["id"],
        "error": last["condition"] if last and query["state"] == FAILED else None,
        "reported_seconds": round(max(now / 1e6 - reported, 0.0), 3),
    }
