"""Writers into a queue: batch writes, which are atomic, and streaming writes with each of the three
guarantees.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.commit.micro_batch import QueueTarget
from penstock.commit.protocol import commit_batch, note_batch
from penstock.errors import CommitRefused, condition_of
from penstock.queue.open_stores import open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.options import SinkOptions
from penstock.spark.sink.micro_batches import batch_commit, input_digest, require_same_query
from penstock.spark.sink.write_task import StreamTask, TaskResult, TaskWriter
from penstock.store import staging
from penstock.store.log.partition_log import Appended
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.ledger import LedgerKey, queue_sink

log = logging.getLogger("penstock.spark")

T = TypeVar("T")
_BATCH = 0


@without_tracebacks
class QueueWriter(DataSourceArrowWriter):
    """One batch write."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        self._options = options
        self._queue = queue
        self._job = f"job:{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        return TaskWriter(self._options, self._queue).stage(self._job, _BATCH, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the staged rows visible, as one append."""
        store = open_store(self._options.url)
        attempts = {wrote.attempt: wrote.segments for wrote in messages if isinstance(wrote, TaskResult)}
        if not any(attempts.values()):
            return

        appended = store.database.run(
            lambda tx: staging.promote(tx, self._queue, self._job, _BATCH, attempts)
        )
        store.tend(self._queue, appended.crowded)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop the staged rows; if that fails they stay invisible, and are cleaned up later."""
        # An error here would hide the one that caused the abort.
        with contextlib.suppress(Exception):
            database = open_store(self._options.url).database
            database.run(lambda tx: staging.discard(tx, self._queue, self._job, _BATCH))


@without_tracebacks
class QueueStreamWriter(DataSourceStreamArrowWriter):
    """The sink of a streaming query; Spark creates one for every micro-batch."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        self._options = options
        self._queue = queue

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task, on an executor."""
        stream = StreamTask.current()
        writer = TaskWriter(self._options, self._queue)
        app_id = self._options.app_id or stream.query_id
        if self._options.guarantee == "exactly_once":
            wrote = writer.stage(app_id, stream.batch_id, iterator)
        elif self._options.guarantee == "idempotent":
            key = LedgerKey(queue_sink(self._queue), app_id, stream.batch_id, writer.task)
            wrote = writer.append_once(
                key,
                stream.query_id,
                self._stateless(stream, iterator),
                covers=self._covers(stream),
                new_sink=self._options.allow_new_sink,
            )
        else:
            wrote = writer.append(iterator)
        return replace(wrote, stream=stream)

    def _stateless(self, stream: StreamTask, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task, then raise an error if the query keeps state.

        A task of an idempotent write appends visibly, so a refusal at the commit would come too late.
        """
        yield from batches
        if self._from_checkpoint(stream, Checkpoint.stateful):
            raise _stateful()

    def _covers(self, stream: StreamTask) -> str:
        """Return a digest of the micro-batch's input; empty if unknown."""
        return (
            self._from_checkpoint(stream, lambda checkpoint: input_digest(checkpoint, stream.batch_id)) or ""
        )

    def _from_checkpoint(self, stream: StreamTask, read: Callable[[Checkpoint], T]) -> T | None:
        """Read from the checkpoint.

        None if an executor cannot, since only the driver must (and fails if it cannot).
        """
        location = stream.location(self._options)
        try:
            return None if location is None else read(Checkpoint(location))
        except Exception as error:
            log.debug(
                "the checkpoint cannot be read here: %s",
                type(error).__name__,
                extra={"action": "checkpoint_unread", "error": condition_of(error)},
            )
            return None

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch, on the driver."""
        wrote = [message for message in messages if isinstance(message, TaskResult)]
        if not wrote:
            raise CommitRefused(
                "no task has written: Spark's continuous trigger loses every row that goes into a Python "
                "sink; use a processing-time trigger"
            )
        crowded = {partition for message in wrote for partition in message.crowded}
        if self._options.guarantee == "at_least_once":
            self._note_batch(wrote, batchId)
        else:
            appended = self._commit_batch(wrote, batchId)
            crowded.update(() if appended is None else appended.crowded)
        open_store(self._options.url).tend(self._queue, crowded)

    def _note_batch(self, wrote: Sequence[TaskResult], batch_id: int) -> None:
        query_id = next(message.stream.query_id for message in wrote if message.stream is not None)
        note_batch(
            open_store(self._options.url).database,
            LedgerKey(queue_sink(self._queue), self._options.app_id or query_id, batch_id),
            query_id,
            sum(message.rows for message in wrote),
            new_sink=self._options.allow_new_sink,
        )

    def _commit_batch(self, wrote: Sequence[TaskResult], batch_id: int) -> Appended | None:
        store = open_store(self._options.url)
        checkpoint = Checkpoint(self._location(wrote))
        require_same_query(
            checkpoint, (message.stream.query_id for message in wrote if message.stream is not None)
        )
        self._require_placement(wrote)
        exactly = self._options.guarantee == "exactly_once"
        if not exactly and checkpoint.stateful():
            raise _stateful()
        batch = batch_commit(
            QueueTarget(self._queue),
            checkpoint,
            batch_id,
            rows=sum(message.rows for message in wrote),
            app_id=self._options.app_id,
            attempts={m.attempt: m.segments for m in wrote if m.segments} if exactly else {},
            tasks=None if exactly else {message.task: message.rows for message in wrote},
            rebind=self._options.allow_new_checkpoint,
            new_sink=self._options.allow_new_sink,
        )
        return commit_batch(store.database, store.uuid, batch)

    def _require_placement(self, wrote: Sequence[TaskResult]) -> None:
        """Refuse rows that may be in the wrong partition."""
        if self._queue.key and {message.partitions for message in wrote} != {self._queue.partitions}:
            raise CommitRefused(
                f"queue {self._queue.name!r} got more partitions while the micro-batch was written: restart "
                "the query, which repeats the micro-batch",
                queue=self._queue.name,
            )

    def _location(self, wrote: Sequence[TaskResult]) -> str:
        known = (message.stream.location(self._options) for message in wrote if message.stream is not None)
        location = next((location for location in known if location is not None), None)
        if location is None:
            raise CommitRefused(
                f"guarantee={self._options.guarantee} needs to know the checkpoint: set the option "
                "checkpointLocation; or name the query, if it uses the session's "
                "spark.sql.streaming.checkpointLocation, where a query without a name gets a new one at each "
                "start"
            )
        return location

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: Spark also calls it if a commit failed after its transaction, and an error here would
        hide that one.
        """


def _stateful() -> CommitRefused:
    return CommitRefused(
        "guarantee=idempotent is for stateless queries, since a repeated micro-batch of a stateful one may "
        "be split into other tasks: use guarantee=exactly_once"
    )
