"""Reading the log: ranges of partitions, page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from penstock.errors import DataLostError, StoreError
from penstock.parallel import ahead
from penstock.store.database import Database, Row, Transaction, stored_bytes
from penstock.store.log.decode import Decoder, unreadable
from penstock.store.log.payloads import with_payloads
from penstock.store.log.segmenting import Runs
from penstock.store.records.catalog import QueueRecord, dropped, reread

PAGE_SEGMENTS = 1024
PAGE_BYTES = 8 << 20
_PAGE_RANGES = 64


class Range(NamedTuple):
    """Rows [start, end) of a partition."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Rows [start, end) of a partition as they are read."""

    partition: int
    start: int
    batch: pa.RecordBatch
    runs: Runs | None
    first_timestamp: int
    """The time of the segment's first row, and of all its rows unless it is compacted; microseconds since
    1970.
    """
    ends_page: bool = False
    """Whether it is the last chunk of its range in a page."""

    @property
    def end(self) -> int:
        return self.start + int(self.batch.num_rows)

    def timestamp_of(self, row_index: int) -> int:
        """Return the time of a row; the read must have asked for runs."""
        return self.first_timestamp if self.runs is None else self.runs.timestamp_at(row_index - self.start)


def read(
    database: Database,
    queue: QueueRecord,
    ranges: Sequence[Range],
    *,
    columns: Sequence[str] | pa.Schema | None = None,
    page_bytes: int = PAGE_BYTES,
    on_lost: str = "fail",
    with_runs: bool = False,
) -> Iterator[Chunk]:
    """Read ranges one after the other, chunk by chunk; each page is a separate transaction.

    ``columns`` are the columns to decode (`Decoder`); rows from before a column was added have nulls in it. A
    page has rows of up to 64 ranges, and at most about ``page_bytes`` compressed bytes, or one segment.
    ``on_lost`` is ``fail``, or ``skip`` to resume after rows that were trimmed. ``with_runs`` makes each
    row's time available, which costs a little for compacted segments.
    """
    decoder = Decoder(queue, columns, lambda: database.run(lambda tx: reread(tx, queue), write=False))
    pages = _Pages(database, queue, page_bytes, on_lost, with_runs).of(ranges)
    # Object storage is slow to answer, so the next page is fetched while this one is decoded.
    for page in pages if queue.payloads is None else ahead(pages):
        for asked, rows in page:
            yield from _decoded(queue, asked, rows, decoder)


def _decoded(queue: QueueRecord, asked: Range, rows: Sequence[Row], decoder: Decoder) -> Iterator[Chunk]:
    """Yield the rows of a range that a page has."""
    position = asked.start
    for row in rows:
        if row.start_index > position:
            raise segment_missing(queue, asked.partition, position, row.start_index)
        for chunk in _chunks(queue, asked._replace(start=position), row, decoder, ends_page=row is rows[-1]):
            position = chunk.end
            yield chunk


def _chunks(
    queue: QueueRecord, asked: Range, row: Row, decoder: Decoder, *, ends_page: bool
) -> Iterator[Chunk]:
    """Yield the rows of a segment that are in a range."""
    rows, runs = row.end_index - row.start_index, None
    first, last = max(asked.start, row.start_index), min(asked.end, row.end_index)
    try:
        for batch in decoder.rows(row, first, last):
            if runs is None and row.runs is not None:
                runs = Runs.from_bytes(row.runs, rows)
            own, count = runs, int(batch.num_rows)
            if runs is not None and count < rows:
                own = runs.slice(first - row.start_index, count)
            is_last = ends_page and first + count == last
            yield Chunk(asked.partition, first, batch, own, row.first_timestamp, is_last)
            first += count
    except StoreError as error:
        raise unreadable(queue, asked.partition, row.start_index, row.end_index, error) from error


class _Pages:
    """Reads the segments of ranges, one page per transaction."""

    def __init__(
        self, database: Database, queue: QueueRecord, page_bytes: int, on_lost: str, with_runs: bool
    ) -> None:
        self._database, self._queue = database, queue
        self._page_bytes, self._on_lost, self._with_runs = page_bytes, on_lost, with_runs

    def of(self, ranges: Sequence[Range]) -> Iterator[list[tuple[Range, list[Row]]]]:
        """Yield pages: for each range of a page, the part not read yet and its next segments."""
        left = [each for each in ranges if each.start < each.end]
        at = 0
        while at < len(left):
            page = []
            for first_index, rows in self._next(left[at : at + _PAGE_RANGES]):
                asked = left[at]
                if first_index > asked.start:
                    if self._on_lost == "fail":
                        raise lost(
                            self._queue.name, asked.partition, asked.start, min(first_index, asked.end)
                        )
                    left[at] = asked._replace(start=first_index)
                    at += first_index >= asked.end
                    break
                if not rows:
                    raise _past_end(self._queue, asked)
                page.append((asked, rows))
                left[at] = asked._replace(start=rows[-1].end_index)
                at += rows[-1].end_index >= asked.end
            if page:
                pages = [(asked.partition, rows) for asked, rows in page]
                loaded = with_payloads(self._database, self._queue, pages)
                yield [(asked, rows) for (asked, _), rows in zip(page, loaded, strict=True)]

    def _next(self, ranges: Sequence[Range]) -> list[tuple[int, list[Row]]]:
        """Return, for one or more of the first ranges, the partition's first row index and the range's next
        segments: all of them, except possibly for the last range that is returned.
        """
        if len(ranges) == 1:
            # The usual case, in one round trip.
            rows = self._database.run(
                lambda tx: self._segments(tx, ranges[0], self._page_bytes), write=False, single=True
            )
            if rows:
                return [(rows[0].first_index, rows)]
        return self._database.run(lambda tx: self._together(tx, ranges), write=False)

    def _together(self, tx: Transaction, ranges: Sequence[Range]) -> list[tuple[int, list[Row]]]:
        found, left = [], self._page_bytes
        for asked in ranges:
            first_index, rows = self._first(tx, asked, left)
            found.append((first_index, rows))
            left -= sum(map(stored_bytes, rows))
            if left <= 0 or not rows or rows[-1].end_index < asked.end:
                break
        return found

    def _first(self, tx: Transaction, asked: Range, max_bytes: int) -> tuple[int, list[Row]]:
        rows = self._segments(tx, asked, max_bytes)
        if rows:
            return rows[0].first_index, rows
        record = tx.one("read_partition", queue_id=self._queue.queue_id, partition=asked.partition)
        if record is None:
            raise dropped(self._queue)
        # Rows may have been appended meanwhile.
        return record.first_index, self._segments(tx, asked, max_bytes)

    def _segments(self, tx: Transaction, asked: Range, max_bytes: int) -> list[Row]:
        return tx.page(
            queue_id=self._queue.queue_id,
            partition=asked.partition,
            start_index=asked.start,
            end_index=asked.end,
            max_segments=PAGE_SEGMENTS,
            max_bytes=max_bytes,
            with_runs=int(self._with_runs),
        )


def segments_from(tx: Transaction, queue: QueueRecord, partition: int, start: int) -> Iterator[Row]:
    """Yield the segments of a partition that end after a row index, without their rows; reads pages."""
    while page := tx.all(
        "read_segments",
        queue_id=queue.queue_id,
        partition=partition,
        start_index=start,
        max_segments=PAGE_SEGMENTS,
    ):
        yield from page
        start = page[-1].end_index


def segment_missing(queue: QueueRecord, partition: int, start: int, end: int) -> StoreError:
    return StoreError(
        f"queue {queue.name!r}, partition {partition}, lacks rows [{start}, {end}): the store is damaged; "
        "restore a backup",
        condition="SEGMENT_MISSING",
    )


def _past_end(queue: QueueRecord, asked: Range) -> StoreError:
    return StoreError(
        f"queue {queue.name!r}, partition {asked.partition}, has no row {asked.start}: the range ends at "
        f"{asked.end}, past the newest row",
        condition="STORE_ERROR.PAST_END",
    )


def lost(queue: str, partition: int, start: int, end: int) -> DataLostError:
    return DataLostError(
        f"rows [{start}, {end}) of queue {queue!r}, partition {partition}, have been trimmed; seek the "
        "consumer to 'earliest', or set failOnDataLoss=false to continue without them",
        condition="DATA_LOST.TRIMMED",
        queue=queue,
        partition=partition,
        start=start,
        end=end,
    )
