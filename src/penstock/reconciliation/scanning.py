"""First pass of a comparison: reading both sides, and finding rows that seem to differ.

If both sides are PostgreSQL databases that sort the keys in the same way, they are compared by key range.
Each database computes a checksum of a range. Only the rows of ranges that differ are read.

Otherwise both sides are read once, and each row is counted in one of 65,536 buckets, by a hash of its key.
This does not depend on the order of keys, which may depend on a language, and needs memory only for the
buckets. The rows of buckets that differ are read a second time.
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
from penstock.reconciliation.rows import BUCKETS, HashedRows, Key, keys_of, unmatched_keys, without_nan
from penstock.reconciliation.source import TEXT_TYPES, SourceTable

log = logging.getLogger("penstock.reconciliation")

_PART_BYTES = 16 << 20
_MAX_ROWS_IN_MEMORY = 500_000
"""The maximum number of rows whose hashes are in memory."""
_SAME_ORDER_TYPES = {
    16: ("boolean",),
    17: ("bytea",),
    20: ("smallint", "integer", "bigint", "numeric"),
    1082: ("date",),
    1114: ("timestamp without time zone",),
    1184: ("timestamp with time zone",),
    1700: ("numeric",),
    2950: ("uuid",),
}
_INTEGER_TYPES = (20, 21, 23, 26)
_TEXT_TYPE_NAMES = ("text", "character varying")
ReportKeys = Callable[[Sequence[Key]], None]


@dataclass
class Scan:
    """Counters of a scan, and the bounds of its ranges."""

    rows: int = 0
    copy_rows: int = 0
    bounds: list[Key] = field(default_factory=list)
    """The last key of each range, except the last range, whose rows have been reported."""


def is_ranged(source: SourceTable, copy: Copy) -> bool:
    """Return whether the copy sorts keys as the source does, and both can compute checksums."""
    if not isinstance(copy, PostgresCopy) or copy.history or not source.is_ordered:
        return False
    return all(_same_order(kind, *copy.column_types[name]) for name, kind in source.key_types.items())


def _same_order(kind: int, copy_type: str, by_bytes: bool) -> bool:
    if kind in TEXT_TYPES:
        return copy_type in _TEXT_TYPE_NAMES and by_bytes
    if kind == 2950 and copy_type in _TEXT_TYPE_NAMES:
        return by_bytes
    return copy_type in _SAME_ORDER_TYPES[20 if kind in _INTEGER_TYPES else kind]


def scan_ranges(source: SourceTable, copy: PostgresCopy, rows: int, scan: Scan, report: ReportKeys) -> None:
    """Compare ranges of about ``rows`` rows by checksum; report the keys of rows that differ."""
    after: Bound | None = None
    with ThreadPoolExecutor(2) as threads:
        while True:
            upto = source.bound(after, None, rows)
            source_checksum, copy_checksum = _checksums(threads, source, copy, after, upto)
            if copy_checksum.rows > 2 * rows:
                # The copy has many more rows in this range.
                upto = copy.bound(after, upto, rows)
                source_checksum, copy_checksum = _checksums(threads, source, copy, after, upto)
            scan.rows, scan.copy_rows = scan.rows + source_checksum.rows, scan.copy_rows + copy_checksum.rows
            if source_checksum != copy_checksum:
                report_range(source, copy, (after, upto), (source_checksum, copy_checksum), report)
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
    source_checksum = threads.submit(source.checksum, after, upto)
    copy_checksum = threads.submit(copy.checksum, after, upto)
    return source_checksum.result(), copy_checksum.result()


def report_range(
    source: SourceTable,
    copy: PostgresCopy,
    bounds: tuple[Bound | None, Bound | None],
    checksums: tuple[Checksum, Checksum],
    report: ReportKeys,
) -> None:
    """Compare the rows of a range in parts that fit into memory; report the keys of rows that differ."""
    after, end = bounds
    source_checksum, copy_checksum = checksums
    parts = 1 + max(source_checksum.bytes, copy_checksum.bytes) // _PART_BYTES
    larger: SourceTable | PostgresCopy = source if source_checksum.rows >= copy_checksum.rows else copy
    step = max(1, max(source_checksum.rows, copy_checksum.rows) // parts)
    while True:
        upto = end if parts == 1 else larger.bound(after, end, step) or end
        key = source.key
        source_rows = HashedRows.of(source.rows(after, upto), key)
        report(unmatched_keys(source_rows, HashedRows.of(copy.rows(after, upto), key)))
        if upto == end:
            return
        after = upto


class _BucketTotals:
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


def scan_buckets(source: SourceTable, copy: Copy, rows: int, scan: Scan, report: ReportKeys) -> None:
    """Compare all rows by bucket; report the keys of rows that differ."""
    with ThreadPoolExecutor(2) as threads:
        source_future = threads.submit(_bucket_totals, _source_pages(source, copy, rows, scan), source.key)
        copy_totals = threads.submit(_bucket_totals, copy.pages(rows), source.key).result()
        source_totals = source_future.result()
        scan.rows, scan.copy_rows = int(source_totals.rows.sum()), int(copy_totals.rows.sum())
        differing = np.flatnonzero(
            (source_totals.rows != copy_totals.rows) | (source_totals.sums != copy_totals.sums)
        )
        for group in _bucket_groups(differing, np.maximum(source_totals.rows, copy_totals.rows)):
            mask = np.zeros(BUCKETS, bool)
            mask[group] = True
            source_rows = threads.submit(
                _rows_in_buckets, source, _source_pages(source, copy, rows, None), mask
            )
            rows_of_copy = threads.submit(_rows_in_buckets, source, copy.pages(rows), mask).result()
            report(unmatched_keys(source_rows.result(), rows_of_copy))


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


def _bucket_totals(pages: Iterable[pa.Table], key: Sequence[str]) -> _BucketTotals:
    buckets = _BucketTotals()
    for page in pages:
        buckets.add(HashedRows.of(page, key))
    return buckets


def _bucket_groups(differing: NDArray[np.int64], rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Divide differing buckets into groups whose rows fit into memory."""
    if len(differing):
        group_numbers = np.cumsum(rows[differing]) // _MAX_ROWS_IN_MEMORY
        yield from np.split(differing, np.flatnonzero(np.diff(group_numbers)) + 1)


def _rows_in_buckets(source: SourceTable, pages: Iterable[pa.Table], mask: NDArray[np.bool_]) -> HashedRows:
    """Return the rows in the selected buckets."""
    parts = [HashedRows.of(source.schema.empty_table(), source.key)]
    for page in pages:
        hashed = HashedRows.of(page, source.key)
        parts.append(hashed.filtered(mask[hashed.buckets]))
    return HashedRows.joined(parts)
