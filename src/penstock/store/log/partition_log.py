"""Append segments to partitions while holding the partitions' locks."""

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
from penstock.store.log.written import SegmentIndex, TaskSegments, store_task_segments
from penstock.store.records.catalog import (
    QueueRecord,
    dropped,
    partitions_added,
    require_columns,
    within_limits,
)
from penstock.store.records.queue_columns import FIRST_COLUMNS, id_text
from penstock.store.records.staged import NONE, StoredSegments

COMPACTION_FAN_IN = 64


@dataclass(frozen=True)
class Appended:
    """The result of one append."""

    partitions: Sequence[int] = ()
    row_counts: Sequence[int] = ()
    """The number of rows appended to each partition of the append."""
    ends: Sequence[int] = ()
    """The row index after the last appended row, for each of these partitions."""
    to_compact: tuple[int, ...] = ()
    """The partitions that may now have enough small segments to compact."""

    @property
    def rows(self) -> int:
        return sum(self.row_counts)

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The appended rows [start, end) by partition."""
        starts = map(sub, self.ends, self.row_counts)
        return dict(zip(self.partitions, zip(starts, self.ends, strict=True), strict=True))


def append_at_least_once(database: Database, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments in a separate transaction. If its outcome is unknown, they may be appended more than
    once.
    """
    write_objects(database, queue, segments)
    # A single statement is committed before this process can check the placement of keys.
    single = _is_single_statement(database.dialect, segments) and not queue.key
    return database.run(lambda tx: append(tx, queue, segments), single=single, idempotent=True)


def _is_single_statement(dialect: str, segments: Sequence[Segment]) -> bool:
    """Return whether one statement can append these segments."""
    return len(segments) == 1 and dialect == "postgres" and segments[0].stored is None


def append(tx: Transaction, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments as one append.

    Raises
    ------
    QueueChanged
        If rows with equal keys could end up in different partitions, or the queue lacks columns of the rows.
    """
    if _is_single_statement(tx.dialect, segments):
        return _append_single(tx, queue, segments[0])
    if not segments:
        return Appended()
    ordered = sorted(segments, key=attrgetter("partition"))
    # In PostgreSQL, writing payloads blocks no other writer, so write them before locking the partitions. In
    # SQLite all other writers wait anyway, and the first payload's id also serves as the append's id.
    require_columns(tx, queue, map(attrgetter("columns_id"), ordered))
    stored = store_payloads(tx, ordered)
    return publish_segments(tx, queue, stored, _first_payload(stored))


def _first_payload(stored: StoredSegments) -> int | None:
    """Return the id of the first payload in the database, if any."""
    return next((payload_id for payload_id in stored.payload_id if payload_id != NONE), None)


def append_task_segments(
    tx: Transaction, queue: QueueRecord, written: Sequence[TaskSegments], index: SegmentIndex
) -> Appended:
    """Append the segments that tasks have written as one append, as :func:`append` does."""
    if not any(task.objects for task in written):
        return append(tx, queue, index.segments(written))
    require_columns(tx, queue, index.columns_id)
    return publish_segments(tx, queue, store_task_segments(tx, written, index))


def _append_single(tx: Transaction, queue: QueueRecord, segment: Segment) -> Appended:
    """Append a segment in a single round trip to PostgreSQL."""
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
            gap=timestamp_gap(),
        )
    if row is None:
        require_columns(tx, queue, [segment.columns_id])
        raise dropped(queue)
    _check_partitions(tx, queue, {row.channel}, {row.total})
    partitions = (segment.partition,)
    to_compact = partitions if _needs_compaction(row.segments, 1) else ()
    return Appended(partitions, (segment.rows,), (row.next_index,), to_compact)


def timestamp_gap() -> int:
    """Return the microseconds between the timestamps of an append and the previous one if the clock has not
    advanced.

    The gap is random. So the rows' timestamps differ between a queue and the same queue after it was restored
    from a backup and received new rows.
    """
    return 1 + secrets.randbits(8)


def publish_segments(
    tx: Transaction, queue: QueueRecord, stored: StoredSegments, append_id: int | None = None
) -> Appended:
    """Make segments visible as one append.

    Append ids ascend within each partition. A SQLite transaction may pass the id that it has allocated as
    ``append_id``. PostgreSQL allocates the id while the partitions are locked.
    """
    if not stored.partition:
        return Appended()
    with within_limits(f"a partition of queue {queue.name!r}"):
        if tx.dialect == "postgres":
            return _publish_in_one_statement(tx, queue, stored)
        return _publish_by_partition(tx, queue, stored, append_id)


class _PartitionTotals(NamedTuple):
    """Totals of an append in each partition, and the position of each segment in its partition."""

    partitions: array[int]
    rows: array[int]
    bytes: array[int]
    segments: array[int]
    partition_numbers: array[int]
    """For each segment, the position of its partition in these lists, starting at 1."""
    rows_before: array[int]
    """For each segment, the number of the append's rows that come before it in its partition."""

    @classmethod
    def of(cls, stored: StoredSegments) -> _PartitionTotals:
        segment_partitions = stored.partition
        is_first = [*map(ne, segment_partitions, chain([None], segment_partitions))]
        if all(is_first):
            return cls._one_segment_each(stored)
        partition_numbers = [*accumulate(map(int, is_first))]
        boundaries = [*compress(count(), is_first), len(segment_partitions)]
        rows_upto = [*accumulate(stored.row_count, initial=0)]
        bytes_upto = [*accumulate(stored.bytes, initial=0)]
        rows_at = [rows_upto[bound] for bound in boundaries]
        bytes_at = [bytes_upto[bound] for bound in boundaries]
        return cls(
            array("q", compress(segment_partitions, is_first)),
            array("q", map(sub, rows_at[1:], rows_at)),
            array("q", map(sub, bytes_at[1:], bytes_at)),
            array("q", map(sub, boundaries[1:], boundaries)),
            array("q", partition_numbers),
            array("q", map(sub, rows_upto, [rows_at[number - 1] for number in partition_numbers])),
        )

    @classmethod
    def _one_segment_each(cls, stored: StoredSegments) -> _PartitionTotals:
        """Return the totals of an append with one segment in each partition, the most common case."""
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
        """Return the result of the append, from the ends and the numbers of segments of its partitions."""
        to_compact = compress(self.partitions, map(_needs_compaction, segments, self.segments))
        return Appended(self.partitions, self.rows, ends, tuple(to_compact))


def _publish_in_one_statement(tx: Transaction, queue: QueueRecord, stored: StoredSegments) -> Appended:
    """Make segments visible with a single PostgreSQL statement, since there may be thousands of
    partitions.
    """
    totals = _PartitionTotals.of(stored)
    advanced = tx.one(
        "publish_segments",
        queue_id=queue.queue_id,
        partition=totals.partitions,
        row_count=totals.rows,
        bytes=totals.bytes,
        segments=totals.segments,
        place=totals.partition_numbers,
        rows_before=totals.rows_before,
        segment_rows=array("q", stored.row_count),
        segment_bytes=array("q", stored.bytes),
        columns_id=array("q", stored.columns_id),
        payload_id=_without_only_nones(stored.payload_id),
        object_id=_without_only_nones(stored.object_id),
        start_byte=_without_only_nones(stored.start_byte),
        checksum=_without_only_nones(stored.checksum),
        gap=timestamp_gap(),
    )
    if advanced.partitions < len(totals.partitions):
        raise dropped(queue)
    _check_partitions(tx, queue, {advanced.channel}, {advanced.least_total, advanced.most_total})
    return totals.appended(advanced.next_index, advanced.segments)


def _without_only_nones(numbers: Sequence[int]) -> array[int]:
    """Return an array parameter, empty if it would only have ``NONE``, which takes less time to send."""
    return array("q", [] if numbers.count(NONE) == len(numbers) else numbers)


def _publish_by_partition(
    tx: Transaction, queue: QueueRecord, stored: StoredSegments, append_id: int | None
) -> Appended:
    totals = _PartitionTotals.of(stored)
    advanced = tx.all_for_many(
        "advance_partition",
        {
            "partition": totals.partitions,
            "row_count": totals.rows,
            "bytes": totals.bytes,
            "segments": totals.segments,
        },
        queue_id=queue.queue_id,
        gap=timestamp_gap(),
        now=tx.write_time(),
    )
    if len(advanced) < len(totals.partitions):
        raise dropped(queue)
    _check_partitions(
        tx, queue, {partition.channel for partition in advanced}, {partition.total for partition in advanced}
    )
    if append_id is None:
        append_id = allocate_payloads(tx, 1)[0]
    appended = totals.appended(
        [partition.next_index for partition in advanced], [partition.segments for partition in advanced]
    )
    starts_in_partition = [*map(sub, appended.ends, totals.rows)]
    starts = [
        starts_in_partition[number - 1] + before
        for number, before in zip(totals.partition_numbers, totals.rows_before, strict=True)
    ]
    timestamps = [advanced[number - 1].last_timestamp for number in totals.partition_numbers]
    tx.run_many(
        "insert_segment",
        {
            "partition": stored.partition,
            "start_index": starts,
            "end_index": [*map(add, starts, stored.row_count)],
            "first_timestamp": timestamps,
            "last_timestamp": timestamps,
            "bytes": stored.bytes,
            "columns_id": stored.columns_id,
            "payload_id": stored.payload_id,
            "object_id": stored.object_id,
            "start_byte": stored.start_byte,
            "checksum": stored.checksum,
        },
        queue_id=queue.queue_id,
        first_append=append_id,
        last_append=append_id,
    )
    return appended


def _check_partitions(
    tx: Transaction, queue: QueueRecord, channels: set[str | None], partition_counts: set[int]
) -> None:
    """Check the partitions that the append has advanced, and wake their watchers."""
    tx.channels.update(channel for channel in channels if channel is not None)
    if queue.key and partition_counts != {queue.partitions}:
        raise partitions_added(queue)


def _needs_compaction(total: int, added: int) -> bool:
    """Return whether adding ``added`` segments, ``total`` in all, may have made a compaction worthwhile."""
    return total // COMPACTION_FAN_IN > (total - added) // COMPACTION_FAN_IN
