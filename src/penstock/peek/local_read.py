"""The first rows of a queue or a change feed, read by this process and put through the transformations a chunk at a time.

A streaming query would start a process for its source, write a checkpoint and plan micro-batches first. Where the first rows do
not hold enough, Spark's executors are the ones to read on: of a queue as many rows at a time as may hold the others, by how many
there were among those before; of a change feed all, as a stream.
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
from penstock.pipeline.failures import original_error
from penstock.spark.internals.plan_rewrite import replace_reads

_FIRST_ROWS = 1_000
_GROWTH = 8
_MOST_AT_ONCE = 131_072
_MOST = 150_000
"""Rows that this process reads before it leaves the rest to Spark's executors."""
_TELLING = 5_000
"""Rows that tell how many more there have to be."""
_SPARE, _LEAP = 1.25, 32
"""By how much more than it takes on average is read at once, and than what has been read before."""
_AGAIN, _LONG = 0.2, 3_600.0
_RANGE_ROWS = 20_000
"""Rows of a range of whole commits, which goes through the transformations at once."""


class LocalRead:
    """One look at a stream.

    Parameters
    ----------
    frame
        The streaming DataFrame, over that one read.
    own
        What it reads.
    """

    def __init__(self, frame: DataFrame, own: PenstockRead) -> None:
        self._frame = frame
        self._own = own
        self._whole = own.has_whole_commits and row_scope(frame) is not RowScope.ROW
        self._read = self._passed = 0

    def into(self, found: RowCollector, clock: Deadline) -> DataFrame | None:
        """Look until there are enough rows or the time is over; the DataFrame of the rest, where that is for Spark to read."""
        reader = self._own.reader(_RANGE_ROWS if self._own.has_whole_commits else None)
        stands = reader.initialOffset()
        while not found.is_enough and not clock.is_over:
            end = reader.latestOffset(stands, ReadAllAvailable())
            if end == stands:
                self._read = self._passed = 0
                clock.rest()
                continue
            kept = len(found.tables)
            if not self._range(reader, stands, end, found, clock):
                found.forget_behind(kept)
                if self._own.has_whole_commits:
                    return self._from({**end, "to": end["from"]})
                end = self._ahead(stands, found, clock)
            stands = end
            clock.wake()
        return None

    def _from(self, stands: Offset) -> DataFrame:
        return replace_reads(self._frame, lambda _: self._own.stream(stands))

    def _range(
        self, reader: Reader, start: Offset, end: Offset, found: RowCollector, clock: Deadline
    ) -> bool:
        """Take from one range; False where there is too much of it to be read here."""
        tasks = reader.partitions(start, end)
        batches = (batch for task in tasks for batch in reader.read(task))
        for chunk in self._chunks(batches, found.lacking):
            self._read += chunk.num_rows
            if self._read > _MOST and self._own.can_go_on:
                return False
            self._take(chunk, found, clock)
            if found.is_enough or clock.is_over:
                break
            if self._read >= _TELLING and self._needs(found) > _MOST and not self._own.has_whole_commits:
                return False
        return True

    def _needs(self, found: RowCollector) -> int:
        """How many rows should hold those that are lacking."""
        return int(_SPARE * found.lacking * self._read / max(self._passed, 1))

    def _ahead(self, stands: Offset, found: RowCollector, clock: Deadline) -> Offset:
        """Take from the next rows of a queue, which Spark's executors read; their end."""
        rows = min(max(self._needs(found), _MOST), _LEAP * self._read)
        end = self._own.reader(rows).latestOffset(stands, ReadAllAvailable())
        read = self._own.batch(end, rows)
        self._add(replace_reads(self._frame, lambda _: read), found, clock)
        self._read += rows
        return end

    def _chunks(self, batches: Iterator[pa.RecordBatch], lacking: int) -> Iterator[pa.Table]:
        if not self._whole:
            yield from _sized(batches, min(max(_FIRST_ROWS, lacking), _MOST_AT_ONCE))
        elif there := list(_until_too_many(batches) if self._own.can_go_on else batches):
            yield pa.Table.from_batches(there)

    def _take(self, chunk: pa.Table, found: RowCollector, clock: Deadline) -> None:
        spark = self._frame.sparkSession
        self._add(
            replace_reads(self._frame, lambda _: spark.createDataFrame(chunk, self._own.schema)), found, clock
        )

    def _add(self, rows: DataFrame, found: RowCollector, clock: Deadline) -> None:
        before = found.rows
        with _ended_in_time(self._frame.sparkSession, clock):
            found.add(rows.limit(found.lacking).toArrow())
        self._passed += found.rows - before


def _sized(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """The rows in tables of so many rows, the next ones larger: those before have not held enough."""
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
def _ended_in_time(spark: SparkSession, clock: Deadline) -> Iterator[None]:
    """Spark's jobs in here are interrupted when the time is over, and that is no error."""
    tag, is_done = f"penstock-take-{uuid4().hex}", threading.Event()
    spark.sparkContext.addJobTag(tag)
    interrupting = threading.Thread(target=_interrupt, args=[spark, tag, clock, is_done], daemon=True)
    interrupting.start()
    try:
        yield
    except Exception as error:
        if not clock.is_over:
            raise original_error(error) from None
    finally:
        is_done.set()
        spark.sparkContext.removeJobTag(tag)


def _interrupt(spark: SparkSession, tag: str, clock: Deadline, is_done: threading.Event) -> None:
    if clock.left is None:
        return
    # Again and again: a job that has not begun yet hears nothing of it.
    while not is_done.wait(max(clock.at_most(_LONG), _AGAIN)):
        if clock.is_over:
            spark.sparkContext.cancelJobsWithTag(tag)
