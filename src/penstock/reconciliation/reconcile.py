"""``penstock.reconcile``: compares a PostgreSQL table with its copy, and repairs the copy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial

import pyarrow as pa

from penstock.arguments import column_names, refusal, require
from penstock.errors import InvalidOptionError, TableRefusedError
from penstock.feeds.postgres import PostgresFeed
from penstock.reconciliation.copies import Copy
from penstock.reconciliation.findings import Findings
from penstock.reconciliation.opening import open_copy
from penstock.reconciliation.postgres_copy import PostgresCopy
from penstock.reconciliation.progress import QueryProgress
from penstock.reconciliation.report import (
    DIFFERENT,
    EXTRA,
    MISSING,
    Reconciliation,
)
from penstock.reconciliation.rows import Key, without_nan
from penstock.reconciliation.scanning import Scan, is_ranged, scan_buckets, scan_ranges
from penstock.reconciliation.settling import Candidates, Observation
from penstock.reconciliation.source import SourceTable
from penstock.tables.sink import TableSink

log = logging.getLogger("penstock.reconciliation")

RANGE_ROWS, SETTLE, TIMEOUT, MOST_ROWS = 50_000, 60.0, 600.0, 20


def reconcile(
    source: PostgresFeed | str,
    copy: TableSink,
    *,
    columns: Sequence[str] | None = None,
    range_rows: int = RANGE_ROWS,
    settle: float = SETTLE,
    timeout: float = TIMEOUT,
    most_rows: int = MOST_ROWS,
    checkpoint: str | None = None,
    queue_store: str | None = None,
    repair: bool = False,
) -> Reconciliation:
    """Compare a PostgreSQL table with its copy while both are written, and report the differences.

    A comparison does not block writers. The source is read range by range, in short snapshots. A row that
    differs is read again until it is equal, or until neither side has changed for ``settle`` seconds. So
    changes that the copy has not applied yet do not count as differences.

    Parameters
    ----------
    source
        The feed of one table, or its URL. Its slot is never advanced.
    copy
        The table with the copy: a SQL table in a store, or a Delta table, with the columns of the source.
        If the table has history, the current versions are compared.
    columns
        The columns to compare, in addition to the key; None for all. Cannot be combined with a repair.
    range_rows
        The number of rows of a range.
    settle
        How many seconds a difference must persist before it counts. Use more than the copy's lag.
    timeout
        After how many seconds a row that keeps changing is reported as undecided.
    most_rows
        The maximum number of differing rows that are listed in the result.
    checkpoint
        The checkpoint of the query that fills the copy from the source's slot, or from a queue that a pump
        fills from it. A row then counts as different only if it still differs after the query has written
        everything that was committed before the source was read, however long that takes; ``settle`` is
        ignored.
    queue_store
        The URL of the store of this queue.
    repair
        Whether to write the source's rows to the copy where they differ, and delete rows that only the copy
        has. Queries may write to the copy at the same time.

    Raises
    ------
    FeedUnavailableError
        When the source cannot be read.
    TableRefusedError
        When the source has no key, or the copy does not exist or cannot be compared or repaired.
    SchemaMismatchError
        When the copy lacks columns.
    StoreError
    """
    require("source", source, PostgresFeed | str, "a PostgresFeed, or its URL")
    require("copy", copy, TableSink, "a TableSink")
    _check_numbers(range_rows, settle, timeout, most_rows)
    feed = PostgresFeed(source) if isinstance(source, str) else source
    if copy.url is None:
        raise InvalidOptionError(
            f"the copy {copy.name!r} has no store: pass its URL, TableSink({copy.name!r}, url=…)",
            condition="INVALID_OPTION.MISSING",
            option="url",
        )
    if repair and columns is not None:
        raise InvalidOptionError(
            "a repair writes whole rows: do not pass columns, or compare without repair",
            condition="INVALID_OPTION.CONFLICT",
            option="columns",
        )
    with closing(
        SourceTable(feed, None if columns is None else column_names("columns", columns))
    ) as source_table:
        opened_copy = open_copy(copy, copy.url, source_table)
        with closing(opened_copy):
            if repair and opened_copy.history:
                raise _history_refused(opened_copy.label)
            with ExitStack() as stack:
                progress = None
                if checkpoint is not None:
                    progress = QueryProgress(checkpoint, feed, source_table.tables, queue_store)
                    stack.callback(progress.close)
                candidates = partial(Candidates, settle=settle, timeout=timeout, progress=progress)
                return _Comparison(source_table, opened_copy, candidates, most_rows).run(
                    range_rows, repair=repair
                )


def _check_numbers(range_rows: int, settle: float, timeout: float, most_rows: int) -> None:
    for name, number, kind, minimum in (
        ("range_rows", range_rows, int, 1),
        ("settle", settle, int | float, 0),
        ("timeout", timeout, int | float, 0),
        ("most_rows", most_rows, int, 0),
    ):
        expected = f"a number, {minimum} or more"
        require(name, number, kind, expected)
        if not number >= minimum:
            raise refusal(name, number, expected)


def _history_refused(label: str) -> TableRefusedError:
    return TableRefusedError(
        f"the copy {label} has the history of its rows, which cannot be read from the source: compare "
        "without repair, or fill a new table from the beginning",
        condition="TABLE_REFUSED.HISTORY_NOT_REPAIRABLE",
        table=label,
    )


class _Comparison:
    """One run of a comparison."""

    def __init__(
        self, source: SourceTable, copy: Copy, candidates: partial[Candidates], most_rows: int
    ) -> None:
        self._source, self._copy = source, copy
        self._scan = Scan()
        self._findings = Findings(source, copy, self._scan, most_rows)
        self._undecided = self._repaired = 0
        self._is_repairing = False
        self._candidates = candidates(
            source, copy, on_differing=self._add_differences, on_undecided=self._add_undecided
        )

    def run(self, range_rows: int, *, repair: bool) -> Reconciliation:
        self._is_repairing = repair
        self._read(range_rows)
        if len(self._candidates):
            log.info(
                "%d rows of %s differ or are missing, and are read again",
                len(self._candidates),
                self._source.table.name,
                extra={
                    "action": "rows_read_again",
                    "table": self._source.table.name,
                    "rows": len(self._candidates),
                },
            )
        self._candidates.settle()
        return self._report()

    def _read(self, rows: int) -> None:
        if isinstance(self._copy, PostgresCopy) and is_ranged(self._source, self._copy):
            scan_ranges(self._source, self._copy, rows, self._scan, self._candidates.add)
        else:
            scan_buckets(self._source, self._copy, rows, self._scan, self._candidates.add)

    def _add_differences(self, differing: dict[Key, Observation]) -> None:
        self._findings.add(differing)
        if self._is_repairing:
            repaired = self._copy.repair(list(differing), self._current_rows)
            self._repaired += repaired
            log.info(
                "%d rows of %s were repaired",
                repaired,
                self._copy.label,
                extra={"action": "rows_repaired", "table": self._copy.label, "rows": repaired},
            )

    def _add_undecided(self, keys: Sequence[Key]) -> None:
        self._undecided += len(keys)

    def _current_rows(self, keys: Sequence[Key]) -> pa.Table:
        parts = [self._source.schema.empty_table(), *(part.rows for part in self._source.find(keys))]
        rows = pa.concat_tables(parts)
        return without_nan(rows) if self._copy.nan_as_null else rows

    def _report(self) -> Reconciliation:
        scan, kinds = self._scan, self._findings.kinds
        return Reconciliation(
            equal=not kinds.total() and not self._undecided,
            rows=scan.rows,
            copy_rows=scan.copy_rows,
            ranges=len(scan.bounds) + 1,
            first_position=self._source.first_position or 0,
            position=self._source.last_position,
            missing=kinds[MISSING],
            extra=kinds[EXTRA],
            different=kinds[DIFFERENT],
            undecided=self._undecided,
            evidence=self._candidates.evidence,
            differing_ranges=self._findings.ranges(),
            differing_rows=tuple(self._findings.rows),
            repaired=self._repaired,
        )
