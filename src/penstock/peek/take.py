"""``ps.take``: the first rows of a stream, then stop."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from pyspark.sql import DataFrame

from penstock.arguments import refusal, require
from penstock.errors import InvalidInput
from penstock.limits.rows import MOST_ROWS
from penstock.peek.local_read import LocalRead
from penstock.peek.penstock_reads import PenstockRead, RowScope, may_keep_state, row_scope
from penstock.peek.query import (
    Deadline,
    RowCollector,
    check_folder,
    query_error,
    require_append,
    restore_interrupts,
    run_query,
)
from penstock.peek.result import Taken
from penstock.pipeline.failures import original_error
from penstock.spark.internals.plan_rewrite import replace_reads
from penstock.spark.internals.plans import streaming_reads
from penstock.spark.internals.sessions import is_classic

log = logging.getLogger("penstock.peek")

_GLANCE = 0.1
_MICRO_BATCH_ROWS = 200_000
"""Of a query that keeps state: its first rows come out behind a micro-batch, and not only behind all that there is."""


def take(
    df: DataFrame, n: int, *, timeout: float | None = 60.0, folder: str | os.PathLike[str] | None = None
) -> Taken:
    """Collect the first rows that come out of a streaming DataFrame, and stop.

    Nothing is consumed and nothing stays behind: a queue's consumer is read from where it stands, and neither moved nor owned; a
    change feed's system is not told; the query and its checkpoint are gone at the end, also after an error or an interrupt.

    Where rows come out one by one (filters, projections, functions on Arrow batches) of one queue or change feed, the first
    ones are read without starting a query. Everything else runs as a streaming query in output mode append.

    Parameters
    ----------
    df
        A streaming DataFrame of a classic session.
    n
        How many rows, from 1 to 2,147,483,647.
    timeout
        Seconds after which what has come is given, with ``complete`` False; None waits for ever.
    folder
        Where the temporary checkpoint of a query is, a directory or a URL. This machine's own place when None, which a query
        that keeps state on a cluster cannot use.

    Returns
    -------
    Taken
        A list of Rows that also is an Arrow table, a pandas or a Spark DataFrame.

    Raises
    ------
    InvalidInput
        When an argument is of another kind.
    OutputModeRefused
        With the report, when Spark would not start the query in append mode.
    Exception
        What the query fails with.
    """
    check_arguments(df, n)
    if timeout is not None and not is_duration(timeout):
        raise refusal("timeout", timeout, "a finite number of seconds above 0, or None")
    place = folder_text(folder)
    clock, found = Deadline(timeout), RowCollector(n)
    with restore_interrupts():
        own = single_penstock_read(df)
        rest = _queried(df, place) if own is None else LocalRead(df, own).into(found, clock)
        if rest is not None:
            _through_query(rest, found, clock, place)
    result = Taken.of(df, found.given, n, clock.passed, complete=found.is_enough)
    if not result.complete:
        log.warning(
            "ps.take gives %s",
            result.note,
            extra={"action": "take_timeout", "rows": len(result), "wanted": n},
        )
    return result


def check_arguments(df: object, n: object) -> None:
    """Refuse what no rows can be taken from, and numbers that are none.

    Raises
    ------
    InvalidInput
    """
    require("df", df, DataFrame, "a streaming DataFrame; of a ps.stream(…), give its .frame()")
    given: Any = df
    if not is_classic(given):
        raise InvalidInput(
            "taking rows needs a classic Spark session, and this DataFrame is Spark Connect's: write df.limit(n) to the sink "
            "'memory' there, and stop the query yourself",
            condition="TAKE_NEEDS_CLASSIC",
        )
    if not given.isStreaming:
        raise InvalidInput(
            "the DataFrame is not a streaming one: df.limit(n) gives rows of it, df.sample(fraction) a sample"
        )
    if type(n) is not int or not 1 <= n <= MOST_ROWS:
        raise refusal("n", n, f"a whole number from 1 to {MOST_ROWS:,}")


def is_duration(value: object) -> bool:
    """Whether a value is a time to wait, which has an end."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def folder_text(folder: str | os.PathLike[str] | None) -> str | None:
    """A folder as text.

    Raises
    ------
    InvalidInput
    """
    require("folder", folder, str | os.PathLike | None, "a directory, or the URL of one")
    return None if folder is None else os.fspath(folder)


def single_penstock_read(df: DataFrame) -> PenstockRead | None:
    """What a plan reads that can be put through it a chunk at a time."""
    if row_scope(df) is RowScope.STREAM:
        return None
    reads = streaming_reads(df) or []
    return PenstockRead.of(df.sparkSession, reads[0])


def without_side_effects(df: DataFrame, rows: int | None) -> DataFrame:
    """The same stream, whose reads of Penstock's sources change nothing.

    Parameters
    ----------
    rows
        The most in a micro-batch of such a read, unless it has a limit of its own.
    """
    spark = df.sparkSession

    def stand_in(read: Any) -> DataFrame | None:
        own = PenstockRead.of(spark, read)
        return None if own is None else own.stream(rows=rows)

    return replace_reads(df, stand_in)


def _queried(df: DataFrame, folder: str | None) -> DataFrame:
    """What a query is to run."""
    if not may_keep_state(df):
        return without_side_effects(df, None)
    require_append(df)
    check_folder(df, folder)
    return without_side_effects(df, _MICRO_BATCH_ROWS)


def _through_query(frame: DataFrame, found: RowCollector, clock: Deadline, folder: str | None) -> None:
    each = _Each(found, reads_all=may_keep_state(frame))
    with run_query(frame, each, folder=folder, processingTime="0 seconds") as query:
        while not clock.is_over and not found.wait(clock.at_most(_GLANCE)) and query.isActive:
            pass
        error = None if found.is_enough else each.error or query_error(query)
    if error is not None:
        raise error


class _Each:
    """Takes the first rows of each micro-batch."""

    def __init__(self, found: RowCollector, *, reads_all: bool) -> None:
        self._found = found
        self._reads_all = reads_all
        self.error: Exception | None = None

    def __call__(self, batch: DataFrame, _number: int) -> None:
        """Called by Spark, in a thread of its own."""
        if self._found.is_enough:
            return
        most = self._found.lacking
        try:
            rows = first_of_each_task(batch, most) if self._reads_all else batch.limit(most)
            self._found.add(rows.toArrow().rename_columns(batch.columns))
        except Exception as error:
            self.error = original_error(error)
            raise


def first_of_each_task(batch: DataFrame, rows: int) -> DataFrame:
    """The first rows of each task, which reads the others too, since it commits its state behind the last one."""
    # Columns by number: two may have one name.
    numbered = batch.toDF(*(f"c{number}" for number in range(len(batch.columns))))

    def cut(batches: Any) -> Any:
        left = rows
        for each in batches:
            if left > 0:
                yield each.slice(0, left)
                left -= each.num_rows

    return numbered.mapInArrow(cut, numbered.schema)
