"""The log of a partition: append segments under the partition's lock, read ranges page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from penstock.errors import DataLost, StoreError
from penstock.store.database import Database, Transaction
from penstock.store.log.decode import Decoder
from penstock.store.log.segmenting import SEGMENT_ROWS as SEGMENT_ROWS
from penstock.store.log.segmenting import Runs
from penstock.store.log.segmenting import Segment as Segment
from penstock.store.log.segmenting import to_segments as to_segments
from penstock.store.records.catalog import QueueGrown as QueueGrown
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
    """The time of the segment's first row, and of all its rows when it was never merged; microseconds since 1970."""

    @property
    def end(self) -> int:
        return self.start + int(self.batch.num_rows)


def allocate_payloads(tx: Transaction, count: int) -> list[int]:
    """Ids for ``count`` payloads, ascending; later calls give higher ones."""
    ids: list[int] = []
    while len(ids) < count:
        first = tx.one("allocate_block").block * BLOCK
        ids.extend(range(first, first + min(BLOCK, count - len(ids))))
    return ids


def store_payloads(tx: Transaction, segments: Sequence[Segment], runs: pa.Buffer | None = None) -> list[int]:
    ids = allocate_payloads(tx, len(segments))
    # One by one, so that a segment is compressed while the one before is on its way.
    rows = (
        {
            "payload_id": payload_id,
            "runs": runs and memoryview(runs),
            "data": memoryview(segment.payload),
            "width": segment.width,
        }
        for payload_id, segment in zip(ids, segments, strict=True)
    )
    # A single one needs no pipeline, in which a client that stops would keep its locks.
    tx.many("insert_payload", list(rows) if len(segments) == 1 else rows)
    return ids


@dataclass(frozen=True)
class Appended:
    """What one append added."""

    ranges: dict[int, tuple[int, int]]
    """The first and end row index of each partition that it touched."""
    crowded: tuple[int, ...] = ()
    """The partitions in which it is time to look for small segments to merge."""

    @property
    def rows(self) -> int:
        return sum(end - start for start, end in self.ranges.values())


def append(tx: Transaction, queue: QueueRecord, segments: Sequence[Segment]) -> Appended:
    """Append segments as one append.

    Raises
    ------
    QueueGrown
        When the queue has keys and got more partitions than ``queue`` says: equal keys could part.
    """
    if len(segments) == 1 and tx.dialect == "postgres":
        return _append_one(tx, queue, segments[0])
    if not segments:
        return Appended({})
    ordered = sorted(segments, key=lambda segment: segment.partition)
    # The payloads come first, for nobody waits for them; then the partitions are locked, and an append's id is drawn under
    # their locks, so that the ids ascend inside each partition. In SQLite everybody waits anyway.
    ids = store_payloads(tx, ordered)
    places = place(tx, queue, [(segment.partition, segment.rows, segment.bytes) for segment in ordered])
    append_id = ids[0] if tx.dialect == "sqlite" else allocate_payloads(tx, 1)[0]
    return publish(tx, queue, places, ids, append_id)


def _append_one(tx: Transaction, queue: QueueRecord, segment: Segment) -> Appended:
    row = tx.one(
        "append_segment",
        queue_id=queue.queue_id,
        partition=segment.partition,
        row_count=segment.rows,
        bytes=segment.bytes,
        data=memoryview(segment.payload),
        width=segment.width,
    )
    _tell(tx, row)
    (only,) = _spread(queue, row, segment.partition, [(segment.rows, segment.bytes)])
    return Appended({only.partition: (only.start, only.end)}, (only.partition,) if only.crowded else ())


@dataclass(frozen=True)
class Place:
    """Where a segment goes."""

    partition: int
    start: int
    end: int
    bytes: int
    timestamp: int
    crowded: bool


def place(tx: Transaction, queue: QueueRecord, sizes: Sequence[tuple[int, int, int]]) -> list[Place]:
    """Lock the partitions in ascending order and give each (partition, rows, bytes) its row indexes.

    Raises
    ------
    QueueGrown
        As :func:`append`.
    """
    now = tx.stamp()
    places: list[Place] = []
    for partition, group in groupby(sizes, key=lambda size: size[0]):
        members = list(group)
        rows = sum(size[1] for size in members)
        row = tx.one(
            "advance_partition",
            queue_id=queue.queue_id,
            partition=partition,
            row_count=rows,
            bytes=sum(size[2] for size in members),
            segments=len(members),
            now=now,
        )
        _tell(tx, row)
        places += _spread(queue, row, partition, [size[1:] for size in members])
        # Not the time of the rows: where an earlier append was dated ahead of the clock, the other partitions are not.
        now = int(row.now)
    return places


def _tell(tx: Transaction, row: Any) -> None:
    if row is not None and row.channel is not None:
        tx.notify(row.channel)


def _spread(queue: QueueRecord, row: Any, partition: int, sizes: Sequence[tuple[int, int]]) -> list[Place]:
    """One place behind the other, up to where the partition ends now."""
    if row is None:
        raise dropped(queue)
    if queue.key and row.total != queue.partitions:
        raise grown(queue)
    crowded = row.segments // MERGE_FAN_IN > (row.segments - len(sizes)) // MERGE_FAN_IN
    start = row.next_index - sum(rows for rows, _ in sizes)
    places = []
    for rows, size in sizes:
        places.append(Place(partition, start, start + rows, size, row.last_timestamp, crowded))
        start += rows
    return places


def publish(
    tx: Transaction, queue: QueueRecord, places: Sequence[Place], payload_ids: Sequence[int], append_id: int
) -> Appended:
    """Make placed segments visible as one append."""
    tx.many(
        "insert_segment",
        [
            {
                "queue_id": queue.queue_id,
                "partition": place.partition,
                "start_index": place.start,
                "end_index": place.end,
                "first_append": append_id,
                "last_append": append_id,
                "first_timestamp": place.timestamp,
                "last_timestamp": place.timestamp,
                "bytes": place.bytes,
                "payload_id": payload_id,
            }
            for place, payload_id in zip(places, payload_ids, strict=True)
        ],
    )
    ranges: dict[int, tuple[int, int]] = {}
    for place in places:
        ranges[place.partition] = (ranges.get(place.partition, (place.start, 0))[0], place.end)
    return Appended(ranges, tuple(sorted({place.partition for place in places if place.crowded})))


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
    """Rows [start, end) of a partition, chunk by chunk; each page is a transaction of its own.

    Parameters
    ----------
    columns
        The columns to decode; all that ``queue`` has when None. Rows that were written before a column was added have nulls there.
    page_bytes
        Compressed bytes fetched at a time; one segment at the least.
    on_lost
        ``fail``, or ``skip`` for going on behind rows that were trimmed.
    with_runs
        Whether each row's time is wanted; it costs a little where segments have been merged.

    Raises
    ------
    DataLost
        When a part of the range has been trimmed and ``on_lost`` is ``fail``.
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
                f"queue {queue.name!r}, partition {partition}, has no row {position}: the range ends at {end}, "
                "past the newest row"
            )
        for row in rows:
            if row.start_index > position:
                raise StoreError(
                    f"queue {queue.name!r}, partition {partition}, lacks rows [{position}, {row.start_index}): the store "
                    "is damaged; restore a backup",
                    condition="SEGMENT_MISSING",
                )
            chunk = _chunk(row, decoder, position, end)
            position = chunk.end
            yield chunk


def lost(queue: str, partition: int, start: int, end: int) -> DataLost:
    return DataLost(
        f"rows [{start}, {end}) of queue {queue!r}, partition {partition}, have been trimmed; seek the consumer to "
        "'earliest', or set failOnDataLoss=false to go on without them",
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
) -> tuple[int, list[Any]]:
    def work(tx: Transaction) -> tuple[int, list[Any]]:
        rows = tx.page(
            queue_id=queue.queue_id,
            partition=partition,
            start_index=start,
            end_index=end,
            max_segments=PAGE_SEGMENTS,
            max_bytes=page_bytes,
            with_runs=int(with_runs),
        )
        found = tx.one("read_partition", queue_id=queue.queue_id, partition=partition)
        if found is None:
            raise dropped(queue)
        return found.first_index, rows

    return database.run(work, write=False)


def _other_rows(row: Any, found: int) -> StoreError:
    return StoreError(
        f"the segment of rows [{row.start_index}, {row.end_index}) has {found} rows: the store is damaged; restore a backup",
        condition="SEGMENT_UNREADABLE",
        rows=found,
    )


def _chunk(row: Any, decoder: Decoder, position: int, end: int) -> Chunk:
    batch = decoder.rows(row)
    if batch.num_rows != row.end_index - row.start_index:
        raise _other_rows(row, batch.num_rows)
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
