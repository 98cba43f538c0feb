"""Writers to a queue: for batch writes, which are atomic, and for streaming writes with each guarantee.

A task assigns its rows to partitions, and stages or appends them as segments. The driver then commits what
the tasks report.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.arrow.coerce import conform
from penstock.commit.micro_batch import QueueTarget
from penstock.commit.protocol import append_task, commit_batch, record_batch
from penstock.errors import CommitRefusedError, condition_of
from penstock.objects.opened import OpenedStorages
from penstock.parallel import ahead
from penstock.queue.placement import Placement, placement_of
from penstock.queue.store import open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.internals.python_workers import check_store_reach, freeze_imports
from penstock.spark.options import SinkOptions
from penstock.store import staging
from penstock.store.database import Transaction
from penstock.store.log.partition_log import Appended
from penstock.store.log.payloads import object_write_time
from penstock.store.log.segmenting import SEGMENT_RAW_BYTES, Segment
from penstock.store.log.written import TaskSegments
from penstock.store.records.catalog import QueueRecord, queue_sink
from penstock.store.records.ledger import LedgerKey
from penstock.store.staging import Attempt

log = logging.getLogger("penstock.spark")

T = TypeVar("T")
FLUSH_SEGMENTS = 8
FLUSH_BYTES = FLUSH_SEGMENTS * SEGMENT_RAW_BYTES
"""The bytes of Arrow data that a task buffers before it stores them."""
OBJECTS_FLUSH_BYTES = 2 * SEGMENT_RAW_BYTES
"""The bytes that a task buffers before it writes objects; while it writes them, it buffers as many again."""
_storages = OpenedStorages()
"""The storages that are open in this worker, which Spark uses for many tasks."""
_BATCH = 0
_STATEFUL = (
    "guarantee=idempotent needs a stateless query, because a repeated micro-batch of a stateful one may "
    "have other tasks: use guarantee=exactly_once"
)


@dataclass(frozen=True)
class StreamTask:
    """A task's micro-batch, from its local properties (Spark 4.2 and 4.3)."""

    query_id: str
    batch_id: int
    checkpoint_root: str | None = field(repr=False)
    """The session's checkpoint location, for queries without their own; the URL may have a password."""

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
        """Return the checkpoint's location, which Spark does not pass if the session's setting is used."""
        if options.checkpoint is not None or self.checkpoint_root is None or options.query_name is None:
            return options.checkpoint
        return f"{self.checkpoint_root.rstrip('/')}/{options.query_name}"


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """A task's report to the driver."""

    task: int
    attempt: str
    segments: int
    rows: int
    partitions: int
    """The number of the queue's partitions when the task placed its rows."""
    to_compact: tuple[int, ...] = ()
    """Partitions that may have small segments to compact."""
    stream: StreamTask | None = None
    written: tuple[TaskSegments, ...] = ()
    """What the task has written into objects; the commit enters it in the database."""


@dataclass(frozen=True)
class ObjectWrites:
    """What tasks need to write rows into objects without a database connection; the driver creates it."""

    store_uuid: str
    location: str
    begun_at: int
    """When the write began, before any task started, in microseconds since 1970 by the database's clock."""
    placement: Placement

    @classmethod
    def of(cls, options: SinkOptions, queue: QueueRecord) -> ObjectWrites | None:
        """Return what the tasks need; None for a queue whose rows are in the database."""
        if queue.payloads is None:
            return None
        database = open_store(options.url).database
        now = object_write_time(database, queue.payloads)
        return cls(database.uuid, queue.payloads, now, placement_of(database, queue))


@dataclass
class SegmentGroups:
    """Divides the rows of a task into groups of segments; each group is stored in one transaction."""

    queue: QueueRecord
    placement: Placement
    fallback: int
    """The partition of rows without a key."""
    max_rows: int
    flush_bytes: int | None = None
    """The bytes of Arrow data in a group; ``FLUSH_BYTES`` when None."""
    rows: int = 0
    """The number of rows so far."""
    _buffered: list[pa.RecordBatch] = field(default_factory=list)

    def groups(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Segment]]:
        """Yield groups of a bounded number of segments, in the order of the rows."""
        rows = size = 0
        flush_bytes = self.flush_bytes or FLUSH_BYTES
        for batch in batches:
            if batch.num_rows == 0:
                continue
            conformed = conform(batch, self.queue.schema)
            self._buffered.append(conformed)
            self.rows += batch.num_rows
            rows, size = rows + batch.num_rows, size + conformed.nbytes
            if rows >= self.max_rows * FLUSH_SEGMENTS or size >= flush_bytes:
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
    """Writer for an attempt of the running task, with a method for each guarantee."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        check_store_reach(options.url, None)
        freeze_imports()
        self.task = _task_number()
        self._attempt = str(uuid.uuid4())
        self._queue = queue
        self._database = open_store(options.url).database
        self._placement = placement_of(self._database, queue)
        self._groups = SegmentGroups(queue, self._placement, self.task, options.max_rows_per_write)

    def stage(self, app_id: str, batch_id: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Stage the rows; they stay invisible until the driver commits."""
        attempt = Attempt(app_id, batch_id, self.task, self._attempt)
        count = 0
        for group in self._groups.groups(batches):
            count += staging.stage_segments(self._database, self._queue, attempt, group, count)
        return self._result(count, [])

    def append(self, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Append the rows group by group; a repeated task appends them again."""
        appended = [
            append_task(self._database, self._queue, None, group) for group in self._groups.groups(batches)
        ]
        return self._result(len(appended), appended)

    def append_once(
        self,
        key: LedgerKey,
        origin: str,
        batches: Iterator[pa.RecordBatch],
        *,
        covers: str = "",
        new_sink: bool,
    ) -> TaskResult:
        """Append all rows in one transaction; this is a no-op for a repeated task.

        ``origin`` is the query's id, and ``covers`` is a digest of the micro-batch's input, empty if unknown.
        """
        segments = [segment for group in self._groups.groups(batches) for segment in group]
        appended = append_task(
            self._database, self._queue, key, segments, origin=origin, input_id=covers, new_sink=new_sink
        )
        return self._result(len(segments), [appended])

    def _result(self, segments: int, appended: Sequence[Appended | None]) -> TaskResult:
        to_compact = {
            partition for append in appended if append is not None for partition in append.to_compact
        }
        return TaskResult(
            self.task,
            self._attempt,
            segments,
            self._groups.rows,
            self._placement.partitions,
            tuple(sorted(to_compact)),
        )


def write_objects(
    options: SinkOptions, queue: QueueRecord, objects: ObjectWrites, batches: Iterator[pa.RecordBatch]
) -> TaskResult:
    """Write the rows of the running task into objects; the commit makes them visible."""
    freeze_imports()
    task = _task_number()
    storage = _storages.at(objects.location)
    groups = SegmentGroups(
        queue, objects.placement, task, options.max_rows_per_write, flush_bytes=OBJECTS_FLUSH_BYTES
    )
    # The next rows are received and compressed while a group is written.
    written = tuple(
        TaskSegments.of(storage, objects.store_uuid, queue.queue_id, group, objects.begun_at)
        for group in ahead(groups.groups(batches))
    )
    partitions = objects.placement.partitions
    return TaskResult(task, str(uuid.uuid4()), 0, groups.rows, partitions, written=written)


def written_segments(results: Sequence[TaskResult]) -> list[TaskSegments]:
    """Return what tasks have written into objects, in the order of the tasks."""
    return [segments for result in sorted(results, key=attrgetter("task")) for segments in result.written]


def _task_number() -> int:
    context = TaskContext.get()
    return 0 if context is None else int(context.partitionId())


@without_tracebacks
class QueueWriter(DataSourceArrowWriter):
    """Writer for a batch write."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        self._options = options
        self._queue = queue
        self._job = f"job:{uuid.uuid4()}"
        self._objects = ObjectWrites.of(options, queue)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task; they stay invisible until the commit."""
        if self._objects is not None:
            return write_objects(self._options, self._queue, self._objects, iterator)
        return TaskWriter(self._options, self._queue).stage(self._job, _BATCH, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the rows of all tasks visible, as one append."""
        store = open_store(self._options.url)
        results = [message for message in messages if isinstance(message, TaskResult)]
        attempts = {message.attempt: message.segments for message in results}
        written = written_segments(results)

        def publish(tx: Transaction) -> Appended:
            if self._objects is None:
                return staging.promote(tx, self._queue, self._job, _BATCH, attempts)
            return staging.publish_written(tx, self._queue, self._job, _BATCH, written)

        if any(attempts.values()) or written:
            store.schedule_maintenance(self._queue, store.database.run(publish).to_compact)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the staged rows; if that fails, they stay invisible and are cleaned up later."""
        # An error here would hide the error that caused the abort.
        with contextlib.suppress(Exception):
            database = open_store(self._options.url).database
            database.run(lambda tx: staging.discard(tx, self._queue, self._job, _BATCH))


@without_tracebacks
class QueueStreamWriter(DataSourceStreamArrowWriter):
    """Writer for a streaming query; Spark creates one for every micro-batch."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        self._options = options
        self._queue = queue
        is_exactly_once = options.guarantee == "exactly_once"
        self._objects = ObjectWrites.of(options, queue) if is_exactly_once else None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task, on an executor."""
        stream = StreamTask.current()
        if self._objects is not None:
            result = write_objects(self._options, self._queue, self._objects, iterator)
            return replace(result, stream=stream)
        writer = TaskWriter(self._options, self._queue)
        app_id = self._options.app_id or stream.query_id
        if self._options.guarantee == "exactly_once":
            result = writer.stage(app_id, stream.batch_id, iterator)
        elif self._options.guarantee == "idempotent":
            covers = self._from_checkpoint(
                stream, lambda checkpoint: checkpoint.input_digest(stream.batch_id)
            )
            result = writer.append_once(
                LedgerKey(queue_sink(self._queue), app_id, stream.batch_id, writer.task),
                stream.query_id,
                self._stateless(stream, iterator),
                covers=covers or "",
                new_sink=self._options.allow_new_sink,
            )
        else:
            result = writer.append(iterator)
        return replace(result, stream=stream)

    def _stateless(self, stream: StreamTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task; at the end, refuse them if the query keeps state."""
        yield from batches
        # A task of an idempotent write appends visible rows, so the commit would refuse them too late.
        if self._from_checkpoint(stream, Checkpoint.stateful):
            raise CommitRefusedError(_STATEFUL, condition="COMMIT_REFUSED.NOT_IDEMPOTENT")

    def _from_checkpoint(self, stream: StreamTask, read: Callable[[Checkpoint], T]) -> T | None:
        """Read from the checkpoint; None if this executor cannot read it, which only the driver has to."""
        location = stream.location(self._options)
        try:
            return None if location is None else read(Checkpoint(location))
        except Exception as error:
            log.debug(
                "the checkpoint cannot be read from this executor: %s",
                type(error).__name__,
                extra={"action": "checkpoint_unread", "error": condition_of(error)},
            )
            return None

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch, on the driver."""
        results = [message for message in messages if isinstance(message, TaskResult)]
        if not results:
            raise CommitRefusedError(
                "no task has reported rows: with Spark's continuous trigger, all rows that are written to a "
                "Python sink are lost. Use a processing-time trigger",
                condition="COMMIT_REFUSED.CONTINUOUS_TRIGGER",
            )
        to_compact = {partition for message in results for partition in message.to_compact}
        if self._options.guarantee == "at_least_once":
            self._record_batch(results, batchId)
        else:
            appended = self._commit_batch(results, batchId)
            to_compact.update(() if appended is None else appended.to_compact)
        open_store(self._options.url).schedule_maintenance(self._queue, to_compact)

    def _record_batch(self, results: Sequence[TaskResult], batch_id: int) -> None:
        query_id = next(message.stream.query_id for message in results if message.stream is not None)
        record_batch(
            open_store(self._options.url).database,
            LedgerKey(queue_sink(self._queue), self._options.app_id or query_id, batch_id),
            query_id,
            sum(message.rows for message in results),
            new_sink=self._options.allow_new_sink,
        )

    def _commit_batch(self, results: Sequence[TaskResult], batch_id: int) -> Appended | None:
        store = open_store(self._options.url)
        checkpoint = Checkpoint(self._location(results))
        checkpoint.require_query(message.stream.query_id for message in results if message.stream is not None)
        self._require_placement(results)
        is_exactly_once = self._options.guarantee == "exactly_once"
        if not is_exactly_once and checkpoint.stateful():
            raise CommitRefusedError(_STATEFUL, condition="COMMIT_REFUSED.NOT_IDEMPOTENT")
        batch = checkpoint.batch_commit(
            QueueTarget(self._queue),
            batch_id,
            rows=sum(message.rows for message in results),
            app_id=self._options.app_id,
            attempts={message.attempt: message.segments for message in results if message.segments}
            if is_exactly_once
            else {},
            written=None if self._objects is None else written_segments(results),
            tasks=None if is_exactly_once else {message.task: message.rows for message in results},
            rebind=self._options.allow_new_checkpoint,
            new_sink=self._options.allow_new_sink,
        )
        return commit_batch(store.database, batch)

    def _require_placement(self, results: Sequence[TaskResult]) -> None:
        """Refuse rows that tasks may have assigned to the wrong partition."""
        if self._queue.key and {message.partitions for message in results} != {self._queue.partitions}:
            raise CommitRefusedError(
                f"queue {self._queue.name!r} got more partitions while the micro-batch was written: restart "
                "the query, which repeats the micro-batch",
                condition="COMMIT_REFUSED.QUEUE_CHANGED",
                queue=self._queue.name,
            )

    def _location(self, results: Sequence[TaskResult]) -> str:
        locations = (
            message.stream.location(self._options) for message in results if message.stream is not None
        )
        location = next((location for location in locations if location is not None), None)
        if location is None:
            raise CommitRefusedError(
                f"guarantee={self._options.guarantee} needs the checkpoint's location: set the option "
                "checkpointLocation. Or, if the session sets spark.sql.streaming.checkpointLocation, name "
                "the query; without a name, it gets a new checkpoint at each start",
                condition="COMMIT_REFUSED.CHECKPOINT_UNKNOWN",
            )
        return location

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: Spark also calls this if a commit failed after its transaction."""
