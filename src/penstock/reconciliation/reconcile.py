"""``penstock.reconcile``: a PostgreSQL table and its copy are compared, and the copy is repaired."""

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
from penstock.reconciliation.settling import Candidates, Sighting
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
    """Compare a PostgreSQL table with its copy, while both are written, and report the differences.

    A comparison blocks no writers. The source is read range by range, in short snapshots. A row that differs
    is read again until it is equal, or until neither side has changed for ``settle`` seconds, so changes that
    the copy has not applied yet do not count as differences.

    Parameters
    ----------
    source
        The feed of one table, or its URL. Its slot is never advanced.
    copy
        The table with the copy: a SQL table in a store, or a Delta table, with the columns of the source.
        Of a table with history, the current versions are compared.
    columns
        The columns to compare, in addition to the key; None for all. Not with a repair.
    range_rows
        How many rows a range has.
    settle
        For how many seconds a difference has to persist before it counts: longer than the copy lags.
    timeout
        After how many seconds a row that keeps changing is reported as undecided.
    most_rows
        How many of the rows that differ are reported one by one.
    checkpoint
        The checkpoint of the query that fills the copy from the source's slot, or from a queue that a pump
        fills from it. A row then counts as different only if it still differs after the query has
        written everything that had been committed when the source was read, however long that takes;
        ``settle`` is ignored.
    queue_store
        The URL of the store of that queue.
    repair
        Whether to write the rows of the source to the copy where they differ, and to delete rows that only
        the copy has. Queries may write to the copy at the same time.

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
            f"no store is named for the copy {copy.name!r}: TableSink({copy.name!r}, url=…)",
            condition="INVALID_OPTION.MISSING",
            option="url",
        )
    if repair and columns is not None:
        raise InvalidOptionError(
            "a repair writes whole rows: leave out the columns, or the repair",
            condition="INVALID_OPTION.CONFLICT",
            option="columns",
        )
    with closing(SourceTable(feed, None if columns is None else column_names("columns", columns))) as table:
        opened = open_copy(copy, copy.url, table)
        with closing(opened):
            if repair and opened.history:
                raise _history(opened.shown)
            with ExitStack() as stack:
                progress = None
                if checkpoint is not None:
                    progress = QueryProgress(checkpoint, feed, table.tables, queue_store)
                    stack.callback(progress.close)
                candidates = partial(Candidates, settle=settle, timeout=timeout, progress=progress)
                return _Comparison(table, opened, candidates, most_rows).run(range_rows, repair=repair)


def _check_numbers(range_rows: int, settle: float, timeout: float, most_rows: int) -> None:
    for name, number, kind, least in (
        ("range_rows", range_rows, int, 1),
        ("settle", settle, int | float, 0),
        ("timeout", timeout, int | float, 0),
        ("most_rows", most_rows, int, 0),
    ):
        wanted = f"a number, {least} or more"
        require(name, number, kind, wanted)
        if not number >= least:
            raise refusal(name, number, wanted)


def _history(shown: str) -> TableRefusedError:
    return TableRefusedError(
        f"the copy {shown} keeps the history of its rows, which cannot be read from the source: leave the "
        "repair out, or fill a new table from the beginning",
        condition="TABLE_REFUSED.HISTORY_NOT_REPAIRABLE",
        table=shown,
    )


class _Comparison:
    """A comparison that runs once."""

    def __init__(
        self, source: SourceTable, copy: Copy, candidates: partial[Candidates], most_rows: int
    ) -> None:
        self._source, self._copy = source, copy
        self._scan = Scan()
        self._findings = Findings(source, copy, self._scan, most_rows)
        self._undecided = self._repaired = 0
        self._is_repairing = False
        self._candidates = candidates(source, copy, found=self._found, given_up=self._given_up)

    def run(self, range_rows: int, *, repair: bool) -> Reconciliation:
        self._is_repairing = repair
        self._read(range_rows)
        if len(self._candidates):
            log.info(
                "%d rows of %s differ or are not there yet: they are read again",
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

    def _found(self, found: dict[Key, Sighting]) -> None:
        self._findings.add(found)
        if self._is_repairing:
            repaired = self._copy.repair(list(found), self._rows_now)
            self._repaired += repaired
            log.info(
                "%d rows of %s are repaired",
                repaired,
                self._copy.shown,
                extra={"action": "rows_repaired", "table": self._copy.shown, "rows": repaired},
            )

    def _given_up(self, keys: Sequence[Key]) -> None:
        self._undecided += len(keys)

    def _rows_now(self, keys: Sequence[Key]) -> pa.Table:
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
