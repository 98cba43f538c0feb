"""Trimming: delete old rows of a partition, as far as its retention and consumers allow.

The timestamps of a partition's rows never decrease. If the clock was far ahead during one append, all later
rows get timestamps that are even later. Timestamps then no longer show how old rows are. Retention therefore
records from time to time where the partition ends (``observed_end``). Rows before that end are known to have
been appended by then. A record is valid only until an append gets its timestamp from the clock again. So a
record that was made while the clock was wrong, as on a machine that boots in 1970, is ignored once the clock
is right again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from penstock.errors import StoreError
from penstock.json_text import parse_record
from penstock.store.database import MAX_CLOCK_SKEW, Row, Transaction
from penstock.store.log.decode import unreadable
from penstock.store.log.reading import segment_missing, segments_from
from penstock.store.log.segmenting import Runs
from penstock.store.records.catalog import (
    PartitionRecord,
    QueueRecord,
    RetentionLimits,
    lock_partition,
    reload_queue,
)

log = logging.getLogger("penstock.store")

_ENDS_PER_AGE = 16
"""How many ends are recorded within the retention age. A row may stay longer than that age by one such
step.
"""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def trim(
    tx: Transaction,
    queue: QueueRecord,
    partition: int,
    *,
    before: int | None,
    has_live_owner: Callable[[str], bool],
) -> tuple[int, int]:
    """Delete the rows below the row index ``before``, as far as the retention and retention-blocking
    consumers allow. If ``before`` is None, delete all rows that the retention does not keep. Return the first
    row index before and after.

    ``has_live_owner`` returns whether the consumer with this name has a live owner on the queue.
    """
    # The caller may have read the queue's retention long ago.
    queue = reload_queue(tx, queue)
    record = lock_partition(tx, queue, partition)
    now = tx.now()
    _record_end(tx, queue, record, now)
    requested = retention_bound(tx, queue, record, now)
    if before is not None:
        requested = before if queue.retention.unlimited else min(before, requested)
    bound = max(
        min(requested, record.next_index, _consumers_bound(tx, queue, partition, has_live_owner)),
        record.first_index,
    )
    if bound > record.first_index:
        _delete_before(tx, queue, partition, bound)
    return record.first_index, bound


def _delete_before(tx: Transaction, queue: QueueRecord, partition: int, bound: int) -> None:
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
    tx: Transaction, queue: QueueRecord, partition: int, has_live_owner: Callable[[str], bool]
) -> int:
    """Return the row index that consumers still need: the lowest of the safe offsets of vital consumers and
    the starts of other consumers' micro-batches in flight.
    """
    bounds = [2**62]
    vital = tx.one("lowest_vital", queue_id=queue.queue_id, partition=partition).safe_index
    if vital is not None:
        bounds.append(int(vital))
    for registration in tx.all("registrations_of_queue", queue_id=queue.queue_id):
        open_plan = registration.plan_epoch is not None and registration.plan_epoch == registration.epoch
        if open_plan and has_live_owner(registration.consumer):
            bounds.append(_plan_start(registration, partition))
    return min(bounds)


def _plan_start(registration: Row, partition: int) -> int:
    """Return the row index at which the consumer's plan begins in a partition."""
    what = f"the plan of consumer {registration.consumer!r}"
    starts = parse_record(registration.plan or "null", what, dict).get("from")
    start = starts[partition] if isinstance(starts, list) and partition < len(starts) else 0
    return start if isinstance(start, int) else 0


def retention_bound(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> int:
    """Return the row index below which the retention keeps no rows: the highest index that any of its limits
    gives.
    """
    limits = queue.retention
    bound = record.first_index
    if limits.rows is not None:
        bound = max(bound, record.next_index - limits.rows)
    if limits.age is not None:
        bound = max(bound, first_row_since(tx, queue, record, now - limits.age, now))
    if limits.bytes is not None and record.bytes > limits.bytes:
        bound = max(bound, _bytes_bound(tx, queue, record, limits))
    return bound


def _bytes_bound(
    tx: Transaction, queue: QueueRecord, record: PartitionRecord, limits: RetentionLimits
) -> int:
    """Return the first row index that remains when whole segments are dropped, oldest first, until the rest
    fits the limit on bytes. The newest segment always stays.
    """
    excess = record.bytes - (limits.bytes or 0)
    bound = record.first_index
    for segment in segments_from(tx, queue, record.partition, bound):
        if segment.end_index >= record.next_index:
            break
        excess -= segment.bytes
        bound = segment.end_index
        if excess <= 0:
            break
    return bound


def first_row_since(
    tx: Transaction, queue: QueueRecord, record: PartitionRecord, timestamp: int, now: int
) -> int:
    """Return the index of the first row that was appended at or after ``timestamp`` (microseconds since
    1970), according to the rows' timestamps and the recorded ends.
    """
    by_timestamp = _first_row_by_timestamp(tx, queue, record, timestamp)
    if not _is_dated_ahead(record, now):
        return by_timestamp
    row = tx.one("observed_end_before", timestamp=timestamp, **_end_keys(queue, record))
    return max(by_timestamp, min(int(row.next_index or 0), record.next_index))


def _first_row_by_timestamp(
    tx: Transaction, queue: QueueRecord, record: PartitionRecord, timestamp: int
) -> int:
    """Return the index of the first row with a timestamp at or after ``timestamp``. Timestamps never
    decrease, so this is a binary search.
    """
    low, high = record.first_index, record.next_index
    while low < high:
        middle = (low + high) // 2
        segment = _segment_at(tx, queue, record.partition, middle)
        if segment is None:
            raise segment_missing(queue, record.partition, middle, middle + 1)
        if segment.last_timestamp < timestamp:
            low = int(segment.end_index)
        elif segment.first_timestamp >= timestamp:
            high = max(int(segment.start_index), low)
        else:
            older_rows = _read_runs(tx, queue, record.partition, segment).rows_before(timestamp)
            return max(int(segment.start_index) + older_rows, low)
    return low


def append_time_of(tx: Transaction, queue: QueueRecord, partition: int, row_index: int) -> int | None:
    """Return when a row was appended, in microseconds since 1970; None if there is no such row."""
    segment = _segment_at(tx, queue, partition, row_index)
    if segment is None:
        return None
    if segment.first_timestamp == segment.last_timestamp:
        return int(segment.first_timestamp)
    return _read_runs(tx, queue, partition, segment).timestamp_at(row_index - segment.start_index)


def _segment_at(tx: Transaction, queue: QueueRecord, partition: int, row_index: int) -> Row | None:
    """Return the segment that contains a row, or None."""
    segment = tx.one("segment_at", queue_id=queue.queue_id, partition=partition, row_index=row_index)
    return None if segment is None or segment.start_index > row_index else segment


def _read_runs(tx: Transaction, queue: QueueRecord, partition: int, segment: Row) -> Runs:
    start, end = segment.start_index, segment.end_index
    payload = tx.one("runs_of", payload_ids=json.dumps([segment.payload_id]))
    if payload is None or payload.runs is None:
        missing_error = StoreError(
            "the timestamps of these rows are missing: the store is damaged; restore a backup",
            condition="SEGMENT_MISSING",
        )
        raise unreadable(queue, partition, start, end, missing_error)
    try:
        return Runs.from_bytes(payload.runs, end - start)
    except StoreError as error:
        raise unreadable(queue, partition, start, end, error) from error


def end_is_due(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> bool:
    """Return whether it is time to record where the partition ends."""
    return _is_dated_ahead(record, now) and _is_end_due(
        queue, record, _newest_end(tx, queue, record, now), now
    )


def _record_end(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> None:
    """If it is time to, record where the locked partition ends now, and delete records that are no longer
    needed.
    """
    if not _is_dated_ahead(record, now):
        return
    newest = _newest_end(tx, queue, record, now)
    if not _is_end_due(queue, record, newest, now):
        return
    if newest is None:
        _warn_ahead(queue, record, now)
    keys = _end_keys(queue, record)
    tx.run("forget_observed_ends", now=now, expired=now - (queue.retention.age or 0), **keys)
    tx.run("insert_observed_end", now=now, next_index=record.next_index, **keys)


def _is_dated_ahead(record: PartitionRecord, now: int) -> bool:
    return record.last_timestamp > now + MAX_CLOCK_SKEW


def _newest_end(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> Row | None:
    newest: Row | None = tx.one("newest_observed_end", now=now, **_end_keys(queue, record))
    return newest


def _is_end_due(queue: QueueRecord, record: PartitionRecord, newest: Row | None, now: int) -> bool:
    age = queue.retention.age
    if age is None or not record.rows:
        return False
    if newest is None:
        return True
    return bool(newest.next_index < record.next_index and newest.observed_at + age // _ENDS_PER_AGE <= now)


def _end_keys(queue: QueueRecord, record: PartitionRecord) -> dict[str, int]:
    # ``last_clock`` does not change while new rows have timestamps ahead of the clock.
    return {
        "queue_id": queue.queue_id,
        "partition": record.partition,
        "last_clock": record.last_clock,
    }


def _warn_ahead(queue: QueueRecord, record: PartitionRecord, now: int) -> None:
    log.warning(
        "rows of queue %r, partition %d, have timestamps up to %s, ahead of this clock (%s). Until the clock "
        "catches up, retention counts from when it first saw the rows",
        queue.name,
        record.partition,
        _timestamp_text(record.last_timestamp),
        _timestamp_text(now),
        extra={"action": "dated_ahead", "queue": queue.name, "partition": record.partition},
    )


def _timestamp_text(microseconds: int) -> str:
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(" ", "seconds")
    except OverflowError:
        # Another program may have written the timestamp; retention continues.
        return f"{microseconds} microseconds after 1970"
