"""Streaming reads of a queue, and warnings about too large or too small micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from penstock.commit.offsets import QueueOffset, pad
from penstock.commit.owner import Owner, offset_of
from penstock.commit.source_rows import SourceRows, row_times, times_before
from penstock.errors import condition_of
from penstock.json_text import Json
from penstock.queue.store import Store, open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.error_boundary import without_tracebacks
from penstock.spark.internals.limit_state import UnreadableState, rows_passed
from penstock.spark.options import Quota, SourceOptions
from penstock.spark.queue_readers import RangesPartition, Scan
from penstock.spark.ranges import (
    next_end,
    parse_offset,
    require_few_tasks,
    skip_trimmed,
    split_into_tasks,
    start_positions,
)
from penstock.store.database import Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import PartitionRecord, QueueRecord

log = logging.getLogger("penstock.spark")

LARGE_BYTES = 1 << 30
LARGE_ROWS = 20_000_000
SMALL_ROWS = 1_000
SMALL_BATCHES = 20
SMALL_BACKLOG = 100


@without_tracebacks
class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for a source in one run of a streaming query.

    Spark creates it several times, calls every method except ``read`` in a separate process, and sends
    pickled copies to executors. So it opens nothing before the first call.
    """

    def __init__(self, options: SourceOptions, queue: QueueRecord, schema: pa.Schema) -> None:
        self._options = options
        self._queue = queue
        self._scan = Scan(options.url, queue, schema, options.fail_on_data_loss)
        self._owner: Owner | None = None
        self._source_rows = SourceRows()
        self._run_end: tuple[int, ...] | None = None
        self._maintained: tuple[int, ...] | None = None
        """The end of the last offset for which the queue's maintenance was scheduled."""
        self._size_warnings = BatchSizeWarnings(options)
        self._remaining_quota = RemainingQuota(options.quota, fail_on_data_loss=options.fail_on_data_loss)

    # Spark's calls in a run, in their order (4.2 and 4.3).

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the end of the queue; another run reads later rows."""
        self._take_ownership()
        self._run_end = tuple(part.next_index for part in self._read_queue()[1])

    def getDefaultReadLimit(self) -> ReadLimit:
        """Disable Spark's read limits; this source has its own."""
        self._take_ownership()
        return ReadAllAvailable()

    def initialOffset(self) -> Json:
        """Return the start of a query with a new checkpoint."""
        owner = self._take_ownership()

        def find_start(tx: Transaction) -> tuple[list[int], tuple[int | None, ...]]:
            start = start_positions(tx, self._options, self._queue, catalog.partitions(tx, self._queue))
            # If a queue is restored, its consumers are too, so they need no times.
            return start, times_before(tx, self._queue, start) if owner is None else ()

        start, times = self._store().database.run(find_start, write=False)
        return self._offset(start, start, owner, times).to_dict()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return the end of the next micro-batch; ``start`` itself if there are no rows for it."""
        owner = self._take_ownership()
        last_offset = parse_offset(start)
        if owner is None:
            queue, partitions, draining = (*self._read_queue(), False)
            last_offset.require(self._store().uuid, queue.name, None, queue.generation)
            self._require_rows(queue, last_offset)
        else:
            queue, partitions, draining = owner.observe(last_offset)
            if last_offset.end != self._maintained:
                # The last micro-batch is logged, so retention may trim its rows.
                self._maintained = last_offset.end
                self._store().schedule_maintenance(queue, ())
        if draining:
            return start
        last_offset.require_reached([part.next_index for part in partitions])
        if self._options.fail_on_data_loss:
            skip_trimmed(self._options, partitions, pad(last_offset.end, len(partitions)))
        rows_left = self._remaining_quota.rows_left(last_offset.end)
        if rows_left is not None and rows_left <= 0:
            return start
        end, times = self._next_end(queue, partitions, last_offset.end, rows_left)
        self._size_warnings.observe(last_offset.end, end, partitions)
        batch_start = pad(last_offset.end, len(end))
        if end == batch_start:
            return start
        # Check this before Spark logs the range. Later, every restart would fail.
        require_few_tasks(batch_start, end, self._options.rows_per_task)
        return self._offset(batch_start, end, owner, times).to_dict()

    def reportLatestOffset(self) -> Json | None:
        """Return the end of the queue, for the query's progress."""
        ends = tuple(part.next_index for part in self._read_queue()[1])
        return self._offset(ends, ends, self._take_ownership()).to_dict()

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch, whose whole range is in ``end``."""
        owner = self._take_ownership()
        batch = parse_offset(end)
        queue, _ = self._read_queue()
        generation = queue.generation if owner is None else owner.generation
        batch.require(self._store().uuid, queue.name, self._options.consumer, generation)
        if owner is None:
            self._require_rows(queue, batch)
        else:
            owner.plan(batch)
        # A repeated micro-batch has the same tasks, even if options have changed.
        rows = batch.rows_per_task or self._options.rows_per_task
        tasks = split_into_tasks(batch.start, batch.end, rows, batch.max_tasks)
        return [
            RangesPartition(task, batch.last_rows(rows_range.partition for rows_range in task))
            for task in tasks
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task, on an executor."""
        return self._scan.read(partition)

    def commit(self, end: Json) -> None:
        """Do nothing: Spark calls this late, and never for the last micro-batch."""

    def stop(self) -> None:
        """Release the consumer. Spark does not always call this; the end of the process releases it, too."""
        if self._owner is not None:
            self._owner.release()

    def _store(self) -> Store:
        return open_store(self._options.url)

    def _take_ownership(self) -> Owner | None:
        if self._options.consumer is not None and self._owner is None:
            self._owner = Owner(
                self._store().database,
                self._options.consumer,
                self._queue.name,
                moved_by_sink=self._options.moved_by_sink,
            )
        return self._owner

    def _next_end(
        self,
        queue: QueueRecord,
        partitions: Sequence[PartitionRecord],
        start: Sequence[int],
        rows_left: int | None,
    ) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """Return the end of the next micro-batch, and when the last row of each partition was appended."""
        options = self._options
        if rows_left is not None:
            options = replace(
                options, max_rows_per_trigger=min(rows_left, options.max_rows_per_trigger or rows_left)
            )

        def find_end(tx: Transaction) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
            end = next_end(tx, queue, partitions, start, options, self._run_end)
            return end, row_times(tx, queue, partitions, end)

        return self._store().database.run(find_end, write=False)

    def _require_rows(self, queue: QueueRecord, offset: QueueOffset) -> None:
        self._store().database.run(
            lambda tx: self._source_rows.require(tx, queue.queue_id, offset), write=False
        )

    def _read_queue(self) -> tuple[QueueRecord, list[PartitionRecord]]:
        def find_queue(tx: Transaction) -> tuple[QueueRecord, list[PartitionRecord]]:
            queue = catalog.find_queue(tx, self._queue.name)
            return queue, catalog.partitions(tx, queue)

        return self._store().database.run(find_queue, write=False)

    def _offset(
        self,
        start: Sequence[int],
        end: Sequence[int],
        owner: Owner | None,
        times: Sequence[int | None] = (),
    ) -> QueueOffset:
        return offset_of(
            owner,
            self._store().uuid,
            self._queue,
            start,
            end,
            rows_per_task=self._options.rows_per_task,
            max_tasks=self._options.max_tasks,
            times=tuple(times),
        )


class RemainingQuota:
    """The number of rows that a query with a limit may still read."""

    def __init__(self, quota: Quota | None, *, fail_on_data_loss: bool) -> None:
        if quota is not None and not fail_on_data_loss:
            # Trimmed rows are between the positions, but do not count towards the limit.
            quota = replace(quota, rows_left=None)
        self._quota = quota
        self._since = None if quota is None else quota.since
        self._checked_batch: tuple[int, bool] | None = None
        """The last micro-batch whose state was read, and whether it had reached the limit."""

    def rows_left(self, start: Sequence[int]) -> int | None:
        """Return how many rows may be read from ``start`` on: 0 or less at the limit, None if unlimited."""
        if self._quota is None:
            return None
        if self._quota.rows_left is None:
            return 0 if self._reached(self._quota) else None
        if self._since is None:
            self._since = tuple(start)
        return self._quota.rows_left - (sum(start) - sum(pad(self._since, len(start))))

    def _reached(self, quota: Quota) -> bool:
        """Return whether the limit is reached, from the state of the last micro-batch."""
        checkpoint = Checkpoint(quota.checkpoint)
        last_batch = checkpoint.last_commit()
        if last_batch is None:
            return False
        if self._checked_batch is not None and self._checked_batch[0] == last_batch:
            # An idle query checks this repeatedly.
            return self._checked_batch[1]
        try:
            reached = rows_passed(checkpoint, last_batch) >= quota.rows
        except UnreadableState as unreadable:
            # The driver counts as well and stops the query, perhaps after another micro-batch has started.
            log.debug(
                "the limit's state cannot be read by the source: %s",
                unreadable,
                extra={"action": "limit_unread", "batch": last_batch, "error": condition_of(unreadable)},
            )
            reached = False
        self._checked_batch = last_batch, reached
        return reached


class BatchSizeWarnings:
    """Logs one warning about too large, and one about too small, micro-batches of a source."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._small_batches = 0
        self._warned: set[str] = set()

    def observe(
        self, start: Sequence[int], end: Sequence[int], partitions: Sequence[PartitionRecord]
    ) -> None:
        """Check the size of a planned micro-batch."""
        rows = sum(end) - sum(start)
        if rows == 0:
            return
        stored = sum(part.rows for part in partitions) or 1
        size = rows * sum(part.bytes for part in partitions) // stored
        backlog = sum(part.next_index for part in partitions) - sum(end)
        queue = self._options.queue
        if (rows >= LARGE_ROWS or size >= LARGE_BYTES) and self._is_first("large"):
            log.warning(
                "large micro-batch of queue %r: %d rows, about %d MiB compressed; executors may run out of "
                "memory: set maxRowsPerTrigger or maxBytesPerTrigger",
                queue,
                rows,
                size >> 20,
                extra={"action": "large_batch", "queue": queue, "rows": rows, "bytes": size},
            )
        self._small_batches = (
            self._small_batches + 1 if rows < SMALL_ROWS and backlog > SMALL_BACKLOG * rows else 0
        )
        if self._small_batches >= SMALL_BATCHES and self._is_first("small"):
            log.warning(
                "small micro-batch of queue %r: %d rows, with %d rows waiting; starting micro-batches takes "
                "most of the time: raise maxRowsPerTrigger, maxRowsPerPartition or maxBytesPerTrigger",
                queue,
                rows,
                backlog,
                extra={"action": "small_batch", "queue": queue, "rows": rows, "backlog": backlog},
            )

    def _is_first(self, kind: str) -> bool:
        is_new = kind not in self._warned
        self._warned.add(kind)
        return is_new
