"""A limit of rows, as a transformation that says how many it let through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidOption

METRIC = "penstock limit"
"""What the micro-batches' progress calls the rows that the limit let through."""
STOP, KEEP = "stop", "keep"
MOST_ROWS = 2**31 - 1
"""Spark's limits are 32-bit numbers."""


@dataclass(frozen=True)
class RowLimit:
    """Spark's own limit, which counts in the state store over the whole life of a query in append mode.

    Parameters
    ----------
    rows
        How many pass.
    on_limit
        ``stop``: the query ends in the micro-batch that reaches them. ``keep``: it runs on, and drops what it reads.
    """

    rows: int
    on_limit: str = STOP

    def __post_init__(self) -> None:
        check_rows(self.rows)
        if self.on_limit not in (STOP, KEEP):
            raise InvalidOption(
                f"on_limit is {STOP} or {KEEP}, not {in_quotes(self.on_limit)}.{did_you_mean(str(self.on_limit), (STOP, KEEP))}",
                option="on_limit",
            )

    def __call__(self, frame: DataFrame) -> DataFrame:
        """The first rows."""
        return frame.limit(self.rows).observe(METRIC, F.count(F.lit(1)).alias("rows"))


def check_rows(rows: object) -> None:
    """Refuse what is no number of rows.

    Raises
    ------
    InvalidOption
    """
    if type(rows) is not int or not 1 <= rows <= MOST_ROWS:
        raise InvalidOption(
            f"a limit is a whole number from 1 to {MOST_ROWS:,}, not {in_quotes(rows)}", option="n"
        )


def rows_passed_in(progress: Any) -> int:
    """How many rows the limit let through in a micro-batch, by its progress."""
    row = progress.observedMetrics.get(METRIC)
    # By place: a Row that comes over Spark Connect has no names.
    return 0 if row is None else int(row[0])
