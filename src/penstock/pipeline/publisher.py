"""Publish the progress of this process's queries to a store.

One thread writes the newest progress of each query, at most once a second. Its callers leave a note and do
not wait. If the store does not answer, that is logged once, and the thread tries again later.
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
from penstock.redaction import secrets_of, shown
from penstock.store.database import Database, Transaction
from penstock.store.forks import Forkable, register
from penstock.store.records import queries
from penstock.store.records.queries import HEARTBEAT_SECONDS, QueryError, QueryProgress, QueryRun
from penstock.store.store_schema import open_database
from penstock.store.url import parse_url, with_options

log = logging.getLogger("penstock.pipeline")

EVERY_SECONDS = 1.0
"""Seconds between two writes for one query."""
RETRY_SECONDS = 10.0
"""Seconds until the next try after a store did not answer."""
GIVEN_UP_SECONDS = 300.0
"""Seconds after which the end of a run is dropped if the store has not answered."""
_EXIT_SECONDS = 2.0

LedgerName = Callable[[Transaction], str | None]
"""Returns a sink's name in the ledger."""


def in_no_ledger(_tx: Transaction) -> None:
    """Return None, as the ledger name of a sink that has no entries in the ledger."""


@dataclass(frozen=True)
class _Unwritten:
    """Unwritten progress of a run: the newest progress, and the sum of the rows since the last write."""

    progress: Json
    rows_in: int
    rows_out: int | None

    def merged_with(self, later: _Unwritten | None) -> _Unwritten:
        if later is None:
            return self
        known = self.rows_out is not None or later.rows_out is not None
        out = (self.rows_out or 0) + (later.rows_out or 0) if known else None
        return _Unwritten(later.progress, self.rows_in + later.rows_in, out)


@dataclass
class _ReportedRun:
    """A run that the publisher reports."""

    run: QueryRun
    ledger_name: LedgerName
    begun: bool = False
    news: _Unwritten | None = None
    ended_at: float | None = None
    error: QueryError | None = None
    written_at: float = 0.0
    late: int = 0
    """Rows that were dropped because they were older than the watermark."""
    batch: int | None = None
    """The last micro-batch whose rows were looked up in the ledger."""

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    def due(self) -> float:
        """Return the time of the clock at which there is something to write."""
        if not self.begun or self.ended:
            return 0.0
        return self.written_at + (HEARTBEAT_SECONDS if self.news is None else EVERY_SECONDS)


@dataclass(frozen=True)
class _Note:
    """What to write for a run in the next transaction."""

    followed: _ReportedRun
    begins: bool
    news: _Unwritten | None
    ends: bool


class Publisher(Forkable):
    """The reports of this process to one store."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.secrets = secrets_of(url)
        self._reset()
        register(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self.followed: dict[str, _ReportedRun] = {}
        self.thread: threading.Thread | None = None
        self._database: Database | None = None
        self.again_at = 0.0
        self.unavailable = False

    def after_fork_in_child(self) -> None:
        """Forget the queries, which the parent reports."""
        self._reset()

    # For callers. These methods do not wait.

    def begin(self, run: QueryRun, ledger_name: LedgerName = in_no_ledger) -> None:
        with self._changed:
            self.followed[run.run_id] = _ReportedRun(run, ledger_name)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="penstock-publisher", daemon=True)
                self.thread.start()
            self._changed.notify_all()

    def progressed(self, run_id: str, progress: Json) -> None:
        """Report a run's progress, in the form of Spark's JSON."""
        with self._changed:
            followed = self.followed.get(run_id)
            if followed is None:
                return
            self._add_late(followed, late_rows_of(progress))
            first = followed.news is None
            news = _Unwritten(progress, *rows_of(progress))
            followed.news = news if followed.news is None else followed.news.merged_with(news)
            # Only the first one makes the thread compute its pause again.
            if first:
                self._changed.notify_all()

    def _add_late(self, followed: _ReportedRun, rows: int) -> None:
        if rows and not followed.late:
            # Logged once per run; the monitor page shows the count.
            log.warning(
                "query %s drops rows because they are older than its watermark",
                followed.run.name or followed.run.query_id,
                extra={"action": "rows_late", "query": followed.run.name, "rows": rows},
            )
        followed.late += rows

    def end(self, run_id: str, error: QueryError | None) -> None:
        with self._changed:
            followed = self.followed.get(run_id)
            if followed is not None and not followed.ended:
                followed.ended_at, followed.error = time.monotonic(), error
                self._changed.notify_all()

    def settle(self, run_id: str, timeout: float) -> bool:
        """Wait until the end of a run is written; return whether it is, within ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: run_id not in self.followed or self.unavailable, timeout)
            return run_id not in self.followed

    def settle_all(self, timeout: float) -> None:
        """Wait until nothing is left to be written for now."""

        def written() -> bool:
            return self.unavailable or all(
                run.begun and run.news is None and not run.ended for run in self.followed.values()
            )

        with self._changed:
            for followed in self.followed.values():
                followed.written_at = 0.0 if followed.news is not None else followed.written_at
            self._changed.notify_all()
            self._changed.wait_for(written, timeout)

    # In its thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while (pause := self._pause()) > 0:
                    self._changed.wait(pause)
                if not self.followed:
                    self.thread = None
                    self._close()
                    return
                notes = self._notes()
            try:
                self._write(notes)
            except Exception as error:
                self._failed(notes, error)
            else:
                self._written(notes)

    def _pause(self) -> float:
        """Return the seconds until there is something to write."""
        due = min((followed.due() for followed in self.followed.values()), default=0.0)
        if self.followed:
            due = max(due, self.again_at)
        return due - time.monotonic()

    def _notes(self) -> list[_Note]:
        """Take what is due; whatever arrives meanwhile is left for the next time."""
        now, notes = time.monotonic(), []
        for followed in self.followed.values():
            if followed.due() <= now:
                notes.append(_Note(followed, not followed.begun, followed.news, followed.ended))
                followed.news = None
        return notes

    def _write(self, notes: list[_Note]) -> None:
        database = self._opened()
        # Not durable, so no commit waits for a disk; reports may be lost if the machine fails.
        database.run(lambda tx: _write(tx, notes, self.secrets), durable=False, idempotent=True, timeout=0)

    def _opened(self) -> Database:
        if self._database is None:
            # Not created here: the programs that read or write the store create it.
            self._database = open_database(without_waits(self._url), create=False, timeout=0)
        return self._database

    def _written(self, notes: list[_Note]) -> None:
        with self._changed:
            now = time.monotonic()
            for note in notes:
                followed = note.followed
                followed.begun, followed.written_at = True, now
                if note.news is not None:
                    followed.batch = int(note.news.progress["batchId"])
                if note.ends and self.followed.get(followed.run.run_id) is followed:
                    del self.followed[followed.run.run_id]
            if self.unavailable:
                log.info("queries report to the monitor page again", extra={"action": "published_again"})
            self.unavailable = False
            self._changed.notify_all()

    def _failed(self, notes: list[_Note], error: Exception) -> None:
        with self._changed:
            for note in notes:
                if note.news is not None:
                    note.followed.news = note.news.merged_with(note.followed.news)
            now = time.monotonic()
            self.again_at = now + RETRY_SECONDS
            for run_id, followed in list(self.followed.items()):
                if followed.ended_at is not None and now - followed.ended_at > GIVEN_UP_SECONDS:
                    del self.followed[run_id]
            # Logged once per outage.
            if not self.unavailable:
                kind = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
                log.warning(
                    "queries continue without reports to the monitor page for now: %s",
                    f"{kind}{shown(error)}",
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


def _write(tx: Transaction, notes: list[_Note], secrets: list[str]) -> None:
    for note in notes:
        followed = note.followed
        run = followed.run
        if note.begins:
            queries.begin(tx, run)
        if note.news is None:
            queries.report(tx, run, None)
        else:
            progress = _progress(tx, followed, note.news, secrets)
            source, sink = descriptions_of(note.news.progress, secrets)
            queries.report(tx, run, progress, source=source, sink=sink)
        if note.ends:
            queries.end(tx, run, followed.error)


def _progress(tx: Transaction, followed: _ReportedRun, news: _Unwritten, secrets: list[str]) -> QueryProgress:
    progress = progress_of(news.progress, news.rows_in, news.rows_out, secrets, followed.late)
    if progress.rows_out is not None:
        return progress
    return replace(progress, rows_out=_rows_out(tx, followed, progress.batch_id))


def _rows_out(tx: Transaction, followed: _ReportedRun, upto: int) -> int | None:
    """Return the rows of the micro-batches up to ``upto`` that were not counted yet, from the ledger.

    Spark does not count the rows that a Python sink writes (4.2, 4.3).
    """
    after = upto - 1 if followed.batch is None else followed.batch
    try:
        sink = followed.ledger_name(tx)
    except (NotFoundError, InvalidInputError):
        return None
    if sink is None or upto <= after:
        return None
    return queries.rows_committed(tx, sink, followed.run.query_id, after, upto)


def without_waits(url: str) -> str:
    """Return the URL with options for commits that wait neither for the disk nor long for other processes."""
    parsed = parse_url(url)
    if parsed.dialect != "sqlite":
        return url
    return with_options(parsed, synchronous="normal", busy_timeout="5000")


_publishers: dict[str, Publisher] = {}
_guard = threading.Lock()


def publisher_of(url: str) -> Publisher:
    """Return this process's publisher for a store."""
    with _guard:
        return _publishers.setdefault(url, Publisher(url))


def _at_exit(pid: int) -> None:
    if os.getpid() == pid:
        for publisher in list(_publishers.values()):
            publisher.settle_all(_EXIT_SECONDS)


atexit.register(_at_exit, os.getpid())
