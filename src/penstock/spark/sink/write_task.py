"""Write tasks: rows are split into segments and staged or appended, and the driver gets a summary."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from penstock.arrow.coerce import conform
from penstock.commit.protocol import append_task
from penstock.queue.open_stores import open_store
from penstock.queue.placement import Placement, placement_of
from penstock.spark.internals.gc_tuning import freeze_imports
from penstock.spark.options import SinkOptions
from penstock.spark.session_store import check_reach
from penstock.store import staging
from penstock.store.log.segmenting import SEGMENT_RAW_BYTES, Segment
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.ledger import LedgerKey
from penstock.store.staging import Attempt

FLUSH_SEGMENTS = 8
FLUSH_BYTES = FLUSH_SEGMENTS * SEGMENT_RAW_BYTES
"""How much Arrow data a task buffers before it stores it."""


@dataclass(frozen=True)
class StreamTask:
    """The micro-batch of a task, from the task's local properties (Spark 4.2 and 4.3)."""

    query_id: str
    batch_id: int
    checkpoint_root: str | None = field(repr=False)
    """The session's checkpoint location, for queries without one of their own.

    The URL may contain a password.
    """

    @classmethod
    def current(cls) -> StreamTask:
        context = TaskContext.get()
        if context is None:
            raise RuntimeError("a stream can only be written in a Spark task")
        return cls(
            str(context.getLocalProperty("sql.streaming.queryId")),
            int(str(context.getLocalProperty("streaming.sql.batchId"))),
            context.getLocalProperty("spark.sql.streaming.checkpointLocation"),
        )

    def location(self, options: SinkOptions) -> str | None:
        """Return the checkpoint's location: Spark does not pass it if the session's setting is used."""
        if options.checkpoint is not None or self.checkpoint_root is None or options.query_name is None:
            return options.checkpoint
        return f"{self.checkpoint_root.rstrip('/')}/{options.query_name}"


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """The summary of a task for the driver."""

    task: int
    attempt: str
    segments: int
    rows: int
    partitions: int
    """The number of the queue's partitions when the task placed its rows."""
    crowded: tuple[int, ...] = ()
    """Partitions that may have small segments to compact."""
    stream: StreamTask | None = None


@dataclass
class SegmentGroups:
    """Splits the rows of a task into groups of segments; a group is stored in one transaction."""

    queue: QueueRecord
    placement: Placement
    fallback: int
    """The partition of rows without a key."""
    max_rows: int
    rows: int = 0
    """How many rows there were so far."""
    _buffered: list[pa.RecordBatch] = field(default_factory=list)

    def groups(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Segment]]:
        """Yield groups of a bounded number of segments, in the order of the rows."""
        rows = size = 0
        for batch in batches:
            if batch.num_rows == 0:
                continue
            conformed = conform(batch, self.queue.schema)
            self._buffered.append(conformed)
            self.rows += batch.num_rows
            rows, size = rows + batch.num_rows, size + conformed.nbytes
            if rows >= self.max_rows * FLUSH_SEGMENTS or size >= FLUSH_BYTES:
                yield self._segments()
                rows = size = 0
        if self._buffered:
            yield self._segments()

    def _segments(self) -> list[Segment]:
        batches, self._buffered = self._buffered, []
        # A single batch, as in a continuous query, needs no table.
        table = batches[0] if len(batches) == 1 else pa.Table.from_batches(batches, schema=self.queue.schema)
        return self.placement.segments(table, None, self.fallback, max_rows=self.max_rows)


class TaskWriter:
    """One attempt of the running task to write its rows into a queue, with a method for each guarantee."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        check_reach(options.url, None)
        freeze_imports()
        context = TaskContext.get()
        self._task = 0 if context is None else int(context.partitionId())
        self._attempt = str(uuid.uuid4())
        self._queue = queue
        self._database = open_store(options.url).database
        self._placement = placement_of(self._database, queue)
        self._pieces = SegmentGroups(queue, self._placement, self._task, options.max_rows_per_write)

    def stage(self, app_id: str, batch_id: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Stage the rows, invisible to readers until the driver commits."""
        attempt = Attempt(app_id, batch_id, self._task, self._attempt)
        count = 0
        for group in self._pieces.groups(batches):
            count += staging.stage_segments(self._database, self._queue, attempt, group, count)
        return self._wrote(count)

    def append(self, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Append the rows group by group; a repeated task repeats them."""
        appended = [
            append_task(self._database, self._queue, None, group) for group in self._pieces.groups(batches)
        ]
        return self._wrote(len(appended), *(each.crowded for each in appended if each is not None))

    def append_once(
        self,
        key: LedgerKey,
        origin: str,
        batches: Iterator[pa.RecordBatch],
        *,
        covers: str = "",
        new_sink: bool,
    ) -> TaskResult:
        """Append all rows in one transaction; for a repeated task this is a no-op.

        Parameters
        ----------
        origin
            The checkpoint of the micro-batch.
        covers
            A digest of its input; empty if unknown.
        new_sink
            Whether the queue may have no rows of the query although the checkpoint is not new.
        """
        segments = [segment for group in self._pieces.groups(batches) for segment in group]
        appended = append_task(
            self._database, self._queue, key, segments, origin=origin, covers=covers, new_sink=new_sink
        )
        return self._wrote(len(segments), () if appended is None else appended.crowded)

    @property
    def task(self) -> int:
        return self._task

    def _wrote(self, segments: int, *crowded: tuple[int, ...]) -> TaskResult:
        return TaskResult(
            self._task,
            self._attempt,
            segments,
            self._pieces.rows,
            self._placement.partitions,
            tuple(sorted({partition for each in crowded for partition in each})),
        )
