"""What a write task does, by guarantee."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext

from penstock.commit.batch import append_task
from penstock.queue.opened import open_store
from penstock.queue.queue import placement_of
from penstock.spark.internals.worker_gc import spare_imports
from penstock.spark.options import SinkOptions
from penstock.spark.stores import check_reach
from penstock.spark.writing import Pieces, Wrote
from penstock.store import staging
from penstock.store.log.partition_log import Segment
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.ledger import LedgerKey
from penstock.store.staging import Attempt


class TaskWriter:
    """One attempt of the running task to write its rows into a queue."""

    def __init__(self, options: SinkOptions, queue: QueueRecord) -> None:
        check_reach(options.url, None)
        spare_imports()
        context = TaskContext.get()
        self._task = 0 if context is None else int(context.partitionId())
        self._attempt = str(uuid.uuid4())
        self._queue = queue
        self._database = open_store(options.url).database
        self._placement = placement_of(self._database, queue)
        self._pieces = Pieces(queue, self._placement, self._task, options.max_rows_per_write)

    def stage(self, app_id: str, batch_id: int, batches: Iterator[pa.RecordBatch]) -> Wrote:
        """Store the rows where nobody sees them."""
        attempt = Attempt(app_id, batch_id, self._task, self._attempt)
        count = 0
        for group in self._pieces.groups(batches):
            self._stage(attempt, group, count)
            count += len(group)
        return self._wrote(count)

    def _stage(self, attempt: Attempt, group: list[Segment], ordinal: int) -> None:
        self._database.run(
            lambda tx: staging.stage(tx, self._queue, attempt, group, ordinal), idempotent=True
        )

    def append(self, batches: Iterator[pa.RecordBatch]) -> Wrote:
        """Append the rows piece by piece; a repeated task repeats them."""
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
    ) -> Wrote:
        """Append the rows all at once; a repeated task appends nothing.

        Parameters
        ----------
        origin
            The checkpoint that the micro-batch belongs to.
        covers
            What tells its input from any other; empty where that is not known.
        new_sink
            Whether the queue may have nothing of the query although the checkpoint is not new.
        """
        segments = [segment for group in self._pieces.groups(batches) for segment in group]
        appended = append_task(
            self._database, self._queue, key, segments, origin=origin, covers=covers, new_sink=new_sink
        )
        return self._wrote(len(segments), () if appended is None else appended.crowded)

    @property
    def task(self) -> int:
        return self._task

    def _wrote(self, segments: int, *crowded: tuple[int, ...]) -> Wrote:
        return Wrote(
            self._task,
            self._attempt,
            segments,
            self._pieces.rows,
            self._placement.partitions,
            tuple(sorted({partition for each in crowded for partition in each})),
        )
