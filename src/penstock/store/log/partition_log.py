"""The log of a partition: append segments under the partition's lock, read ranges page by page."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from penstock.errors import DataLostError, StoreError
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.decode import Decoder
from penstock.store.log.segmenting import Runs, Segment
from penstock.store.records.catalog import QueueRecord, dropped, grown

BLOCK = 4096
PAGE_SEGMENTS = 1024
PAGE_BYTES = 8 << 20
MERGE_FAN_IN = 64


@dataclass(frozen=True)
class Chunk:
    """Rows [start, end) of a partition as they are read."""

    start: int
    batch: pa.RecordBatch
    runs: Runs | None
    first_timestamp: int
    """The time of the segment's first row, and of all its rows unless it is compacted; microseconds since
    1970.
    """

    @property
    def end(self) -> int:
        return self.start + int(self.batch.num_rows)

    def timestamp_of(self, row_index: int) -> int:
        """The time of a row; with a read that has asked for runs."""
        return self.first_timestamp if self.runs is None else self.runs.timestamp_at(row_index - self.start)


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
    """A segment whose payload is in the store, before it has its row indexes."""

    partition: int
    rows: int
    bytes: int
    payload_id: int


def allocate_payloads(tx: Transaction, count: int) -> list[int]:
    """Ids for ``count`` payloads, ascending; later calls return higher ones."""
    ids: list[int] = []
    while len(ids) < count:
        first = tx.one("allocate_block").block * BLOCK
        ids.extend(range(first, first + min(BLOCK, count - len(ids))))
    return ids


def store_payloads(tx: Transaction, segments: Sequence[Segment], runs: pa.Buffer | None = None) -> list[int]:
    ids = allocate_payloads(tx, len(segments))
    # One by one, so that a segment is compressed while the previous one is being sent.
    rows = (
        {
            "payload_id": payload_id,
            "runs": runs and memoryview(runs),
            "data": memoryview(segment.payload),
            "width": segment.width,
        }
        for payload_id, segment in zip(ids, segments, strict=True)
    )
    # A single one needs no pipeline, in which a stopped client would keep its locks.
    tx.many("insert_payload", list(rows) if len(segments) == 1 else rows)
    return ids


def append(tx: Transaction, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments as one append; raise :class:`QueueGrown` if equal keys could part."""
    if len(segments) == 1 and tx.dialect == "postgres":
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
    row = tx.one(
        "append_segment",
        queue_id=queue.queue_id,
        partition=segment.partition,
        row_count=segment.rows,
        bytes=segment.bytes,
        data=memoryview(segment.payload),
        width=segment.width,
        gap=_gap(),
    )
    crowded = _advanced(tx, queue, row, 1)
    ranges = {segment.partition: (row.next_index - segment.rows, row.next_index)}
    return Appended(ranges, (segment.partition,) if crowded else ())


def _gap() -> int:
    """Microseconds by which an append is dated after the one before if the clock does not show a later time.

    At random, so that the times of a queue's rows tell it from one that was restored from a backup and has
    grown again.
    """
    return 1 + secrets.randbits(8)


def publish(
    tx: Transaction, queue: QueueRecord, stored: Sequence[Stored], append_id: int | None = None
) -> Appended:
    """Make segments, in the order of their partitions, visible as one append.

    The append id is drawn under the partitions' locks when it is None, so that ids ascend inside each
    partition.
    """
    now = tx.stamp()
    ranges: dict[int, tuple[int, int]] = {}
    crowded: list[int] = []
    rows: list[dict[str, int]] = []
    # The partitions are locked in ascending order.
    for partition, group in groupby(stored, key=attrgetter("partition")):
        segments = list(group)
        row_count = sum(segment.rows for segment in segments)
        advanced = tx.one(
            "advance_partition",
            queue_id=queue.queue_id,
            partition=partition,
            row_count=row_count,
            bytes=sum(segment.bytes for segment in segments),
            segments=len(segments),
            now=now,
            gap=_gap(),
        )
        if _advanced(tx, queue, advanced, len(segments)):
            crowded.append(partition)
        start = advanced.next_index - row_count
        ranges[partition] = (start, advanced.next_index)
        for segment in segments:
            rows.append(
                {
                    "queue_id": queue.queue_id,
                    "partition": partition,
                    "start_index": start,
                    "end_index": start + segment.rows,
                    "first_timestamp": advanced.last_timestamp,
                    "last_timestamp": advanced.last_timestamp,
                    "bytes": segment.bytes,
                    "payload_id": segment.payload_id,
                }
            )
            start += segment.rows
        # Not last_timestamp: an earlier append may be dated ahead of the clock in this partition alone.
        now = int(advanced.now)
    if append_id is None:
        append_id = allocate_payloads(tx, 1)[0]
    tx.many("insert_segment", [{"first_append": append_id, "last_append": append_id, **row} for row in rows])
    return Appended(ranges, tuple(crowded))


def _advanced(tx: Transaction, queue: QueueRecord, row: Row | None, segments: int) -> bool:
    """Check a partition that has been advanced, and wake its watchers; whether it may have enough segments
    to compact.
    """
    if row is None:
        raise dropped(queue)
    if row.channel is not None:
        tx.channels.add(row.channel)
    if queue.key and row.total != queue.partitions:
        raise grown(queue)
    return bool(row.segments // MERGE_FAN_IN > (row.segments - segments) // MERGE_FAN_IN)


def read(
    database: Database,
    queue: QueueRecord,
    partition: int,
    start: int,
    end: int,
    *,
    columns: Sequence[str] | None = None,
    page_bytes: int = PAGE_BYTES,
    on_lost: str = "fail",
    with_runs: bool = False,
) -> Iterator[Chunk]:
    """Read rows [start, end) of a partition, chunk by chunk; each page is a transaction of its own.

    ``columns`` are those to decode, all when None; rows from before a column was added have nulls in it. A
    page has at most ``page_bytes`` compressed bytes, or one segment. ``on_lost`` is ``fail``, or ``skip`` to
    resume after rows that were trimmed. ``with_runs`` asks for each row's time, which costs a little for
    compacted segments.
    """
    position, decoder = start, Decoder(queue, columns)
    while position < end:
        first, rows = _page(database, queue, partition, position, end, page_bytes, with_runs)
        if first > position:
            if on_lost == "fail":
                raise lost(queue.name, partition, position, min(first, end))
            position = first
            continue
        if not rows:
            raise StoreError(
                f"queue {queue.name!r}, partition {partition}, has no row {position}: the range ends at "
                f"{end}, past the newest row",
                condition="STORE_ERROR.PAST_END",
            )
        for row in rows:
            if row.start_index > position:
                raise StoreError(
                    f"queue {queue.name!r}, partition {partition}, lacks rows [{position}, "
                    f"{row.start_index}): the store is damaged; restore a backup",
                    condition="SEGMENT_MISSING",
                )
            chunk = _chunk(row, decoder, position, end)
            position = chunk.end
            yield chunk


def lost(queue: str, partition: int, start: int, end: int) -> DataLostError:
    return DataLostError(
        f"rows [{start}, {end}) of queue {queue!r}, partition {partition}, have been trimmed; seek the "
        "consumer to 'earliest', or set failOnDataLoss=false to go on without them",
        condition="DATA_LOST.TRIMMED",
        queue=queue,
        partition=partition,
        start=start,
        end=end,
    )


def _page(
    database: Database,
    queue: QueueRecord,
    partition: int,
    start: int,
    end: int,
    page_bytes: int,
    with_runs: bool,
) -> tuple[int, list[Row]]:
    """The partition's first row index, and the segments of a page."""

    def work(tx: Transaction) -> tuple[int, list[Row]]:
        rows = tx.page(
            queue_id=queue.queue_id,
            partition=partition,
            start_index=start,
            end_index=end,
            max_segments=PAGE_SEGMENTS,
            max_bytes=page_bytes,
            with_runs=int(with_runs),
        )
        record = tx.one("read_partition", queue_id=queue.queue_id, partition=partition)
        if record is None:
            raise dropped(queue)
        return record.first_index, rows

    return database.run(work, write=False)


def segments_from(tx: Transaction, queue: QueueRecord, partition: int, start: int) -> Iterator[Row]:
    """Yield the segments of a partition that end after a row index, without their rows, page by page."""
    while page := tx.all(
        "read_segments",
        queue_id=queue.queue_id,
        partition=partition,
        start_index=start,
        max_segments=PAGE_SEGMENTS,
    ):
        yield from page
        start = page[-1].end_index


def _chunk(row: Row, decoder: Decoder, position: int, end: int) -> Chunk:
    batch = decoder.rows(row)
    if batch.num_rows != row.end_index - row.start_index:
        raise StoreError(
            f"the segment of rows [{row.start_index}, {row.end_index}) has {batch.num_rows} rows: the store "
            "is damaged; restore a backup",
            condition="SEGMENT_UNREADABLE",
            rows=batch.num_rows,
        )
    runs = Runs.from_bytes(row.runs) if row.runs is not None else None
    whole = Chunk(row.start_index, batch, runs, row.first_timestamp)
    offset = max(position - row.start_index, 0)
    length = min(end, row.end_index) - row.start_index - offset
    if offset == 0 and length == batch.num_rows:
        return whole
    return replace(
        whole,
        start=row.start_index + offset,
        batch=batch.slice(offset, length),
        runs=runs.slice(offset, length) if runs else None,
    )
