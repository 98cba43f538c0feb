"""Where partitions ended at times by the clock, for rows that are dated ahead of it.

The time of a row never goes back inside a partition. So after one append under a clock that was far ahead, every later row of
the partition is dated as far ahead, and no age can be told from the rows. Retention therefore writes down now and then where
the partition ends: the rows below have been appended by then.

A record counts only while the clock is behind the rows. One that is written by a clock that is wrong itself, such as that of a
machine which starts in 1970, stops counting when the clock is right again.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.store.database import AHEAD, Transaction
from penstock.store.records.catalog import PartitionRecord, QueueRecord

log = logging.getLogger("penstock.store")

_STEPS = 16
"""How many records are kept in one retention age: so much more than its age a row may stay."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def rows_before(
    tx: Transaction, queue: QueueRecord, record: PartitionRecord, timestamp: int, now: int
) -> int:
    """A row index below which all rows were appended before ``timestamp``, by what was written down; 0 when nothing was."""
    if not _is_ahead(record, now):
        return 0
    row = tx.one("observed_end_before", timestamp=timestamp, **_keys(queue, record))
    return min(int(row.next_index or 0), record.next_index)


def is_due(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> bool:
    """Whether it is time to write down where the partition ends."""
    return _is_ahead(record, now) and _due(queue, record, _newest(tx, queue, record, now), now)


def observe(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> None:
    """Write down where the partition, which is locked, ends now, if it is time to; what is not needed any more goes."""
    if not _is_ahead(record, now):
        return
    newest = _newest(tx, queue, record, now)
    if not _due(queue, record, newest, now):
        return
    if newest is None:
        _warn(queue, record, now)
    keys = _keys(queue, record)
    tx.run("forget_observed_ends", now=now, expired=now - (queue.retention.age or 0), **keys)
    tx.run("insert_observed_end", now=now, next_index=record.next_index, **keys)


def _is_ahead(record: PartitionRecord, now: int) -> bool:
    return record.last_timestamp > now + AHEAD


def _newest(tx: Transaction, queue: QueueRecord, record: PartitionRecord, now: int) -> Any:
    return tx.one("newest_observed_end", now=now, **_keys(queue, record))


def _due(queue: QueueRecord, record: PartitionRecord, newest: Any, now: int) -> bool:
    age = queue.retention.age
    if age is None or not record.rows:
        return False
    return newest is None or (
        newest.next_index < record.next_index and newest.observed_at + age // _STEPS <= now
    )


def _keys(queue: QueueRecord, record: PartitionRecord) -> dict[str, int]:
    # While the clock is behind the newest row, the time of the newest row stays what it is.
    return {
        "queue_id": queue.queue_id,
        "partition": record.partition,
        "last_timestamp": record.last_timestamp,
    }


def _warn(queue: QueueRecord, record: PartitionRecord, now: int) -> None:
    log.warning(
        "rows of queue %r, partition %d, are dated up to %s, ahead of the clock, which says %s: one of the two is wrong. "
        "Until the clock has caught up, retention goes by when it first sees rows",
        queue.name,
        record.partition,
        _moment(record.last_timestamp),
        _moment(now),
        extra={"action": "dated_ahead", "queue": queue.name, "partition": record.partition},
    )


def _moment(microseconds: int) -> str:
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(" ", "seconds")
