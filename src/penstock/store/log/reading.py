"""Read ranges of partitions from the log, page by page."""

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
from penstock.store.records.catalog import QueueRecord, dropped, reload_queue

PAGE_SEGMENTS = 1024
PAGE_BYTES = 8 << 20
_RANGES_PER_PAGE = 64


class Range(NamedTuple):
    """Rows [start, end) of a partition."""

    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """Rows [start, end) of a partition, as one batch of a read."""

    partition: int
    start: int
    batch: pa.RecordBatch
    runs: Runs | None
    first_timestamp: int
    """The timestamp of the segment's first row in microseconds since 1970. Unless the segment is compacted,
    all its rows have this timestamp.
    """
    ends_page: bool = False
    """Whether this is the last chunk of its range in a page."""

    @property
    def end(self) -> int:
        return self.start + int(self.batch.num_rows)

    def timestamp_of(self, row_index: int) -> int:
        """Return the timestamp of a row. The read must have been started with ``with_runs``."""
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
    """Read ranges one after another, and yield their rows in chunks. Each page is read in its own
    transaction.

    ``columns`` are the columns to decode (`Decoder`). Rows have nulls in columns that were added after them.
    A page has rows of up to 64 ranges, and at most about ``page_bytes`` compressed bytes, or a single
    segment. ``on_lost`` says what to do if rows were trimmed: ``fail``, or ``skip`` to continue after them.
    ``with_runs`` makes the timestamp of each row available, which takes a little longer for compacted
    segments.
    """
    decoder = Decoder(queue, columns, lambda: database.run(lambda tx: reload_queue(tx, queue), write=False))
    pages = _Pages(database, queue, page_bytes, on_lost, with_runs).of(ranges)
    # Object storage answers slowly, so fetch the next page while decoding this one.
    for page in pages if queue.payloads is None else ahead(pages):
        for requested, rows in page:
            yield from _decode_page(queue, requested, rows, decoder)


def _decode_page(
    queue: QueueRecord, requested: Range, rows: Sequence[Row], decoder: Decoder
) -> Iterator[Chunk]:
    """Yield those rows of a range that a page contains."""
    position = requested.start
    for row in rows:
        if row.start_index > position:
            raise segment_missing(queue, requested.partition, position, row.start_index)
        for chunk in _segment_chunks(
            queue, requested._replace(start=position), row, decoder, ends_page=row is rows[-1]
        ):
            position = chunk.end
            yield chunk


def _segment_chunks(
    queue: QueueRecord, requested: Range, row: Row, decoder: Decoder, *, ends_page: bool
) -> Iterator[Chunk]:
    """Yield those rows of a segment that are in a range."""
    rows, runs = row.end_index - row.start_index, None
    first, last = max(requested.start, row.start_index), min(requested.end, row.end_index)
    try:
        for batch in decoder.decode_rows(row, first, last):
            if runs is None and row.runs is not None:
                runs = Runs.from_bytes(row.runs, rows)
            chunk_runs, count = runs, int(batch.num_rows)
            if runs is not None and count < rows:
                chunk_runs = runs.slice(first - row.start_index, count)
            is_last = ends_page and first + count == last
            yield Chunk(requested.partition, first, batch, chunk_runs, row.first_timestamp, is_last)
            first += count
    except StoreError as error:
        raise unreadable(queue, requested.partition, row.start_index, row.end_index, error) from error


class _Pages:
    """Reads the segments of ranges, one page in each transaction."""

    def __init__(
        self, database: Database, queue: QueueRecord, page_bytes: int, on_lost: str, with_runs: bool
    ) -> None:
        self._database, self._queue = database, queue
        self._page_bytes, self._on_lost, self._with_runs = page_bytes, on_lost, with_runs

    def of(self, ranges: Sequence[Range]) -> Iterator[list[tuple[Range, list[Row]]]]:
        """Yield pages: for each range of a page, the part that has not been read yet and its next
        segments.
        """
        remaining = [candidate for candidate in ranges if candidate.start < candidate.end]
        position = 0
        while position < len(remaining):
            page = []
            for first_index, rows in self._next_segments(remaining[position : position + _RANGES_PER_PAGE]):
                requested = remaining[position]
                if first_index > requested.start:
                    if self._on_lost == "fail":
                        raise trimmed_error(
                            self._queue.name,
                            requested.partition,
                            requested.start,
                            min(first_index, requested.end),
                        )
                    remaining[position] = requested._replace(start=first_index)
                    position += first_index >= requested.end
                    break
                if not rows:
                    raise _past_end_error(self._queue, requested)
                page.append((requested, rows))
                remaining[position] = requested._replace(start=rows[-1].end_index)
                position += rows[-1].end_index >= requested.end
            if page:
                pages = [(requested.partition, rows) for requested, rows in page]
                loaded = with_payloads(self._database, self._queue, pages)
                yield [(requested, rows) for (requested, _), rows in zip(page, loaded, strict=True)]

    def _next_segments(self, ranges: Sequence[Range]) -> list[tuple[int, list[Row]]]:
        """Return, for one or more of the first ranges, the partition's first row index and the range's next
        segments. Only the last range returned may have more segments than these.
        """
        if len(ranges) == 1:
            # The usual case takes a single round trip.
            rows = self._database.run(
                lambda tx: self._segments(tx, ranges[0], self._page_bytes), write=False, single=True
            )
            if rows:
                return [(rows[0].first_index, rows)]
        return self._database.run(lambda tx: self._read_ranges(tx, ranges), write=False)

    def _read_ranges(self, tx: Transaction, ranges: Sequence[Range]) -> list[tuple[int, list[Row]]]:
        results, bytes_left = [], self._page_bytes
        for requested in ranges:
            first_index, rows = self._read_range(tx, requested, bytes_left)
            results.append((first_index, rows))
            bytes_left -= sum(map(stored_bytes, rows))
            if bytes_left <= 0 or not rows or rows[-1].end_index < requested.end:
                break
        return results

    def _read_range(self, tx: Transaction, requested: Range, max_bytes: int) -> tuple[int, list[Row]]:
        rows = self._segments(tx, requested, max_bytes)
        if rows:
            return rows[0].first_index, rows
        record = tx.one("read_partition", queue_id=self._queue.queue_id, partition=requested.partition)
        if record is None:
            raise dropped(self._queue)
        # Rows may have been appended in the meantime.
        return record.first_index, self._segments(tx, requested, max_bytes)

    def _segments(self, tx: Transaction, requested: Range, max_bytes: int) -> list[Row]:
        return tx.page(
            queue_id=self._queue.queue_id,
            partition=requested.partition,
            start_index=requested.start,
            end_index=requested.end,
            max_segments=PAGE_SEGMENTS,
            max_bytes=max_bytes,
            with_runs=int(self._with_runs),
        )


def segments_from(tx: Transaction, queue: QueueRecord, partition: int, start: int) -> Iterator[Row]:
    """Yield the segments of a partition that end after a row index, without their rows. The store is read in
    pages.
    """
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


def _past_end_error(queue: QueueRecord, requested: Range) -> StoreError:
    return StoreError(
        f"queue {queue.name!r}, partition {requested.partition}, has no row {requested.start}: the range "
        f"ends at {requested.end}, past the newest row",
        condition="STORE_ERROR.PAST_END",
    )


def trimmed_error(queue: str, partition: int, start: int, end: int) -> DataLostError:
    return DataLostError(
        f"rows [{start}, {end}) of queue {queue!r}, partition {partition}, have been trimmed; seek the "
        "consumer to 'earliest', or set failOnDataLoss=false to continue without them",
        condition="DATA_LOST.TRIMMED",
        queue=queue,
        partition=partition,
        start=start,
        end=end,
    )
