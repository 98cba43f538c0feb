"""The first pass of a comparison: reading both sides in parts, and finding the rows that seem to differ.

Between two PostgreSQL databases that order the keys in one way, the parts are ranges of the key, and each
database computes its own checksum of a range. Only the rows of ranges that differ are read.

Otherwise both sides are read once, and each row is counted in one of 65,536 buckets, by a hash of its key:
that needs no order, which a language may decide, and memory for the buckets alone. The rows of the buckets
that differ are read a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.reconciliation.copies import Copy
from penstock.reconciliation.postgres_copy import PostgresCopy
from penstock.reconciliation.postgres_sql import Bound, Checksum
from penstock.reconciliation.rows import BUCKETS, HashedRows, Key, keys_of, unmatched, without_nan
from penstock.reconciliation.source import TEXTS, SourceTable

log = logging.getLogger("penstock.reconciliation")

_PART_BYTES = 16 << 20
_MOST_KEPT = 500_000
"""The most rows whose hashes are kept at a time."""
_ORDERED_IN_COPY = {
    16: ("boolean",),
    17: ("bytea",),
    20: ("smallint", "integer", "bigint", "numeric"),
    1082: ("date",),
    1114: ("timestamp without time zone",),
    1184: ("timestamp with time zone",),
    1700: ("numeric",),
    2950: ("uuid",),
}
_INTEGERS = (20, 21, 23, 26)
_TEXT_IN_COPY = ("text", "character varying")
Report = Callable[[Sequence[Key]], None]


@dataclass
class Scan:
    """What was read."""

    rows: int = 0
    copy_rows: int = 0
    bounds: list[Key] = field(default_factory=list)
    """The last key of each range but the last one, as far as rows were reported."""


def is_ranged(source: SourceTable, copy: Copy) -> bool:
    """Whether the copy orders keys as the source does, and both can compute checksums."""
    if not isinstance(copy, PostgresCopy) or copy.history or not source.is_ordered:
        return False
    return all(_same_order(kind, *copy.column_facts[name]) for name, kind in source.key_types.items())


def _same_order(kind: int, in_copy: str, by_bytes: bool) -> bool:
    if kind in TEXTS:
        return in_copy in _TEXT_IN_COPY and by_bytes
    if kind == 2950 and in_copy in _TEXT_IN_COPY:
        return by_bytes
    return in_copy in _ORDERED_IN_COPY[20 if kind in _INTEGERS else kind]


def scan_ranges(source: SourceTable, copy: PostgresCopy, rows: int, scan: Scan, report: Report) -> None:
    """Compare ranges of about ``rows`` rows by checksum; report the rows of those that differ."""
    after: Bound | None = None
    with ThreadPoolExecutor(2) as threads:
        while True:
            upto = source.bound(after, None, rows)
            mine, other = _checksums(threads, source, copy, after, upto)
            if other.rows > 2 * rows:
                # The copy has many more rows in this range.
                upto = copy.bound(after, upto, rows)
                mine, other = _checksums(threads, source, copy, after, upto)
            scan.rows, scan.copy_rows = scan.rows + mine.rows, scan.copy_rows + other.rows
            if mine != other:
                report_range(source, copy, (after, upto), (mine, other), report)
            log.info(
                "%d rows of %s are compared",
                scan.rows,
                source.table.name,
                extra={"action": "range_compared", "table": source.table.name, "rows": scan.rows},
            )
            if upto is None:
                return
            scan.bounds.append(source.key_at(upto))
            after = upto


def _checksums(
    threads: ThreadPoolExecutor,
    source: SourceTable,
    copy: PostgresCopy,
    after: Bound | None,
    upto: Bound | None,
) -> tuple[Checksum, Checksum]:
    mine = threads.submit(source.checksum, after, upto)
    other = threads.submit(copy.checksum, after, upto)
    return mine.result(), other.result()


def report_range(
    source: SourceTable,
    copy: PostgresCopy,
    bounds: tuple[Bound | None, Bound | None],
    checksums: tuple[Checksum, Checksum],
    report: Report,
) -> None:
    """Compare the rows of a range, in parts that fit into memory."""
    after, end = bounds
    mine, other = checksums
    parts = 1 + max(mine.bytes, other.bytes) // _PART_BYTES
    larger: SourceTable | PostgresCopy = source if mine.rows >= other.rows else copy
    step = max(1, max(mine.rows, other.rows) // parts)
    while True:
        upto = end if parts == 1 else larger.bound(after, end, step) or end
        key = source.key
        own = HashedRows.of(source.rows(after, upto), key)
        report(unmatched(own, HashedRows.of(copy.rows(after, upto), key)))
        if upto == end:
            return
        after = upto


class _Buckets:
    """The number of rows in each bucket, and the sum of their hashes."""

    def __init__(self) -> None:
        self.rows: NDArray[np.int64] = np.zeros(BUCKETS, np.int64)
        self.sums: NDArray[np.uint64] = np.zeros(BUCKETS, np.uint64)

    def add(self, hashed: HashedRows) -> None:
        if not len(hashed.hashes):
            return
        order = np.argsort(hashed.buckets, kind="stable")
        buckets = hashed.buckets[order]
        starts = np.flatnonzero(np.diff(buckets, prepend=np.uint32(BUCKETS)))
        used = buckets[starts]
        self.rows[used] += np.diff(np.append(starts, len(buckets)))
        self.sums[used] += np.add.reduceat(hashed.hashes[order], starts)


def scan_buckets(source: SourceTable, copy: Copy, rows: int, scan: Scan, report: Report) -> None:
    """Compare all rows by buckets; report the rows of those that differ."""
    with ThreadPoolExecutor(2) as threads:
        summed = threads.submit(_summed, _source_pages(source, copy, rows, scan), source.key)
        other = threads.submit(_summed, copy.pages(rows), source.key).result()
        mine = summed.result()
        scan.rows, scan.copy_rows = int(mine.rows.sum()), int(other.rows.sum())
        differing = np.flatnonzero((mine.rows != other.rows) | (mine.sums != other.sums))
        for part in _groups(differing, np.maximum(mine.rows, other.rows)):
            mask = np.zeros(BUCKETS, bool)
            mask[part] = True
            kept = threads.submit(_kept, source, _source_pages(source, copy, rows, None), mask)
            of_copy = threads.submit(_kept, source, copy.pages(rows), mask).result()
            report(unmatched(kept.result(), of_copy))


def _source_pages(source: SourceTable, copy: Copy, rows: int, scan: Scan | None) -> Iterator[pa.Table]:
    for page in source.pages(rows):
        if scan is not None:
            ends = range(rows - 1 - scan.rows % rows, page.num_rows, rows)
            scan.bounds += keys_of(page.select(list(source.key)).take(list(ends))) if ends else []
            scan.rows += page.num_rows
            log.info(
                "%d rows of %s are read",
                scan.rows,
                source.table.name,
                extra={"action": "page_read", "table": source.table.name, "rows": scan.rows},
            )
        yield without_nan(page) if copy.nan_as_null else page


def _summed(pages: Iterable[pa.Table], key: Sequence[str]) -> _Buckets:
    buckets = _Buckets()
    for page in pages:
        buckets.add(HashedRows.of(page, key))
    return buckets


def _groups(differing: NDArray[np.int64], rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Divide buckets into groups with few enough rows."""
    if len(differing):
        places = np.cumsum(rows[differing]) // _MOST_KEPT
        yield from np.split(differing, np.flatnonzero(np.diff(places)) + 1)


def _kept(source: SourceTable, pages: Iterable[pa.Table], mask: NDArray[np.bool_]) -> HashedRows:
    """Return the rows in some buckets."""
    parts = [HashedRows.of(source.schema.empty_table(), source.key)]
    for page in pages:
        hashed = HashedRows.of(page, source.key)
        parts.append(hashed.filtered(mask[hashed.buckets]))
    return HashedRows.joined(parts)
