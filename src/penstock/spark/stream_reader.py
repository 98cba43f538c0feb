"""Streaming reads of a queue, and warnings about micro-batches that are too large or too small."""

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
    """One source in one run of a streaming query.

    Spark creates it several times, calls every method except ``read`` in a separate process, and sends
    pickled copies to executors. So nothing is opened before the first call.
    """

    def __init__(self, options: SourceOptions, queue: QueueRecord, schema: pa.Schema) -> None:
        self._options = options
        self._queue = queue
        self._scan = Scan(options.url, queue, schema, options.fail_on_data_loss)
        self._owner: Owner | None = None
        self._source_rows = SourceRows()
        self._cap: tuple[int, ...] | None = None
        self._maintained: tuple[int, ...] | None = None
        """The end of the offset for which the queue's maintenance ran last."""
        self._size_warnings = BatchSizeWarnings(options)
        self._remaining = RemainingQuota(options.quota, fail_on_data_loss=options.fail_on_data_loss)

    # The calls of one run, in Spark's order (4.2 and 4.3).

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the end of the queue; later rows are left for another run."""
        self._own()
        self._cap = tuple(part.next_index for part in self._now()[1])

    def getDefaultReadLimit(self) -> ReadLimit:
        """Disable Spark's read limits; this source has its own."""
        self._own()
        return ReadAllAvailable()

    def initialOffset(self) -> Json:
        """Return the start of a query with a new checkpoint."""
        owner = self._own()

        def work(tx: Transaction) -> tuple[list[int], tuple[int | None, ...]]:
            start = start_positions(tx, self._options, self._queue, catalog.partitions(tx, self._queue))
            # A consumer is restored with its queue.
            return start, times_before(tx, self._queue, start) if owner is None else ()

        start, times = self._store().database.run(work, write=False)
        return self._offset(start, start, owner, times).to_dict()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return the end of the next micro-batch; ``start`` itself if there are no rows for one."""
        owner = self._own()
        last = parse_offset(start)
        if owner is None:
            queue, partitions, draining = (*self._now(), False)
            last.require(self._store().uuid, queue.name, None, queue.generation)
            self._require_rows(queue, last)
        else:
            queue, partitions, draining = owner.observe(last)
            if last.end != self._maintained:
                # Retention may trim the rows that the logged micro-batch has made safe.
                self._maintained = last.end
                self._store().schedule_maintenance(queue, ())
        if draining:
            return start
        last.require_reached([part.next_index for part in partitions])
        if self._options.fail_on_data_loss:
            skip_trimmed(self._options, partitions, pad(last.end, len(partitions)))
        left = self._remaining.left(last.end)
        if left is not None and left <= 0:
            return start
        end, times = self._next_end(queue, partitions, last.end, left)
        self._size_warnings.observe(last.end, end, partitions)
        first = pad(last.end, len(end))
        if end == first:
            return start
        # Check this before Spark logs the range; afterwards every restart would fail.
        require_few_tasks(first, end, self._options.rows_per_task)
        return self._offset(first, end, owner, times).to_dict()

    def reportLatestOffset(self) -> Json | None:
        """Return the end of the queue, for the query's progress."""
        ends = tuple(part.next_index for part in self._now()[1])
        return self._offset(ends, ends, self._own()).to_dict()

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch, whose range is in ``end`` only."""
        owner = self._own()
        batch = parse_offset(end)
        queue, _ = self._now()
        generation = queue.generation if owner is None else owner.generation
        batch.require(self._store().uuid, queue.name, self._options.consumer, generation)
        if owner is None:
            self._require_rows(queue, batch)
        else:
            owner.plan(batch)
        # A repeated micro-batch has the same tasks as before, even if the options have changed.
        rows = batch.rows_per_task or self._options.rows_per_task
        tasks = split_into_tasks(batch.start, batch.end, rows, batch.max_tasks)
        return [RangesPartition(task, batch.last_rows(each.partition for each in task)) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task, on an executor."""
        return self._scan.read(partition)

    def commit(self, end: Json) -> None:
        """Do nothing: Spark calls it late, and never for the last micro-batch."""

    def stop(self) -> None:
        """Release the consumer, as the end of the process does: Spark does not call this reliably."""
        if self._owner is not None:
            self._owner.release()

    def _store(self) -> Store:
        return open_store(self._options.url)

    def _own(self) -> Owner | None:
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
        left: int | None,
    ) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """Return the end of the next micro-batch, and when its last rows were appended."""
        options = self._options
        if left is not None:
            options = replace(options, max_rows_per_trigger=min(left, options.max_rows_per_trigger or left))

        def work(tx: Transaction) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
            end = next_end(tx, queue, partitions, start, options, self._cap)
            return end, row_times(tx, queue, partitions, end)

        return self._store().database.run(work, write=False)

    def _require_rows(self, queue: QueueRecord, offset: QueueOffset) -> None:
        self._store().database.run(
            lambda tx: self._source_rows.require(tx, queue.queue_id, offset), write=False
        )

    def _now(self) -> tuple[QueueRecord, list[PartitionRecord]]:
        def work(tx: Transaction) -> tuple[QueueRecord, list[PartitionRecord]]:
            queue = catalog.find_queue(tx, self._queue.name)
            return queue, catalog.partitions(tx, queue)

        return self._store().database.run(work, write=False)

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
    """The rows that a query may still read, at the start of each micro-batch."""

    def __init__(self, quota: Quota | None, *, fail_on_data_loss: bool) -> None:
        if quota is not None and not fail_on_data_loss:
            # Trimmed rows are between the positions but never pass the limit.
            quota = replace(quota, left=None)
        self._quota = quota
        self._since = None if quota is None else quota.since
        self._checked: tuple[int, bool] | None = None
        """The last micro-batch whose state was read, and whether the limit was reached there."""

    def left(self, start: Sequence[int]) -> int | None:
        """Return how many rows may follow ``start``: 0 or less at the limit, None if unlimited."""
        if self._quota is None:
            return None
        if self._quota.left is None:
            return 0 if self._reached(self._quota) else None
        if self._since is None:
            self._since = tuple(start)
        return self._quota.left - (sum(start) - sum(pad(self._since, len(start))))

    def _reached(self, quota: Quota) -> bool:
        """Return whether the limit is reached, according to the state of the last micro-batch."""
        checkpoint = Checkpoint(quota.checkpoint)
        last = checkpoint.last_commit()
        if last is None:
            return False
        if self._checked is not None and self._checked[0] == last:
            # An idle query checks repeatedly.
            return self._checked[1]
        try:
            reached = rows_passed(checkpoint, last) >= quota.rows
        except UnreadableState as unreadable:
            # The driver counts as well, and stops the query; a micro-batch may start before it does.
            log.debug(
                "the limit's state cannot be read here: %s",
                unreadable,
                extra={"action": "limit_unread", "batch": last, "error": condition_of(unreadable)},
            )
            reached = False
        self._checked = last, reached
        return reached


class BatchSizeWarnings:
    """Warns once about too large, and once about too small micro-batches of one source."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._small = 0
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
        self._small = self._small + 1 if rows < SMALL_ROWS and backlog > SMALL_BACKLOG * rows else 0
        if self._small >= SMALL_BATCHES and self._is_first("small"):
            log.warning(
                "small micro-batch of queue %r: %d rows, with %d rows waiting; most of the time goes into "
                "starting micro-batches: raise maxRowsPerTrigger, maxRowsPerPartition or maxBytesPerTrigger",
                queue,
                rows,
                backlog,
                extra={"action": "small_batch", "queue": queue, "rows": rows, "backlog": backlog},
            )

    def _is_first(self, kind: str) -> bool:
        new = kind not in self._warned
        self._warned.add(kind)
        return new
