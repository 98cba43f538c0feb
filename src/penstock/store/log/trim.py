"""Trimming: how far a partition may be cut, and the cut."""

from __future__ import annotations

import json
from collections.abc import Callable

from penstock.store.database import Transaction
from penstock.store.log import observed_ends
from penstock.store.log.partition_log import PAGE_SEGMENTS
from penstock.store.log.segmenting import Runs
from penstock.store.records.catalog import (
    PartitionRecord,
    QueueRecord,
    RetentionLimits,
    lock_partition,
    reread,
)


def trim(
    tx: Transaction,
    queue: QueueRecord,
    partition: int,
    *,
    before: int | None,
    alive: Callable[[str], bool],
) -> tuple[int, int]:
    """Drop the rows below ``before``, as far as retention and vital consumers allow.

    Parameters
    ----------
    before
        A row index; None for what the queue's retention says.
    alive
        Whether the consumer of that name has a live owner on the queue.

    Returns
    -------
    tuple
        The first row index before and after.
    """
    # Whoever calls may have read the retention long ago.
    queue = reread(tx, queue)
    record = lock_partition(tx, queue, partition)
    now = tx.now()
    observed_ends.observe(tx, queue, record, now)
    wanted = retention_bound(tx, queue, record, now)
    if before is not None:
        wanted = before if queue.retention.unlimited else min(before, wanted)
    bound = max(
        min(wanted, record.next_index, _consumers_bound(tx, queue, partition, alive)), record.first_index
    )
    if bound > record.first_index:
        _cut(tx, queue, partition, bound)
    return record.first_index, bound


def _cut(tx: Transaction, queue: QueueRecord, partition: int, bound: int) -> None:
    where = {"queue_id": queue.queue_id, "partition": partition, "row_index": bound}
    tx.run("delete_payloads_before", **where)
    dropped = tx.all("delete_segments_before", **where)
    tx.run(
        "set_first_index",
        queue_id=queue.queue_id,
        partition=partition,
        first_index=bound,
        bytes=sum(row.bytes for row in dropped),
        segments=len(dropped),
    )


def _consumers_bound(
    tx: Transaction, queue: QueueRecord, partition: int, alive: Callable[[str], bool]
) -> int:
    """The lowest safe offset of a vital consumer, and the start of a live micro-batch of any other."""
    bounds = [2**62]
    vital = tx.one("lowest_vital", queue_id=queue.queue_id, partition=partition).safe_index
    if vital is not None:
        bounds.append(int(vital))
    for registration in tx.all("registrations_of_queue", queue_id=queue.queue_id):
        open_plan = registration.plan_epoch is not None and registration.plan_epoch == registration.epoch
        if open_plan and alive(registration.consumer):
            starts = json.loads(registration.plan)["from"]
            bounds.append(starts[partition] if partition < len(starts) else 0)
    return min(bounds)


def retention_bound(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> int:
    """The row index below which the retention lets go; whichever limit is reached first counts."""
    limits = queue.retention
    bound = record.first_index
    if limits.rows is not None:
        bound = max(bound, record.next_index - limits.rows)
    if limits.age is not None:
        bound = max(bound, first_since(tx, queue, record, now - limits.age, now))
    if limits.bytes is not None and record.bytes > limits.bytes:
        bound = max(bound, _bytes_bound(tx, queue, record, limits))
    return bound


def _bytes_bound(
    tx: Transaction, queue: QueueRecord, record: PartitionRecord, limits: RetentionLimits
) -> int:
    """Whole segments go, oldest first, until the rest fits; the newest one always stays."""
    excess = record.bytes - (limits.bytes or 0)
    bound = record.first_index
    while excess > 0:
        page = tx.all(
            "read_segments",
            queue_id=queue.queue_id,
            partition=record.partition,
            start_index=bound,
            max_segments=PAGE_SEGMENTS,
        )
        for segment in page:
            if excess <= 0 or segment.end_index >= record.next_index:
                return bound
            excess -= segment.bytes
            bound = segment.end_index
        if not page:
            break
    return bound


def first_since(
    tx: Transaction, queue: QueueRecord, record: PartitionRecord, timestamp: int, now: int
) -> int:
    """The first row that was appended at or after ``timestamp`` (microseconds), as far as the clock lets it be known."""
    dated = _first_dated(tx, queue, record, timestamp)
    return max(dated, observed_ends.rows_before(tx, queue, record, timestamp, now))


def _first_dated(tx: Transaction, queue: QueueRecord, record: PartitionRecord, timestamp: int) -> int:
    """The first row whose time is at or after ``timestamp``, by bisection: times never go back."""
    low, high = record.first_index, record.next_index
    while low < high:
        segment = tx.one(
            "segment_at", queue_id=queue.queue_id, partition=record.partition, row_index=(low + high) // 2
        )
        if segment.last_timestamp < timestamp:
            low = int(segment.end_index)
        elif segment.first_timestamp >= timestamp:
            high = max(int(segment.start_index), low)
        else:
            return max(int(segment.start_index) + _rows_before(tx, segment.payload_id, timestamp), low)
    return low


def time_of(tx: Transaction, queue: QueueRecord, partition: int, row_index: int) -> int | None:
    """When a row was appended, in microseconds; None where there is no such row."""
    segment = tx.one("segment_at", queue_id=queue.queue_id, partition=partition, row_index=row_index)
    if segment is None:
        return None
    if segment.first_timestamp == segment.last_timestamp:
        return int(segment.first_timestamp)
    runs = Runs.from_bytes(tx.one("read_runs", payload_id=segment.payload_id).runs)
    return runs.timestamp_at(row_index - segment.start_index)


def _rows_before(tx: Transaction, payload_id: int, timestamp: int) -> int:
    """How many rows of a merged segment are older than ``timestamp``."""
    runs = Runs.from_bytes(tx.one("read_runs", payload_id=payload_id).runs)
    return runs.rows_before(timestamp)
