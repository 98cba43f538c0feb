"""The first rows of a queue or a change feed, read by this process and transformed chunk by chunk.

This avoids the start of a streaming query: its process for the source, its checkpoint and the planning of
micro-batches. If the first rows read do not yield enough, Spark's executors read more: of a queue, an
estimated number of rows at a time; of a change feed, all as a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.peek.penstock_reads import Offset, PenstockRead, Reader, RowScope, row_scope
from penstock.peek.query import Deadline, RowCollector
from penstock.spark.error_boundary import original_error
from penstock.spark.internals.plans import replace_reads

_FIRST_ROWS = 1_000
_GROWTH = 8
_MOST_AT_ONCE = 131_072
_MOST = 150_000
"""Rows that this process reads before it leaves the rest to Spark's executors."""
_ESTIMATE_ROWS = 5_000
"""Rows to read before the number of further rows is estimated."""
_MARGIN, _MAX_FACTOR = 1.25, 32
"""How many times the estimate, and at most how many times the rows read so far, to read at once."""
_CANCEL_SECONDS, _WAIT_SECONDS = 0.2, 3_600.0
_RANGE_ROWS = 20_000
"""Rows of a range of whole commits, which goes through the transformations at once."""


class LocalRead:
    """A read of the first rows of a streaming DataFrame over one read of Penstock's own."""

    def __init__(self, frame: DataFrame, own: PenstockRead) -> None:
        self._frame = frame
        self._own = own
        self._whole = own.has_whole_commits and row_scope(frame) is not RowScope.ROW
        self._read = self._passed = 0

    def into(self, rows: RowCollector, deadline: Deadline) -> DataFrame | None:
        """Read until all rows are collected or time is over; return what Spark has to read instead."""
        reader = self._own.reader(_RANGE_ROWS if self._own.has_whole_commits else None)
        start = reader.initialOffset()
        while not rows.is_enough and not deadline.is_over:
            end = reader.latestOffset(start, ReadAllAvailable())
            if end == start:
                self._read = self._passed = 0
                deadline.pause()
                continue
            kept = len(rows.tables)
            if not self._read_range(reader, start, end, rows, deadline):
                rows.keep_first(kept)
                if self._own.has_whole_commits:
                    return self._from({**end, "to": end["from"]})
                end = self._read_by_spark(start, rows, deadline)
            start = end
            deadline.reset_pause()
        return None

    def _from(self, start: Offset) -> DataFrame:
        return replace_reads(self._frame, lambda _: self._own.stream(start))

    def _read_range(
        self, reader: Reader, start: Offset, end: Offset, rows: RowCollector, deadline: Deadline
    ) -> bool:
        """Read one range; return False if it is too large for this process."""
        tasks = reader.partitions(start, end)
        batches = (batch for task in tasks for batch in reader.read(task))
        for chunk in self._chunks(batches, rows.missing):
            self._read += chunk.num_rows
            if self._read > _MOST and self._own.can_resume:
                return False
            self._take(chunk, rows, deadline)
            if rows.is_enough or deadline.is_over:
                break
            if (
                self._read >= _ESTIMATE_ROWS
                and self._estimate(rows) > _MOST
                and not self._own.has_whole_commits
            ):
                return False
        return True

    def _estimate(self, rows: RowCollector) -> int:
        """Return how many rows should yield the missing ones."""
        return int(_MARGIN * rows.missing * self._read / max(self._passed, 1))

    def _read_by_spark(self, start: Offset, rows: RowCollector, deadline: Deadline) -> Offset:
        """Have Spark's executors read the next rows of a queue, and return their end."""
        count = min(max(self._estimate(rows), _MOST), _MAX_FACTOR * self._read)
        end = self._own.reader(count).latestOffset(start, ReadAllAvailable())
        read = self._own.batch(end, count)
        self._add(replace_reads(self._frame, lambda _: read), rows, deadline)
        self._read += count
        return end

    def _chunks(self, batches: Iterator[pa.RecordBatch], missing: int) -> Iterator[pa.Table]:
        if not self._whole:
            yield from _sized(batches, min(max(_FIRST_ROWS, missing), _MOST_AT_ONCE))
        elif whole := list(_until_too_many(batches) if self._own.can_resume else batches):
            yield pa.Table.from_batches(whole)

    def _take(self, chunk: pa.Table, rows: RowCollector, deadline: Deadline) -> None:
        spark = self._frame.sparkSession
        static = spark.createDataFrame(chunk, self._own.schema)
        self._add(replace_reads(self._frame, lambda _: static), rows, deadline)

    def _add(self, frame: DataFrame, rows: RowCollector, deadline: Deadline) -> None:
        before = rows.rows
        with _cancelled_at(deadline, self._frame.sparkSession):
            rows.add(frame.limit(rows.missing).toArrow())
        self._passed += rows.rows - before


def _sized(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Yield tables of ``size`` rows, each larger than the one before, which did not yield enough."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        rest = batch
        while rows + rest.num_rows >= size:
            yield pa.Table.from_batches([*waiting, rest.slice(0, size - rows)])
            rest = rest.slice(size - rows)
            waiting, rows, size = [], 0, min(size * _GROWTH, _MOST_AT_ONCE)
        if rest.num_rows:
            waiting.append(rest)
            rows += rest.num_rows
    if waiting:
        yield pa.Table.from_batches(waiting)


def _until_too_many(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        if rows > _MOST:
            return


@contextmanager
def _cancelled_at(deadline: Deadline, spark: SparkSession) -> Iterator[None]:
    """Cancel Spark's jobs of the block at the deadline, without an error."""
    tag, is_done = f"penstock-take-{uuid4().hex}", threading.Event()
    spark.sparkContext.addJobTag(tag)
    threading.Thread(target=_cancel_jobs, args=[spark, tag, deadline, is_done], daemon=True).start()
    try:
        yield
    except Exception as error:
        if not deadline.is_over:
            raise original_error(error) from None
    finally:
        is_done.set()
        spark.sparkContext.removeJobTag(tag)


def _cancel_jobs(spark: SparkSession, tag: str, deadline: Deadline, is_done: threading.Event) -> None:
    if deadline.left is None:
        return
    # Repeatedly, because a job that has not started yet is not cancelled.
    while not is_done.wait(max(deadline.at_most(_WAIT_SECONDS), _CANCEL_SECONDS)):
        if deadline.is_over:
            spark.sparkContext.cancelJobsWithTag(tag)
