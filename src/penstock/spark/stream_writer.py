"""Streaming writes into a queue, with each of the three guarantees."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.commit.batch import BatchCommit, append_task, commit_batch, sink_name
from penstock.commit.offsets import QueueOffset, batch_ranges
from penstock.errors import CheckpointMismatch, CommitRefused
from penstock.queue.maintenance import upkeep
from penstock.queue.queue import placement_of
from penstock.spark.batch_writer import stage_task
from penstock.spark.boundary import plain_errors
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.options import SinkOptions
from penstock.spark.stores import check_reach, open_store
from penstock.spark.writing import Pieces, Wrote
from penstock.store import log as segments_log
from penstock.store.catalog import QueueRecord
from penstock.store.ledger import LedgerKey
from penstock.store.log import Segment

log = logging.getLogger("penstock.spark")


@plain_errors
class QueueStreamWriter(DataSourceStreamArrowWriter):
    """The sink of a streaming query; Spark builds it anew for every micro-batch."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        self._options = options
        self._queue = queue

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task, on an executor."""
        context = TaskContext.get()
        if context is None or context.getLocalProperty("__is_continuous_processing") == "true":
            raise CommitRefused(
                "Spark's continuous trigger loses every row that goes into a Python sink: use a processing-time trigger"
            )
        check_reach(self._options.url, None)
        query_id = str(context.getLocalProperty("sql.streaming.queryId"))
        app_id = self._options.app_id or query_id
        batch_id = int(str(context.getLocalProperty("streaming.sql.batchId")))
        root = context.getLocalProperty("spark.sql.streaming.checkpointLocation")
        if self._options.guarantee == "exactly_once":
            wrote = stage_task(self._options, self._queue, app_id, batch_id, iterator)
        else:
            wrote = self._append_task(app_id, batch_id, context.partitionId(), iterator)
        return replace(wrote, query_id=query_id, checkpoint_root=root)

    def _append_task(self, app_id: str, batch_id: int, task: int, batches: Iterator[pa.RecordBatch]) -> Wrote:
        database = open_store(self._options.url).database
        placement = placement_of(database, self._queue)
        pieces = Pieces(self._queue, placement, task, self._options.max_rows_per_write)
        written: list[Segment] = []
        count = 0
        for group in pieces.groups(batches):
            count += len(group)
            if self._options.guarantee == "idempotent":
                written += group
            else:
                database.run(lambda tx, group=group: segments_log.append(tx, self._queue, group))  # type: ignore[misc]  # bound now
        if self._options.guarantee == "idempotent":
            key = LedgerKey(sink_name(self._queue), app_id, batch_id, task)
            append_task(database, self._queue, key, written)
        return Wrote(
            app_id, batch_id, task, str(uuid.uuid4()), count, pieces.rows, partitions=placement.partitions
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit a micro-batch, on the driver."""
        wrote = [message for message in messages if isinstance(message, Wrote)]
        store = open_store(self._options.url)
        if self._options.guarantee != "at_least_once":
            self._commit_batch(wrote, batchId)
        upkeep(store.database, store.uuid, self._queue, range(self._queue.partitions))

    def _commit_batch(self, wrote: Sequence[Wrote], batch_id: int) -> None:
        store = open_store(self._options.url)
        checkpoint = self._checkpoint(wrote)
        query_id = checkpoint.query_id()
        for message in wrote:
            self._check_message(message, query_id)
        exactly = self._options.guarantee == "exactly_once"
        stateful = checkpoint.stateful()
        if stateful and not exactly:
            raise CommitRefused(
                "guarantee=idempotent is for stateless queries: a repeated micro-batch of a stateful one may be cut into "
                "other tasks; use guarantee=exactly_once"
            )
        commit_batch(
            store.database,
            store.uuid,
            BatchCommit(
                sink=self._queue,
                app_id=self._options.app_id or query_id,
                batch_id=batch_id,
                rows=sum(message.rows for message in wrote),
                sources=self._sources(checkpoint, batch_id),
                attempts={m.attempt: m.segments for m in wrote if m.segments} if exactly else {},
                stateful=stateful,
                rebind=self._options.allow_new_checkpoint,
            ),
        )

    def _check_message(self, message: Wrote, query_id: str) -> None:
        if message.query_id != query_id:
            raise CheckpointMismatch(
                f"the query is {message.query_id!r}, and the checkpoint that the sink was given is {query_id!r}'s: "
                "where paths without a scheme are not local ones, give checkpointLocation as a full URL",
                query=message.query_id,
                checkpoint=query_id,
            )
        if self._queue.key and message.partitions != self._queue.partitions:
            raise CommitRefused(
                f"queue {self._queue.name!r} got more partitions while micro-batch {message.batch_id} was written: "
                "restart the query, it repeats the micro-batch"
            )

    def _sources(self, checkpoint: Checkpoint, batch_id: int) -> list[QueueOffset]:
        return batch_ranges(checkpoint.offsets(batch_id), checkpoint.offsets(batch_id - 1))

    def _checkpoint(self, wrote: Sequence[Wrote]) -> Checkpoint:
        location = self._options.checkpoint
        root = next((message.checkpoint_root for message in wrote if message.checkpoint_root), None)
        if location is None and root is not None and self._options.query_name is not None:
            location = f"{root}/{self._options.query_name}"
        if location is None:
            raise CommitRefused(
                f"guarantee={self._options.guarantee} needs to know the checkpoint: give it as the option "
                "checkpointLocation, or name the query as well when the session's "
                "spark.sql.streaming.checkpointLocation is used"
            )
        return Checkpoint(location)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: it is also called when a commit failed after its transaction, and an error here would hide that one."""
