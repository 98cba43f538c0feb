"""Reports of a pump's progress, for its program and for the monitor page, which lists it as a query."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import condition_of
from penstock.instants import now_micros
from penstock.redaction import shown
from penstock.store.database import Transaction
from penstock.store.records import queries
from penstock.store.records.queries import HEARTBEAT_SECONDS, PUMP, QueryError, QueryProgress, QueryRun

_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
_MOST_COMMITS = 10_000
"""Of which latencies are kept between two reports."""


@dataclass(frozen=True)
class Totals:
    """Totals of the rows that a process has appended."""

    commits: int
    rows: int
    finalized_until: int | None
    """The server's time before which every commit is appended, in microseconds since 1970; None if it is not
    known.
    """


@dataclass(frozen=True)
class News:
    """What was appended since the last report."""

    rows: int = 0
    latencies: tuple[NDArray[np.float64], ...] = ()
    """Milliseconds from the commits until they were in the queues."""

    def __add__(self, later: News) -> News:
        enough = sum(map(len, self.latencies)) >= _MOST_COMMITS
        return News(self.rows + later.rows, self.latencies + (() if enough else later.latencies))

    def percentiles(self) -> dict[str, float]:
        """Return the milliseconds in which shares of the commits were in the queues."""
        if not self.latencies:
            return {}
        found = np.concatenate(self.latencies)
        return {name: round(float(np.percentile(found, share)), 3) for name, share in _PERCENTILES.items()}


class Reports:
    """The counts of a process that runs a pump; safe to use from several threads.

    Parameters
    ----------
    store
        The store's id.
    name
        The pump's name.
    owner
        The process's id.
    source
        What it reads, without a password.
    """

    def __init__(self, store: str, name: str, owner: str, source: str) -> None:
        self._lock = threading.Lock()
        number = str(uuid.uuid5(uuid.UUID(store), f"pump {name}"))
        self._run = QueryRun(number, owner, name, PUMP, now_micros(), source)
        self._totals, self._news = Totals(0, 0, None), News()
        self._appends = 0
        self._report_at = 0.0
        """When to send the next report if nothing is appended."""
        self.sink: str | None = None
        """The queues that it appends to; None until they are planned."""
        self.warnings: tuple[str, ...] = ()
        """Problems of the server."""

    @property
    def totals(self) -> Totals:
        """What was appended so far."""
        with self._lock:
            return self._totals

    def appended(self, commits: NDArray[np.int64], rows: int) -> None:
        """Count an append: the times of its commits, in microseconds since 1970, and its rows."""
        milliseconds = (now_micros() - commits) / 1000
        with self._lock:
            total = self._totals
            self._totals = Totals(total.commits + len(commits), total.rows + rows, total.finalized_until)
            self._news += News(rows, (milliseconds,) if len(commits) else ())
            self._appends += 1

    def finalized(self, until: int) -> None:
        """Note the server's time before which everything is appended."""
        with self._lock:
            self._totals = replace(self._totals, finalized_until=until)

    def begin(self, tx: Transaction) -> None:
        """Report that the process begins."""
        queries.begin(tx, self._run)

    def take(self) -> News:
        """Return what was appended since the last report. Give it back if reporting fails."""
        with self._lock:
            news, self._news = self._news, News()
            return news

    def give_back(self, news: News) -> None:
        with self._lock:
            self._news = news + self._news

    def report(self, tx: Transaction, news: News) -> None:
        """Report that the process is alive, and what it has appended."""
        progress, now = None, time.monotonic()
        with self._lock:
            number, until = self._appends, self._totals.finalized_until
        if news.rows or (until is not None and now >= self._report_at):
            self._report_at = now + HEARTBEAT_SECONDS
            progress = QueryProgress(
                number,
                news.rows,
                news.rows,
                news.percentiles(),
                finalized_until=until,
                warnings=self.warnings,
            )
        queries.report(tx, self._run, progress, sink=self.sink)

    def end(self, tx: Transaction, error: BaseException | None) -> None:
        """Report that the process ends, and why."""
        failure = None if error is None else QueryError(condition_of(error), shown(error))
        queries.end(tx, self._run, failure)
