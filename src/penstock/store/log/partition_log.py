"""The log of a partition: append segments under the partition's lock, read ranges page by page."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from penstock.errors import DataLostError, StoreError
from penstock.parallel import ahead
from penstock.store.database import Database, Row, Transaction
from penstock.store.log.decode import Decoder, unreadable
from penstock.store.log.payloads import allocate_payloads, put_away, store_payloads, with_payloads
from penstock.store.log.segmenting import Runs, Segment
from penstock.store.records.catalog import QueueRecord, dropped, grown

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
    ends_page: bool = False
    """Whether what follows is read in another transaction."""

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
    found = tx.each("advance_partition", totals, queue_id=queue.queue_id, gap=gap_after_last(), **stamp)
    heads = {row.partition: row for row in found}
    if len(heads) < len(totals["partition"]):
        raise dropped(queue)
    _check_heads(tx, queue, found)
    ranges: dict[int, tuple[int, int]] = {}
    crowded: list[int] = []
    for partition, count, segments in zip(
        totals["partition"], totals["row_count"], totals["segments"], strict=True
    ):
        head = heads[partition]
        ranges[partition] = (head.next_index - count, head.next_index)
        if _is_crowded(head.segments, segments):
            crowded.append(partition)
    if append_id is None:
        append_id = allocate_payloads(tx, 1)[0]
    starts, ends = _numbered(stored, ranges)
    times = [heads[each.partition].last_timestamp for each in stored]
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
    return Appended(ranges, tuple(crowded))


def _totals(stored: Sequence[Stored | Row]) -> dict[str, list[int]]:
    """What each partition gets, in the order of the segments."""
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
    decoder = Decoder(queue, columns)
    pages = _pages(database, queue, partition, start, end, page_bytes, on_lost, with_runs)
    # Object storage takes long to answer: the next page is fetched while this one is decoded.
    for position, rows in pages if queue.payloads is None else ahead(pages):
        yield from _decoded(queue, partition, rows, decoder, position, end)


def _decoded(
    queue: QueueRecord, partition: int, rows: Sequence[Row], decoder: Decoder, position: int, end: int
) -> Iterator[Chunk]:
    """Yield the rows [position, end) of a page."""
    for row in rows:
        if row.start_index > position:
            raise segment_missing(queue, partition, position, row.start_index)
        for chunk in _chunks(queue, partition, row, decoder, position, end, ends_page=row is rows[-1]):
            position = chunk.end
            yield chunk


def _pages(
    database: Database,
    queue: QueueRecord,
    partition: int,
    start: int,
    end: int,
    page_bytes: int,
    on_lost: str,
    with_runs: bool,
) -> Iterator[tuple[int, list[Row]]]:
    """Yield the pages of a range: the first row index that is wanted of it, and its segments."""
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
                f"queue {queue.name!r}, partition {partition}, has no row {position}: the range ends at "
                f"{end}, past the newest row",
                condition="STORE_ERROR.PAST_END",
            )
        yield position, rows
        position = rows[-1].end_index


def segment_missing(queue: QueueRecord, partition: int, start: int, end: int) -> StoreError:
    return StoreError(
        f"queue {queue.name!r}, partition {partition}, lacks rows [{start}, {end}): the store is damaged; "
        "restore a backup",
        condition="SEGMENT_MISSING",
    )


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

    def page(tx: Transaction) -> list[Row]:
        return tx.page(
            queue_id=queue.queue_id,
            partition=partition,
            start_index=start,
            end_index=end,
            max_segments=PAGE_SEGMENTS,
            max_bytes=page_bytes,
            with_runs=int(with_runs),
        )

    def without_rows(tx: Transaction) -> tuple[int, list[Row]]:
        record = tx.one("read_partition", queue_id=queue.queue_id, partition=partition)
        if record is None:
            raise dropped(queue)
        # Rows may have come meanwhile.
        return record.first_index, page(tx)

    rows = database.run(page, write=False, single=True)
    first, rows = (rows[0].first_index, rows) if rows else database.run(without_rows, write=False)
    (loaded,) = with_payloads(database, queue, [(partition, rows)])
    return first, loaded


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


def _chunks(
    queue: QueueRecord, partition: int, row: Row, decoder: Decoder, start: int, end: int, *, ends_page: bool
) -> Iterator[Chunk]:
    """Yield the rows of a segment that are in [start, end)."""
    rows, runs = row.end_index - row.start_index, None
    first, last = max(start, row.start_index), min(end, row.end_index)
    try:
        for batch in decoder.rows(row, first, last):
            if runs is None and row.runs is not None:
                runs = Runs.from_bytes(row.runs, rows)
            own, count = runs, int(batch.num_rows)
            if runs is not None and count < rows:
                own = runs.slice(first - row.start_index, count)
            yield Chunk(first, batch, own, row.first_timestamp, ends_page and first + count == last)
            first += count
    except StoreError as error:
        raise unreadable(queue, partition, row.start_index, row.end_index, error) from error
