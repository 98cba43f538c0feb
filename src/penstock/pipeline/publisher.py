"""Publisher of the progress of this process's queries to a store.

A thread writes the newest progress of each query, at most once a second, so callers do not wait. If the store
does not answer, the publisher logs that once, and tries again later.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.errors import InvalidInputError, NotFoundError, PenstockError, condition_of
from penstock.json_text import Json
from penstock.pipeline.progress_format import descriptions_of, late_rows_of, progress_of, rows_of
from penstock.redaction import redacted_message, secrets_of
from penstock.store.database import Database, Transaction
from penstock.store.forks import Forkable, register
from penstock.store.records import queries
from penstock.store.records.queries import HEARTBEAT_SECONDS, QueryError, QueryProgress, QueryRun
from penstock.store.store_schema import open_database
from penstock.store.url import parse_url, with_options

log = logging.getLogger("penstock.pipeline")

WRITE_SECONDS = 1.0
"""The minimum number of seconds between two writes for one query."""
RETRY_SECONDS = 10.0
"""Seconds until the next attempt after a store did not answer."""
GIVE_UP_SECONDS = 300.0
"""Seconds after which a run that has ended is forgotten, if the store has not answered."""
_EXIT_SECONDS = 2.0

LedgerName = Callable[[Transaction], str | None]
"""Returns a sink's name in the ledger."""


def without_ledger_name(_tx: Transaction) -> None:
    """Return None, for sinks without entries in a ledger."""


@dataclass(frozen=True)
class _UnwrittenProgress:
    """Progress of a run that is not written yet: the newest progress, and all rows since the last write."""

    progress: Json
    rows_in: int
    rows_out: int | None

    def add(self, later: _UnwrittenProgress | None) -> _UnwrittenProgress:
        if later is None:
            return self
        is_counted = self.rows_out is not None or later.rows_out is not None
        rows_out = (self.rows_out or 0) + (later.rows_out or 0) if is_counted else None
        return _UnwrittenProgress(later.progress, self.rows_in + later.rows_in, rows_out)


@dataclass
class _ReportedRun:
    """A run, and what is known about it."""

    run: QueryRun
    ledger_name: LedgerName
    is_begun: bool = False
    unwritten: _UnwrittenProgress | None = None
    ended_at: float | None = None
    error: QueryError | None = None
    written_at: float = 0.0
    late_rows: int = 0
    """The number of rows that were dropped because they were older than the watermark."""
    counted_batch: int | None = None
    """The last micro-batch whose rows were counted in the ledger."""

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    def due(self) -> float:
        """Return when the run has to be written next, by the monotonic clock."""
        if not self.is_begun or self.ended:
            return 0.0
        return self.written_at + (HEARTBEAT_SECONDS if self.unwritten is None else WRITE_SECONDS)


@dataclass(frozen=True)
class _Report:
    """What the next transaction writes for a run."""

    reported: _ReportedRun
    is_first: bool
    unwritten: _UnwrittenProgress | None
    is_last: bool


class Publisher(Forkable):
    """Publisher of this process's queries to one store."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.secrets = secrets_of(url)
        self._reset()
        register(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self.reported_runs: dict[str, _ReportedRun] = {}
        self.thread: threading.Thread | None = None
        self._database: Database | None = None
        self.retry_at = 0.0
        self.unavailable = False

    def after_fork_in_child(self) -> None:
        """Forget all runs: the parent process reports them."""
        self._reset()

    # Called by queries; only ``await_end`` and ``flush`` wait.

    def begin(self, run: QueryRun, ledger_name: LedgerName = without_ledger_name) -> None:
        with self._changed:
            self.reported_runs[run.run_id] = _ReportedRun(run, ledger_name)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="penstock-publisher", daemon=True)
                self.thread.start()
            self._changed.notify_all()

    def progressed(self, run_id: str, progress: Json) -> None:
        """Report a run's progress, as Spark's JSON."""
        with self._changed:
            reported = self.reported_runs.get(run_id)
            if reported is None:
                return
            self._add_late_rows(reported, late_rows_of(progress))
            is_first = reported.unwritten is None
            unwritten = _UnwrittenProgress(progress, *rows_of(progress))
            reported.unwritten = (
                unwritten if reported.unwritten is None else reported.unwritten.add(unwritten)
            )
            # Only the first progress after a write changes when the thread has to write.
            if is_first:
                self._changed.notify_all()

    def _add_late_rows(self, reported: _ReportedRun, rows: int) -> None:
        if rows and not reported.late_rows:
            # Log this once per run; the monitor page shows the number of rows.
            log.warning(
                "query %s drops rows that are older than its watermark",
                reported.run.name or reported.run.query_id,
                extra={"action": "rows_late", "query": reported.run.name, "rows": rows},
            )
        reported.late_rows += rows

    def end(self, run_id: str, error: QueryError | None) -> None:
        with self._changed:
            reported = self.reported_runs.get(run_id)
            if reported is not None and not reported.ended:
                reported.ended_at, reported.error = time.monotonic(), error
                self._changed.notify_all()

    def await_end(self, run_id: str, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until the end of a run is written; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: run_id not in self.reported_runs or self.unavailable, timeout)
            return run_id not in self.reported_runs

    def flush(self, timeout: float) -> None:
        """Write all progress now, and wait until it is written."""

        def is_flushed() -> bool:
            return self.unavailable or all(
                run.is_begun and run.unwritten is None and not run.ended
                for run in self.reported_runs.values()
            )

        with self._changed:
            for reported in self.reported_runs.values():
                reported.written_at = 0.0 if reported.unwritten is not None else reported.written_at
            self._changed.notify_all()
            self._changed.wait_for(is_flushed, timeout)

    # In the publisher's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while (pause := self._seconds_until_due()) > 0:
                    self._changed.wait(pause)
                if not self.reported_runs:
                    self.thread = None
                    self._close()
                    return
                reports = self._take_reports()
            try:
                self._write(reports)
            except Exception as error:
                self._record_failure(reports, error)
            else:
                self._record_written(reports)

    def _seconds_until_due(self) -> float:
        """Return the seconds until there is something to write."""
        due = min((reported.due() for reported in self.reported_runs.values()), default=0.0)
        if self.reported_runs:
            due = max(due, self.retry_at)
        return due - time.monotonic()

    def _take_reports(self) -> list[_Report]:
        """Take what is due. Progress that arrives later waits for the next write."""
        now, reports = time.monotonic(), []
        for reported in self.reported_runs.values():
            if reported.due() <= now:
                reports.append(_Report(reported, not reported.is_begun, reported.unwritten, reported.ended))
                reported.unwritten = None
        return reports

    def _write(self, reports: list[_Report]) -> None:
        database = self._open_database()
        # Not durable, so that commits do not wait for a disk. Reports may be lost if the machine fails.
        database.run(lambda tx: _write(tx, reports, self.secrets), durable=False, idempotent=True, timeout=0)

    def _open_database(self) -> Database:
        if self._database is None:
            # Programs that read or write the store create it, not the publisher.
            self._database = open_database(without_waits(self._url), create=False, timeout=0)
        return self._database

    def _record_written(self, reports: list[_Report]) -> None:
        with self._changed:
            now = time.monotonic()
            for report in reports:
                reported = report.reported
                reported.is_begun, reported.written_at = True, now
                if report.unwritten is not None:
                    reported.counted_batch = int(report.unwritten.progress["batchId"])
                if report.is_last and self.reported_runs.get(reported.run.run_id) is reported:
                    del self.reported_runs[reported.run.run_id]
            if self.unavailable:
                log.info("queries report to the monitor page again", extra={"action": "published_again"})
            self.unavailable = False
            self._changed.notify_all()

    def _record_failure(self, reports: list[_Report], error: Exception) -> None:
        with self._changed:
            for report in reports:
                if report.unwritten is not None:
                    report.reported.unwritten = report.unwritten.add(report.reported.unwritten)
            now = time.monotonic()
            self.retry_at = now + RETRY_SECONDS
            for run_id, reported in list(self.reported_runs.items()):
                if reported.ended_at is not None and now - reported.ended_at > GIVE_UP_SECONDS:
                    del self.reported_runs[run_id]
            # Log this once per outage.
            if not self.unavailable:
                prefix = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
                log.warning(
                    "queries continue without reports to the monitor page for now: %s",
                    f"{prefix}{redacted_message(error)}",
                    extra={"action": "monitor_failed", "error": condition_of(error)},
                )
            self.unavailable = True
            self._close()
            self._changed.notify_all()

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(Exception):
                database.close()


def _write(tx: Transaction, reports: list[_Report], secrets: list[str]) -> None:
    for report in reports:
        reported = report.reported
        run = reported.run
        if report.is_first:
            queries.begin(tx, run)
        if report.unwritten is None:
            queries.report(tx, run, None)
        else:
            progress = _progress(tx, reported, report.unwritten, secrets)
            source, sink = descriptions_of(report.unwritten.progress, secrets)
            queries.report(tx, run, progress, source=source, sink=sink)
        if report.is_last:
            queries.end(tx, run, reported.error)


def _progress(
    tx: Transaction, reported: _ReportedRun, unwritten: _UnwrittenProgress, secrets: list[str]
) -> QueryProgress:
    progress = progress_of(
        unwritten.progress, unwritten.rows_in, unwritten.rows_out, secrets, reported.late_rows
    )
    if progress.rows_out is not None:
        return progress
    return replace(progress, rows_out=_rows_out(tx, reported, progress.batch_id))


def _rows_out(tx: Transaction, reported: _ReportedRun, upto: int) -> int | None:
    """Count, in the ledger, the rows of uncounted micro-batches up to ``upto``.

    Spark does not count the rows that a Python sink writes (4.2, 4.3).
    """
    after = upto - 1 if reported.counted_batch is None else reported.counted_batch
    try:
        sink = reported.ledger_name(tx)
    except (NotFoundError, InvalidInputError):
        return None
    if sink is None or upto <= after:
        return None
    return queries.rows_committed(tx, sink, reported.run.query_id, after, upto)


def without_waits(url: str) -> str:
    """Add options to a URL, so that commits wait neither for the disk nor long for other processes."""
    parsed = parse_url(url)
    if parsed.dialect != "sqlite":
        return url
    return with_options(parsed, synchronous="normal", busy_timeout="5000")


_publishers: dict[str, Publisher] = {}
_publishers_lock = threading.Lock()


def publisher_of(url: str) -> Publisher:
    """Return this process's publisher for a store."""
    with _publishers_lock:
        return _publishers.setdefault(url, Publisher(url))


def _at_exit(pid: int) -> None:
    if os.getpid() == pid:
        for publisher in list(_publishers.values()):
            publisher.flush(_EXIT_SECONDS)


atexit.register(_at_exit, os.getpid())
