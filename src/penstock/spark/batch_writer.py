"""Batch writes into a queue: all rows become visible at once, or none."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from penstock.queue.maintenance import upkeep
from penstock.queue.queue import placement_of
from penstock.spark.boundary import plain_errors
from penstock.spark.options import SinkOptions
from penstock.spark.stores import check_reach, open_store
from penstock.spark.writing import Pieces, Wrote
from penstock.store import staging
from penstock.store.catalog import QueueRecord
from penstock.store.staging import Attempt


@plain_errors
class QueueWriter(DataSourceArrowWriter):
    """One batch write."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        self._options = options
        self._queue = queue
        self._job = f"job:{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        check_reach(self._options.url, None)
        return stage_task(self._options, self._queue, self._job, 0, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make what the tasks staged visible, as one append."""
        store = open_store(self._options.url)
        wrote = [message for message in messages if isinstance(message, Wrote)]
        attempts = {message.attempt: message.segments for message in wrote}
        if not any(attempts.values()):
            return
        appended = store.database.run(
            lambda tx: staging.promote(tx, self._queue, wrote[0].app_id, 0, attempts)
        )
        upkeep(store.database, store.uuid, self._queue, appended.crowded)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing: what was staged is invisible, and swept later."""


def stage_task(
    options: SinkOptions, queue: QueueRecord, app_id: str, batch_id: int, batches: Iterator[pa.RecordBatch]
) -> Wrote:
    """Stage the rows of the running task under an attempt of its own."""
    database = open_store(options.url).database
    context = TaskContext.get()
    task = context.partitionId() if context is not None else 0
    attempt = Attempt(app_id, batch_id, task, str(uuid.uuid4()))
    placement = placement_of(database, queue)
    pieces = Pieces(queue, placement, task, options.max_rows_per_write)
    staged = 0
    for segments in pieces.groups(batches):
        database.run(lambda tx, s=segments, n=staged: staging.stage(tx, queue, attempt, s, n))  # type: ignore[misc]  # bound now
        staged += len(segments)
    return Wrote(
        app_id, batch_id, task, attempt.attempt, staged, pieces.rows, partitions=placement.partitions
    )
