"""Reports of a pump's progress, for its process and for the monitor page, which shows pumps as queries."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import condition_of
from penstock.instants import now_micros
from penstock.redaction import redacted_message
from penstock.store.database import Transaction
from penstock.store.records import queries
from penstock.store.records.queries import HEARTBEAT_SECONDS, PUMP, QueryError, QueryProgress, QueryRun

_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
_MAX_LATENCIES = 10_000
"""Limits the latencies that are kept between two reports."""


@dataclass(frozen=True)
class Totals:
    """Totals of the rows that a process has appended."""

    commits: int
    rows: int
    finalized_until: int | None
    """All commits before this time of the server's clock have been appended; None if unknown.

    In microseconds since 1970.
    """


@dataclass(frozen=True)
class Unreported:
    """Appends since the last report."""

    rows: int = 0
    latencies: tuple[NDArray[np.float64], ...] = ()
    """The milliseconds from each commit until it was in the queues."""

    def __add__(self, later: Unreported) -> Unreported:
        is_full = sum(map(len, self.latencies)) >= _MAX_LATENCIES
        return Unreported(self.rows + later.rows, self.latencies + (() if is_full else later.latencies))

    def percentiles(self) -> dict[str, float]:
        """Return percentiles of the latencies, in milliseconds."""
        if not self.latencies:
            return {}
        milliseconds = np.concatenate(self.latencies)
        return {
            name: round(float(np.percentile(milliseconds, share)), 3) for name, share in _PERCENTILES.items()
        }


class Reports:
    """Counters and reports of a process that runs a pump. Thread-safe.

    Parameters
    ----------
    store
        The store's id.
    name
        The pump's name.
    owner
        The id of the process.
    source
        The name of the feed, without a password.
    """

    def __init__(self, store: str, name: str, owner: str, source: str) -> None:
        self._lock = threading.Lock()
        run_id = str(uuid.uuid5(uuid.UUID(store), f"pump {name}"))
        self._run = QueryRun(run_id, owner, name, PUMP, now_micros(), source)
        self._totals, self._unreported = Totals(0, 0, None), Unreported()
        self._appends = 0
        self._next_report_at = 0.0
        """When to send the next report if nothing is appended."""
        self.sink: str | None = None
        """The queues of the pump; None until they are planned."""
        self.warnings: tuple[str, ...] = ()
        """Warnings about the server."""

    @property
    def totals(self) -> Totals:
        """The totals so far."""
        with self._lock:
            return self._totals

    def appended(self, commits: NDArray[np.int64], rows: int) -> None:
        """Record an append.

        Parameters
        ----------
        commits
            The times of its commits, in microseconds since 1970.
        rows
            The number of its rows.
        """
        milliseconds = (now_micros() - commits) / 1000
        with self._lock:
            totals = self._totals
            self._totals = Totals(totals.commits + len(commits), totals.rows + rows, totals.finalized_until)
            self._unreported += Unreported(rows, (milliseconds,) if len(commits) else ())
            self._appends += 1

    def finalized(self, until: int) -> None:
        """Record the server's time before which all commits have been appended."""
        with self._lock:
            self._totals = replace(self._totals, finalized_until=until)

    def begin(self, tx: Transaction) -> None:
        """Report that the process has started."""
        queries.begin(tx, self._run)

    def take(self) -> Unreported:
        """Return the appends since the last report; the caller gives them back if reporting fails."""
        with self._lock:
            unreported, self._unreported = self._unreported, Unreported()
            return unreported

    def give_back(self, unreported: Unreported) -> None:
        with self._lock:
            self._unreported = unreported + self._unreported

    def report(self, tx: Transaction, unreported: Unreported) -> None:
        """Report that the process is alive, and its appends."""
        progress, now = None, time.monotonic()
        with self._lock:
            appends, finalized = self._appends, self._totals.finalized_until
        if unreported.rows or (finalized is not None and now >= self._next_report_at):
            self._next_report_at = now + HEARTBEAT_SECONDS
            progress = QueryProgress(
                appends,
                unreported.rows,
                unreported.rows,
                unreported.percentiles(),
                finalized_until=finalized,
                warnings=self.warnings,
            )
        queries.report(tx, self._run, progress, sink=self.sink)

    def end(self, tx: Transaction, error: BaseException | None) -> None:
        """Report that the process has ended, with the error if there was one."""
        failure = None if error is None else QueryError(condition_of(error), redacted_message(error))
        queries.end(tx, self._run, failure)
