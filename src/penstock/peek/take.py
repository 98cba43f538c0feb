"""``penstock.take``: collect the first rows of a stream, then stop."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from penstock.arguments import refusal, require
from penstock.errors import InvalidInputError
from penstock.limits.rows import MAX_LIMIT_ROWS
from penstock.peek.penstock_reads import LocalRead, PenstockRead, RowScope, may_keep_state, row_scope
from penstock.peek.query import (
    Deadline,
    RowCollector,
    check_folder,
    require_append,
    restore_interrupts,
    run_query,
    with_any_column,
    with_numbered_columns,
)
from penstock.peek.result import TakeResult
from penstock.spark.internals.plans import StreamingRead, replace_reads, streaming_reads
from penstock.spark.internals.sessions import is_classic

log = logging.getLogger("penstock.peek")

_MICRO_BATCH_ROWS = 200_000
"""The most rows in a micro-batch of a query that keeps state. Such a query returns rows only at the end of
each micro-batch.
"""


def take(
    df: DataFrame, n: int, *, timeout: float | None = 60.0, folder: str | os.PathLike[str] | None = None
) -> TakeResult:
    """Collect the first rows of a streaming DataFrame, and stop.

    No rows are consumed and no files are left behind. A queue is read from its consumer's offset, but the
    consumer does not move or get an owner. Change feeds receive no acknowledgement. The query is stopped and
    its checkpoint removed, even after an error or an interrupt.

    If the DataFrame transforms one queue or change feed row by row or batch by batch (filters, projections,
    functions on Arrow batches), its first rows are read without a query. Any other DataFrame runs as a
    streaming query in output mode append.

    Parameters
    ----------
    df
        A streaming DataFrame of a classic session.
    n
        The number of rows, from 1 to 2,147,483,647.
    timeout
        After this many seconds, return the rows so far, with ``complete`` set to False. None waits for ever.
    folder
        The directory or URL for the query's temporary checkpoint. The default, this machine's folder for
        temporary files, does not work for a query that keeps state on a cluster.

    Returns
    -------
    TakeResult
        A sequence of Rows, which converts to an Arrow table, a pandas or a Spark DataFrame.

    Raises
    ------
    InvalidInputError
        When an argument is invalid.
    OutputModeRefusedError
        When Spark would not start the query in append mode. The error has the report.
    Exception
        The query's own error.
    """
    check_arguments(df, n)
    check_seconds("timeout", timeout)
    place = folder_text(folder)
    deadline, rows = Deadline(timeout), RowCollector(n)
    frame = with_any_column(df)
    with restore_interrupts():
        own = single_penstock_read(frame)
        if own is not None:
            rest = LocalRead(frame, own, rows, deadline).collect()
            if rest is not None:
                _take_by_query(rest, rows, deadline, place, keeps_state=False)
        else:
            stateful = check_query(frame, place)
            reads = without_side_effects(frame, _MICRO_BATCH_ROWS if stateful else None)
            _take_by_query(reads, rows, deadline, place, keeps_state=stateful)
    result = TakeResult.of(df, rows.collected, n, deadline.passed, complete=rows.is_enough)
    if not result.complete:
        log.warning(
            "penstock.take returns %s",
            result.note,
            extra={"action": "take_timeout", "rows": len(result), "wanted": n},
        )
    return result


def check_arguments(df: object, n: object) -> None:
    """Refuse objects other than streaming DataFrames of a classic session, and invalid numbers of rows."""
    if not isinstance(df, DataFrame):
        raise refusal("df", df, "a streaming DataFrame; of a penstock.stream(…), pass its .to_df()")
    if not is_classic(df):
        raise InvalidInputError(
            "take and take_sample need a classic Spark session, but this DataFrame is from Spark Connect: "
            "write df.limit(n) to the sink 'memory', and stop the query yourself",
            condition="TAKE_NEEDS_CLASSIC",
        )
    if not df.isStreaming:
        raise InvalidInputError(
            "the DataFrame is not streaming: df.limit(n) returns its first rows, df.sample(fraction) a "
            "sample",
            condition="INVALID_INPUT.NOT_STREAMING",
        )
    if type(n) is not int or not 1 <= n <= MAX_LIMIT_ROWS:
        raise refusal("n", n, f"a whole number from 1 to {MAX_LIMIT_ROWS:,}")


def check_seconds(name: str, value: Any) -> None:
    """Refuse a time limit that is neither None nor a finite number of seconds above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (value is None or (is_number and 0 < value < math.inf)):
        raise refusal(name, value, "a finite number of seconds above 0, or None")


def folder_text(folder: str | os.PathLike[str] | None) -> str | None:
    """Return a folder as text."""
    require("folder", folder, str | os.PathLike | None, "a directory, or the URL of one")
    return None if folder is None else os.fspath(folder)


def single_penstock_read(df: DataFrame) -> PenstockRead | None:
    """Return the read of a plan that has only one and can run chunk by chunk; None for any other plan."""
    if row_scope(df) is RowScope.STREAM:
        return None
    reads = streaming_reads(df) or []
    return PenstockRead.of(df.sparkSession, reads[0])


def check_query(df: DataFrame, folder: str | None) -> bool:
    """Return whether a query may keep state. Refuse a query that cannot run in append mode or with this
    folder.
    """
    if not may_keep_state(df):
        return False
    require_append(df)
    check_folder(df, folder)
    return True


def without_side_effects(df: DataFrame, rows: int | None) -> DataFrame:
    """Return the same stream with reads of Penstock's sources that have no side effects."""
    spark = df.sparkSession

    def stand_in(read: StreamingRead) -> DataFrame | None:
        own = PenstockRead.of(spark, read)
        return None if own is None else own.stream(rows=rows)

    return replace_reads(df, stand_in)


def _take_by_query(
    frame: DataFrame, rows: RowCollector, deadline: Deadline, folder: str | None, *, keeps_state: bool
) -> None:
    def take_first(batch: DataFrame, _number: int) -> None:
        if rows.is_enough:
            return
        first = first_of_each_task(batch, rows.missing) if keeps_state else batch.limit(rows.missing)
        rows.add(first.toArrow().rename_columns(batch.columns))

    run_query(frame, take_first, deadline, folder=folder, available_now=False, enough=rows.enough)


def first_of_each_task(batch: DataFrame, rows: int) -> DataFrame:
    """Return the first rows of each task. The task reads all of its rows, because it commits its state at the
    end.
    """
    numbered = with_numbered_columns(batch)

    def cut(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        left = rows
        for each in batches:
            if left > 0:
                yield each.slice(0, left)
                left -= each.num_rows

    return numbered.mapInArrow(cut, numbered.schema)
