"""Penstock's own streaming reads, without side effects: no consumer moves or gets an owner, and no slot
advances.

This process reads the first rows and transforms them chunk by chunk. That avoids what starting a streaming
query takes: a process for the source, a checkpoint and the planning of micro-batches. If these rows do not
yield enough, Spark's executors read more. From a queue they read an estimated number of rows at a time. A
change feed they read as a stream.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol, TypeAlias
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from penstock.arrow.arrays import first_rows
from penstock.changes.data_source import FORMAT as CHANGES
from penstock.changes.data_source import STREAM, ChangesStreamReader, read_options
from penstock.json_text import Json
from penstock.peek.query import Deadline, RowCollector
from penstock.queue.store import open_store
from penstock.spark.error_boundary import iterate_in_worker, original_error
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.plans import StreamingRead, replace_reads
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.options import STREAM_SOURCE, source_options, with_defaults
from penstock.spark.schemas import projection, source_schema
from penstock.spark.session import session_defaults
from penstock.spark.stream_reader import QueueStreamReader

_READ = "StreamingRelationV2"


class RowScope(IntEnum):
    """The input rows on which an output row of a plan may depend."""

    ROW = 1
    """One row."""
    MICRO_BATCH = 2
    """The rows of one micro-batch."""
    STREAM = 3
    """All earlier rows, which Spark keeps as state. Also used if the scope is unknown."""


def row_scope(frame: DataFrame) -> RowScope:
    """Return the scope of a plan over one streaming read; STREAM if the plan has several reads."""
    names = [node.name for node in plan_tree(frame).walk()]
    operators = [traits_of(name) for name in names if name != _READ]
    if names.count(_READ) != 1 or not all(map(_is_local, operators)):
        return RowScope.STREAM
    return RowScope.MICRO_BATCH if any(Trait.PER_BATCH in each for each in operators) else RowScope.ROW


def may_keep_state(frame: DataFrame) -> bool:
    """Return whether a task may keep state, so that it must read all rows to commit it."""
    names = {node.name for node in plan_tree(frame).walk() if node.children}
    return not all(name == "Union" or _is_local(traits_of(name)) for name in names)


def _is_local(operator: Trait) -> bool:
    """Return whether an operator's output rows depend on at most one micro-batch."""
    return bool(operator & (Trait.PER_ROW | Trait.PER_BATCH))


QUEUE = "penstock"
_LIMITS = ("maxrowsperpartition", "maxrowspertrigger", "maxbytespertrigger", "maxcommitspertrigger")
_STARTS = ("startingoffsets", "startingtimestamp", "startingversion", "startingboundinclusive")

Offset: TypeAlias = Json


class Reader(Protocol):
    """Those methods of Penstock's two streaming readers that this module calls."""

    def initialOffset(self) -> Offset: ...
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset: ...
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]: ...
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]: ...


@dataclass(frozen=True)
class PenstockRead:
    """A read of a queue or of a change feed."""

    spark: SparkSession
    format: str
    options: Mapping[str, str] = field(repr=False)
    """The options, with names in lower case and without the consumer."""
    schema: StructType

    @classmethod
    def of(cls, spark: SparkSession, read: StreamingRead) -> PenstockRead | None:
        """Return the read of a plan's leaf; None if it reads another source."""
        if read.format == QUEUE:
            return cls(spark, QUEUE, _without_consumer(spark, read.options), read.schema)
        if read.format == CHANGES:
            return cls(spark, CHANGES, {**read.options, "readonly": "true"}, read.schema)
        return None

    @property
    def has_whole_commits(self) -> bool:
        """Whether micro-batches consist of whole commits, which transformations may rely on."""
        return self.format == CHANGES

    @property
    def can_resume(self) -> bool:
        """Whether a stream can start at an offset. The bounds of a range must be both versions or both
        times.
        """
        return "endingtimestamp" not in self.options

    def reader(self, rows: int | None) -> Reader:
        """Return a reader for this process, whose ranges have ``rows`` rows. Ranges of a feed consist of
        whole commits.
        """
        if self.format == CHANGES:
            feed_options = read_options(self.options, STREAM, "streaming read of changes")
            most = min(filter(None, (rows, feed_options.max_rows)), default=None)
            return ChangesStreamReader(replace(feed_options, max_rows=most), self.schema)
        options = source_options(self.options, streaming=True)
        if rows is not None:
            options = replace(options, rows_per_task=-(-rows // self.spark.sparkContext.defaultParallelism))
        options = replace(
            options, max_rows_per_trigger=rows, max_rows_per_partition=None, max_bytes_per_trigger=None
        )
        check_store_reach(options.url, self.spark.conf.get("spark.master", None))
        queue = open_store(options.url, verify=True).queue(options.queue).record
        columns = projection(self.schema, source_schema(queue.schema, options.metadata_columns))
        return QueueStreamReader(options, queue, columns)

    def stream(self, after: Offset | None = None, *, rows: int | None = None) -> DataFrame:
        """Return the read for a streaming query. A feed is read after the offset ``after``, and ``rows`` is a
        default limit.
        """
        options = dict(self.options)
        if after is not None:
            options = {name: value for name, value in options.items() if name not in _STARTS}
            options["startingversion"] = str(int(after["to"]) + 1)
        if rows is not None and not options.keys() & set(_LIMITS):
            options["maxrowspertrigger"] = str(rows)
        return self.spark.readStream.format(self.format).schema(self.schema).options(**options).load()

    def rows_between(self, reader: Reader, start: Offset, end: Offset) -> DataFrame:
        """Return the rows of a range as a static DataFrame.

        It avoids the planning of a data source, for which Spark starts a Python process and takes 50 ms.
        """
        read = _ReadRanges(reader, reader.partitions(start, end))
        count = len(read.tasks)
        return self.spark.range(0, count, 1, count).mapInArrow(read, self.schema)


@dataclass(frozen=True)
class _ReadRanges:
    """Function for ``mapInArrow`` that reads the ranges of tasks, by the tasks' numbers."""

    reader: Reader
    tasks: Sequence[InputPartition]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = (number for batch in batches for number in batch.column(0).to_pylist())
        return iterate_in_worker(rows for number in numbers for rows in self.reader.read(self.tasks[number]))


def _without_consumer(spark: SparkSession, options: Mapping[str, str]) -> dict[str, str]:
    """Return a queue's options with the consumer replaced by its current offsets."""
    complete = with_defaults(options, session_defaults(spark), STREAM_SOURCE)
    parsed = source_options(complete, streaming=True)
    complete.pop("path", None)
    complete["queue"] = parsed.queue
    if parsed.consumer is None:
        return complete
    check_store_reach(parsed.url, spark.conf.get("spark.master", None))
    offsets = open_store(parsed.url, verify=True).consumer(parsed.consumer).offsets(parsed.queue)
    # startingOffsets keeps Spark from using the session's default consumer instead.
    del complete["consumer"]
    return {**complete, "startingoffsets": json.dumps(offsets)}


_FIRST_ROWS = 1_000
_GROWTH = 8
_MOST_AT_ONCE = 131_072
_MOST = 150_000
"""The number of rows that this process reads before it leaves the rest to Spark's executors."""
_ESTIMATE_ROWS = 1_000
"""The number of rows to read before estimating how many more are needed."""
_MARGIN = 1.25
"""The factor by which to read more than the estimate."""
_CANCEL_SECONDS, _WAIT_SECONDS = 0.2, 3_600.0
_RANGE_ROWS = 20_000
"""The number of rows in a range of whole commits, which is transformed in one piece."""


class LocalRead:
    """A read of the first rows of a streaming DataFrame, over a single read of a Penstock source."""

    def __init__(self, frame: DataFrame, own: PenstockRead, rows: RowCollector, deadline: Deadline) -> None:
        self._frame = frame
        self._own = own
        self._rows = rows
        self._deadline = deadline
        self._whole = own.has_whole_commits and row_scope(frame) is not RowScope.ROW
        self._read = self._passed = 0

    def collect(self) -> DataFrame | None:
        """Read until all rows are collected or the deadline has passed; return what Spark has to read
        instead.
        """
        reader = self._own.reader(_RANGE_ROWS if self._own.has_whole_commits else None)
        start = reader.initialOffset()
        while not self._is_done:
            end = reader.latestOffset(start, ReadAllAvailable())
            if end == start:
                self._read = self._passed = 0
                self._deadline.pause()
                continue
            kept = len(self._rows.tables)
            if not self._read_range(reader, start, end):
                self._rows.keep_first(kept)
                if self._own.has_whole_commits:
                    return self._over(self._own.stream({**end, "to": end["from"]}))
                end = self._read_by_spark(start)
            start = end
            self._deadline.reset_pause()
        return None

    @property
    def _is_done(self) -> bool:
        return self._rows.is_enough or self._deadline.is_over

    def _read_range(self, reader: Reader, start: Offset, end: Offset) -> bool:
        """Read one range; return False if it is too large for this process."""
        tasks = reader.partitions(start, end)
        batches = (batch for task in tasks for batch in reader.read(task))
        for chunk in self._chunks(batches):
            self._read += chunk.num_rows
            if self._read > _MOST and self._own.can_resume:
                return False
            self._transform(self._frame.sparkSession.createDataFrame(chunk, self._own.schema))
            if self._is_done:
                break
            if self._read >= _ESTIMATE_ROWS and self._estimate() > _MOST and not self._own.has_whole_commits:
                return False
        return True

    def _estimate(self) -> int:
        """Estimate how many rows to read to get the missing ones."""
        return int(_MARGIN * self._rows.missing * self._read / max(self._passed, 1))

    def _read_by_spark(self, start: Offset) -> Offset:
        """Have Spark's executors read the next rows of a queue, and return their end."""
        count = max(self._estimate(), _MOST)
        reader = self._own.reader(count)
        end = reader.latestOffset(start, ReadAllAvailable())
        self._transform(self._own.rows_between(reader, start, end))
        self._read += count
        return end

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        if not self._whole:
            yield from _sized(batches, min(max(_FIRST_ROWS, self._rows.missing), _MOST_AT_ONCE))
        # Read one row more than this process may transform, which shows that there are too many.
        elif whole := list(first_rows(batches, _MOST + 1) if self._own.can_resume else batches):
            yield pa.Table.from_batches(whole)

    def _transform(self, read: DataFrame) -> None:
        """Apply the transformations to rows that were read, and collect the first rows of the result."""
        before = self._rows.rows
        with _cancelled_at(self._deadline, self._frame.sparkSession):
            self._rows.add(self._over(read).limit(self._rows.missing).toArrow())
        self._passed += self._rows.rows - before

    def _over(self, read: DataFrame) -> DataFrame:
        """Return the DataFrame with another read in place of the original one."""
        return replace_reads(self._frame, lambda _: read)


def _sized(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Yield tables of ``size`` rows at first, and of more each time, since the previous ones did not yield
    enough.
    """
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


@contextmanager
def _cancelled_at(deadline: Deadline, spark: SparkSession) -> Iterator[None]:
    """Cancel the block's Spark jobs at the deadline, without an error."""
    tag, is_done = f"penstock-take-{uuid4().hex}", threading.Event()

    def cancel() -> None:
        # Cancel repeatedly, because this does not cancel jobs that have not started yet.
        while not is_done.wait(max(deadline.at_most(_WAIT_SECONDS), _CANCEL_SECONDS)):
            if deadline.is_over:
                spark.sparkContext.cancelJobsWithTag(tag)

    spark.sparkContext.addJobTag(tag)
    threading.Thread(target=cancel, daemon=True).start()
    try:
        yield
    except Exception as error:
        if not deadline.is_over:
            raise original_error(error) from None
    finally:
        is_done.set()
        spark.sparkContext.removeJobTag(tag)
