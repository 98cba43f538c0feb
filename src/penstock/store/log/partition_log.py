"""Append segments to partitions, under the partitions' locks."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, count
from operator import add, attrgetter, ne, sub
from typing import NamedTuple

from penstock.store.database import Database, Transaction
from penstock.store.log.payloads import allocate_payloads, store_payloads, write_objects
from penstock.store.log.segmenting import Segment
from penstock.store.log.written import Index, Written, store_written
from penstock.store.records.catalog import QueueRecord, dropped, grown, require_columns, within_limits
from penstock.store.records.queue_columns import FIRST_COLUMNS, id_text
from penstock.store.records.staged import Stored

COMPACTION_FAN_IN = 64


@dataclass(frozen=True)
class Appended:
    """The result of one append."""

    partitions: Sequence[int] = ()
    row_counts: Sequence[int] = ()
    """The rows of the append in each of its partitions."""
    ends: Sequence[int] = ()
    """The row index after the append's last row in each of these partitions."""
    to_compact: tuple[int, ...] = ()
    """The partitions that may have enough small segments to compact."""

    @property
    def rows(self) -> int:
        return sum(self.row_counts)

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The append's rows [start, end) by partition."""
        starts = map(sub, self.ends, self.row_counts)
        return dict(zip(self.partitions, zip(starts, self.ends, strict=True), strict=True))


def append_repeatably(database: Database, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments in a separate transaction, possibly more than once if its outcome is unknown."""
    write_objects(database, queue, segments)
    # A single statement is committed before its result is checked for keys.
    single = _is_one(database.dialect, segments) and not queue.key
    return database.run(lambda tx: append(tx, queue, segments), single=single, idempotent=True)


def _is_one(dialect: str, segments: Sequence[Segment]) -> bool:
    """Whether segments are appended with one statement."""
    return len(segments) == 1 and dialect == "postgres" and segments[0].stored is None


def append(tx: Transaction, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments as one append.

    Raises
    ------
    QueueChanged
        When rows with equal keys could end up in different partitions, or the queue does not have the rows'
        columns.
    """
    if _is_one(tx.dialect, segments):
        return _append_one(tx, queue, segments[0])
    if not segments:
        return Appended()
    ordered = sorted(segments, key=attrgetter("partition"))
    # Writing payloads blocks no other writer in PostgreSQL, so it is done before the partitions are locked.
    # In SQLite all other writers wait anyway, and the first payload's id can be the append's.
    require_columns(tx, queue, map(attrgetter("columns_id"), ordered))
    ids = store_payloads(tx, ordered)
    return publish(tx, queue, stored_columns(ordered, ids), ids[0])


def stored_columns(segments: Sequence[Segment], payload_ids: Sequence[int]) -> Stored:
    """Return segments whose payloads have these ids, column by column."""
    rows, sizes = ([*map(attrgetter(name), segments)] for name in ("rows", "bytes"))
    return Stored([segment.partition for segment in segments], rows, sizes, payload_ids)


def append_written(tx: Transaction, queue: QueueRecord, written: Sequence[Written], index: Index) -> Appended:
    """Append what tasks have written as one append, as :func:`append` does."""
    if not any(each.objects for each in written):
        return append(tx, queue, index.segments(written))
    require_columns(tx, queue, index.columns_id)
    ids = store_written(tx, written, index)
    return publish(tx, queue, Stored(index.partition, index.rows, index.length, ids), ids[0])


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
            columns_id=segment.columns_id,
            columns=None if segment.columns_id == FIRST_COLUMNS else id_text(segment.columns_id),
            gap=gap_after_last(),
        )
    if row is None:
        require_columns(tx, queue, [segment.columns_id])
        raise dropped(queue)
    _check_heads(tx, queue, {row.channel}, {row.total})
    where = (segment.partition,)
    to_compact = where if _needs_compaction(row.segments, 1) else ()
    return Appended(where, (segment.rows,), (row.next_index,), to_compact)


def gap_after_last() -> int:
    """Return the microseconds by which an append is dated after the previous one if the clock has not
    advanced.

    Random, so that the rows' times distinguish a queue from one that was restored from a backup and has grown
    again.
    """
    return 1 + secrets.randbits(8)


def publish(tx: Transaction, queue: QueueRecord, stored: Stored, append_id: int | None = None) -> Appended:
    """Make segments visible as one append.

    Append ids ascend within each partition. ``append_id`` may be an id that a SQLite transaction has
    allocated; PostgreSQL allocates it under the partitions' locks.
    """
    if not stored.partition:
        return Appended()
    with within_limits(f"a partition of queue {queue.name!r}"):
        if tx.dialect == "postgres":
            return _publish_at_once(tx, queue, stored)
        return _publish_one_by_one(tx, queue, stored, append_id)


class _Parts(NamedTuple):
    """An append by partition: the totals of each partition, and where each segment goes in it."""

    partitions: array[int]
    rows: array[int]
    bytes: array[int]
    segments: array[int]
    places: array[int]
    """For each segment, the position of its partition in these lists, counted from 1."""
    rows_before: array[int]
    """For each segment, the rows of the append that come before it in its partition."""

    @classmethod
    def of(cls, stored: Stored) -> _Parts:
        of_segments = stored.partition
        begins = [*map(ne, of_segments, chain([None], of_segments))]
        if all(begins):
            return cls._one_each(stored)
        places = [*accumulate(map(int, begins))]
        bounds = [*compress(count(), begins), len(of_segments)]
        rows_upto = [*accumulate(stored.row_count, initial=0)]
        bytes_upto = [*accumulate(stored.bytes, initial=0)]
        rows_at = [rows_upto[bound] for bound in bounds]
        bytes_at = [bytes_upto[bound] for bound in bounds]
        return cls(
            array("q", compress(of_segments, begins)),
            array("q", map(sub, rows_at[1:], rows_at)),
            array("q", map(sub, bytes_at[1:], bytes_at)),
            array("q", map(sub, bounds[1:], bounds)),
            array("q", places),
            array("q", map(sub, rows_upto, [rows_at[place - 1] for place in places])),
        )

    @classmethod
    def _one_each(cls, stored: Stored) -> _Parts:
        """Return the parts of an append with one segment in each partition, which most appends have."""
        count = len(stored.partition)
        return cls(
            array("q", stored.partition),
            array("q", stored.row_count),
            array("q", stored.bytes),
            array("q", [1]) * count,
            array("q", range(1, count + 1)),
            array("q", [0]) * count,
        )

    def appended(self, ends: Sequence[int], segments: Sequence[int]) -> Appended:
        """Return the result for partitions with these ends and numbers of segments."""
        to_compact = compress(self.partitions, map(_needs_compaction, segments, self.segments))
        return Appended(self.partitions, self.rows, ends, tuple(to_compact))


def _publish_at_once(tx: Transaction, queue: QueueRecord, stored: Stored) -> Appended:
    """Make segments visible with one PostgreSQL statement, since there may be thousands of partitions."""
    parts = _Parts.of(stored)
    moved = tx.one(
        "publish_segments",
        queue_id=queue.queue_id,
        partition=parts.partitions,
        row_count=parts.rows,
        bytes=parts.bytes,
        segments=parts.segments,
        place=parts.places,
        rows_before=parts.rows_before,
        segment_rows=array("q", stored.row_count),
        segment_bytes=array("q", stored.bytes),
        payload_id=array("q", stored.payload_id),
        gap=gap_after_last(),
    )
    if moved.partitions < len(parts.partitions):
        raise dropped(queue)
    _check_heads(tx, queue, {moved.channel}, {moved.least_total, moved.most_total})
    return parts.appended(moved.next_index, moved.segments)


def _publish_one_by_one(
    tx: Transaction, queue: QueueRecord, stored: Stored, append_id: int | None
) -> Appended:
    parts = _Parts.of(stored)
    heads = tx.all_for_many(
        "advance_partition",
        {
            "partition": parts.partitions,
            "row_count": parts.rows,
            "bytes": parts.bytes,
            "segments": parts.segments,
        },
        queue_id=queue.queue_id,
        gap=gap_after_last(),
        now=tx.write_time(),
    )
    if len(heads) < len(parts.partitions):
        raise dropped(queue)
    _check_heads(tx, queue, {head.channel for head in heads}, {head.total for head in heads})
    if append_id is None:
        append_id = allocate_payloads(tx, 1)[0]
    appended = parts.appended([head.next_index for head in heads], [head.segments for head in heads])
    starts_in_partition = [*map(sub, appended.ends, parts.rows)]
    starts = [
        starts_in_partition[place - 1] + before
        for place, before in zip(parts.places, parts.rows_before, strict=True)
    ]
    times = [heads[place - 1].last_timestamp for place in parts.places]
    tx.run_many(
        "insert_segment",
        {
            "partition": stored.partition,
            "start_index": starts,
            "end_index": [*map(add, starts, stored.row_count)],
            "first_timestamp": times,
            "last_timestamp": times,
            "bytes": stored.bytes,
            "payload_id": stored.payload_id,
        },
        queue_id=queue.queue_id,
        first_append=append_id,
        last_append=append_id,
    )
    return appended


def _check_heads(tx: Transaction, queue: QueueRecord, channels: set[str | None], totals: set[int]) -> None:
    """Check partitions that have been advanced, and wake their watchers."""
    tx.channels.update(channel for channel in channels if channel is not None)
    if queue.key and totals != {queue.partitions}:
        raise grown(queue)


def _needs_compaction(now: int, new: int) -> bool:
    """Whether ``new`` segments, which bring the number to ``now``, may have made enough to compact."""
    return now // COMPACTION_FAN_IN > (now - new) // COMPACTION_FAN_IN
