"""The log of a partition: append segments under the partition's lock, read ranges page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from penstock.arrow.segments import decode, encode
from penstock.errors import CommitRefused, DataLost, InvalidInput, StoreError
from penstock.store.catalog import QueueRecord, dropped
from penstock.store.database import Database, Transaction
from penstock.store.runs import Runs

BLOCK = 4096
PAGE_SEGMENTS = 1024
PAGE_BYTES = 8 << 20
SEGMENT_ROWS = 65_536
SEGMENT_RAW_BYTES = 32 << 20
MAX_PAYLOAD = 900_000_000
"""Bytes of one segment that both databases still take; only a single huge row comes near it."""
MERGE_FAN_IN = 64


class QueueGrown(CommitRefused):
    """The queue got more partitions between the placing of the rows and their append."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of one partition, compressed and ready to be stored."""

    partition: int
    rows: int
    payload: pa.Buffer

    @property
    def bytes(self) -> int:
        return int(self.payload.size)


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


def to_segments(
    table: pa.Table | pa.RecordBatch, partition: int, *, max_rows: int = SEGMENT_ROWS
) -> list[Segment]:
    """Cut rows into compressed segments of at most ``max_rows`` rows and about 32 MiB of Arrow data.

    Raises
    ------
    InvalidInput
        When a single row is too large for a database.
    """
    if isinstance(table, pa.RecordBatch):
        batches = [table.slice(start, max_rows) for start in range(0, table.num_rows, max_rows)]
    else:
        combined = table.combine_chunks() if table.num_rows > 0 else table
        batches = [batch for batch in combined.to_batches(max_chunksize=max_rows) if batch.num_rows]
    return [
        Segment(partition, piece.num_rows, _encoded(piece)) for batch in batches for piece in _halved(batch)
    ]


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows < 2 or batch.nbytes <= SEGMENT_RAW_BYTES:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _halved(batch.slice(0, middle))
    yield from _halved(batch.slice(middle))


def _encoded(batch: pa.RecordBatch) -> pa.Buffer:
    payload = encode(batch)
    if payload.size > MAX_PAYLOAD:
        raise InvalidInput(
            f"a row takes {payload.size} bytes, more than a database holds in one value: keep large objects in files and "
            "append their paths",
            size=payload.size,
            limit=MAX_PAYLOAD,
        )
    return payload


def allocate_payloads(tx: Transaction, count: int) -> list[int]:
    """Ids for ``count`` payloads, ascending; later calls give higher ones."""
    ids: list[int] = []
    while len(ids) < count:
        first = tx.one("allocate_block").block * BLOCK
        ids.extend(range(first, first + min(BLOCK, count - len(ids))))
    return ids


def store_payloads(tx: Transaction, segments: Sequence[Segment], runs: pa.Buffer | None = None) -> list[int]:
    ids = allocate_payloads(tx, len(segments))
    tx.many(
        "insert_payload",
        [
            {"payload_id": payload_id, "runs": runs and memoryview(runs), "data": memoryview(segment.payload)}
            for payload_id, segment in zip(ids, segments, strict=True)
        ],
    )
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
    ordered = sorted(segments, key=lambda segment: segment.partition)
    placed = place(tx, queue, [(segment.partition, segment.rows, segment.bytes) for segment in ordered])
    ids = store_payloads(tx, ordered)
    return publish(tx, queue, placed, ids, ids[0]) if ids else Appended({})


def _append_one(tx: Transaction, queue: QueueRecord, segment: Segment) -> Appended:
    row = tx.one(
        "append_segment",
        queue_id=queue.queue_id,
        partition=segment.partition,
        row_count=segment.rows,
        bytes=segment.bytes,
        data=memoryview(segment.payload),
    )
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
        places += _spread(queue, row, partition, [size[1:] for size in members])
        now = places[-1].timestamp
    return places


def _spread(queue: QueueRecord, row: Any, partition: int, sizes: Sequence[tuple[int, int]]) -> list[Place]:
    """One place behind the other, up to where the partition ends now."""
    if row is None:
        raise dropped(queue)
    if queue.key and row.total != queue.partitions:
        raise QueueGrown(
            f"queue {queue.name!r} got more partitions while rows for {queue.partitions} of them were written: repeat "
            "the append, or restart the query, which repeats the micro-batch",
            queue=queue.name,
        )
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
        The columns to decode; all when None.
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
    position = start
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
            chunk = _chunk(row, queue.schema, columns, position, end)
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
        rows = tx.all(
            "read_page",
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


def _chunk(row: Any, schema: pa.Schema, columns: Sequence[str] | None, position: int, end: int) -> Chunk:
    batch = decode(row.data, schema, columns)
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
