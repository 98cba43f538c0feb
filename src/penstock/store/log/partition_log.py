"""The log of a partition: segments are appended under its lock."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, sub
from typing import NamedTuple

from penstock.store.database import Database, Row, Transaction
from penstock.store.log.payloads import allocate_payloads, put_away, store_payloads
from penstock.store.log.segmenting import Segment
from penstock.store.records.catalog import QueueRecord, dropped, grown, within_limits

MERGE_FAN_IN = 64


@dataclass(frozen=True)
class Appended:
    """The result of one append."""

    ranges: dict[int, tuple[int, int]]
    """The first and end row index in each partition of the append."""
    crowded: tuple[int, ...] = ()
    """The partitions that may have enough small segments to compact."""

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.ranges.values())


class Stored(NamedTuple):
    """A segment whose payload is in the store, before it has its row indexes; a staged row has these fields,
    too.
    """

    partition: int
    row_count: int
    bytes: int
    payload_id: int


def append_repeatably(database: Database, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments in a transaction of their own, more than once if its outcome is unknown."""
    put_away(database, queue, segments)
    # A single statement is committed before its result is checked for keys.
    single = _is_one(database.dialect, segments) and not queue.key
    return database.run(lambda tx: append(tx, queue, segments), single=single, idempotent=True)


def _is_one(dialect: str, segments: Sequence[Segment]) -> bool:
    """Whether segments are appended with one statement."""
    return len(segments) == 1 and dialect == "postgres" and segments[0].stored is None


def append(tx: Transaction, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments as one append; raise :class:`QueueGrown` if equal keys could part."""
    if _is_one(tx.dialect, segments):
        return _append_one(tx, queue, segments[0])
    if not segments:
        return Appended({})
    ordered = sorted(segments, key=attrgetter("partition"))
    # Nobody waits for the payloads, so they are written before the partitions are locked. In SQLite
    # everybody waits anyway.
    ids = store_payloads(tx, ordered)
    stored = [
        Stored(segment.partition, segment.rows, segment.bytes, payload_id)
        for segment, payload_id in zip(ordered, ids, strict=True)
    ]
    return publish(tx, queue, stored, ids[0] if tx.dialect == "sqlite" else None)


def _append_one(tx: Transaction, queue: QueueRecord, segment: Segment) -> Appended:
    """Append a segment in one round trip to PostgreSQL."""
    with within_limits(f"partition {segment.partition} of queue {queue.name!r}"):
        row = tx.one(
            "append_segment",
            queue_id=queue.queue_id,
            partition=segment.partition,
            row_count=segment.rows,
            bytes=segment.bytes,
            data=memoryview(segment.payload),
            width=segment.width,
            gap=gap_after_last(),
        )
    if row is None:
        raise dropped(queue)
    _check_heads(tx, queue, [row])
    ranges = {segment.partition: (row.next_index - segment.rows, row.next_index)}
    return Appended(ranges, (segment.partition,) if _is_crowded(row.segments, 1) else ())


def gap_after_last() -> int:
    """Microseconds by which an append is dated after the one before if the clock does not show a later time.

    At random, so that the times of a queue's rows tell it from one that was restored from a backup and has
    grown again.
    """
    return 1 + secrets.randbits(8)


def publish(
    tx: Transaction, queue: QueueRecord, stored: Sequence[Stored | Row], append_id: int | None = None
) -> Appended:
    """Make segments, in the order of their partitions, visible as one append.

    The append id is drawn under the partitions' locks when it is None, so that ids ascend inside each
    partition.
    """
    if not stored:
        return Appended({})
    totals = _totals(stored)
    now = tx.stamp()
    stamp = {} if now is None else {"now": now}
    # The partitions are locked in ascending order.
    with within_limits(f"a partition of queue {queue.name!r}"):
        found = tx.each("advance_partition", totals, queue_id=queue.queue_id, gap=gap_after_last(), **stamp)
    by_partition = {row.partition: row for row in found}
    if len(by_partition) < len(totals["partition"]):
        raise dropped(queue)
    _check_heads(tx, queue, found)
    # Column by column, since there may be thousands of partitions.
    partitions, counts, new = totals["partition"], totals["row_count"], totals["segments"]
    heads = [by_partition[partition] for partition in partitions]
    ends = [head.next_index for head in heads]
    ranges = dict(zip(partitions, zip(map(sub, ends, counts), ends, strict=True), strict=True))
    segments = zip(partitions, [head.segments for head in heads], new, strict=True)
    crowded = tuple(partition for partition, now, more in segments if _is_crowded(now, more))
    if append_id is None:
        append_id = allocate_payloads(tx, 1)[0]
    starts, ends = _numbered(stored, ranges)
    times = [by_partition[each.partition].last_timestamp for each in stored]
    tx.many(
        "insert_segment",
        {
            "partition": [each.partition for each in stored],
            "start_index": starts,
            "end_index": ends,
            "first_timestamp": times,
            "last_timestamp": times,
            "bytes": [each.bytes for each in stored],
            "payload_id": [each.payload_id for each in stored],
        },
        queue_id=queue.queue_id,
        first_append=append_id,
        last_append=append_id,
    )
    return Appended(ranges, crowded)


def _totals(stored: Sequence[Stored | Row]) -> dict[str, list[int]]:
    """What each partition gets, in the order of the segments."""
    partitions = [each.partition for each in stored]
    if len(set(partitions)) == len(partitions):
        # As mostly; thousands of partitions take a while.
        return {
            "partition": partitions,
            "row_count": [each.row_count for each in stored],
            "bytes": [each.bytes for each in stored],
            "segments": [1] * len(partitions),
        }
    totals: dict[int, list[int]] = {}
    for each in stored:
        total = totals.setdefault(each.partition, [0, 0, 0])
        total[0] += each.row_count
        total[1] += each.bytes
        total[2] += 1
    counts = zip(*totals.values(), strict=True)
    return {
        "partition": list(totals),
        **{name: list(each) for name, each in zip(("row_count", "bytes", "segments"), counts, strict=True)},
    }


def _numbered(
    stored: Sequence[Stored | Row], ranges: Mapping[int, tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """The first and end row index of each segment."""
    if len(stored) == len(ranges):
        return [start for start, _ in ranges.values()], [end for _, end in ranges.values()]
    free = {partition: start for partition, (start, _) in ranges.items()}
    starts, ends = [], []
    for each in stored:
        start = free[each.partition]
        free[each.partition] = end = start + each.row_count
        starts.append(start)
        ends.append(end)
    return starts, ends


def _check_heads(tx: Transaction, queue: QueueRecord, heads: Sequence[Row]) -> None:
    """Check partitions that have been advanced, and wake their watchers."""
    tx.channels.update(row.channel for row in heads if row.channel is not None)
    if queue.key and any(row.total != queue.partitions for row in heads):
        raise grown(queue)


def _is_crowded(now: int, new: int) -> bool:
    """Whether ``new`` segments, which make ``now``, may have made enough to compact."""
    return now // MERGE_FAN_IN > (now - new) // MERGE_FAN_IN
