"""Progress of a continuous query, in the form of Spark's query progress, and its dispatch to listeners.

Listeners are called in a separate thread, so that none delays an epoch.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from pyspark.errors import PySparkException
from pyspark.sql.streaming.listener import StreamingQueryProgress

from penstock.continuous.connectors.protocol import Epoch
from penstock.errors import PenstockError, condition_of
from penstock.instants import moment_text, now_micros
from penstock.json_text import Json, JsonValue
from penstock.redaction import shown
from penstock.spark.internals.listeners import ListenerBus

log = logging.getLogger("penstock.continuous")

LATENCY = "latencyMs"
MOST_WAITING = 100
"""The number of epochs that may wait for dispatch; above it, the oldest one is dropped."""
_KEPT = 100
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Progress:
    """Progress of a query's last epochs."""

    def __init__(
        self,
        query_id: str,
        run_id: str,
        name: str | None,
        clock: Callable[[], float],
        source: str = "",
        sink: str = "",
    ) -> None:
        self._who = {"id": query_id, "runId": run_id, "name": name}
        self._clock, self._source, self._sink = clock, source, sink
        self._recent: deque[StreamingQueryProgress] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._planning: float | None = None
        self._since = clock()
        self._offset: JsonValue = None

    def run_started(self) -> None:
        """Record that the planning of a run begins."""
        self._since = self._clock()

    def tasks_connected(self) -> None:
        """Record that all tasks are connected: rows are read from here on."""
        self._planning, self._since = self._clock() - self._since, self._clock()

    def committed(self, epoch: Epoch, offset: JsonValue, began: float, *, at_once: bool) -> Json:
        """Record an epoch whose commit began at the time ``began``; return its progress as Spark's JSON.

        With ``at_once``, rows became visible when they were written, not with the commit.
        """
        now, visible = self._clock(), now_micros()
        commit = now - began
        running = min(began - self._since, _seconds_since_read(epoch, visible) - commit)
        phases = {"runContinuous": max(running, 0.0), "epochCommit": commit}
        if self._planning is not None:
            phases = {"queryPlanning": self._planning, **phases}
        latencies = _latencies(epoch, None if at_once else visible)
        progress = self._progress(epoch, offset, now - self._since, phases, latencies)
        self._planning, self._since, self._offset = None, now, offset
        kept = StreamingQueryProgress.fromJson(progress)
        # Also as numbers; Spark's form only accepts text.
        kept[LATENCY] = latencies
        log.debug(
            "query %s: epoch %d is committed, with %d rows",
            self._who["name"] or self._who["id"],
            epoch.number,
            epoch.rows_out,
            extra={
                "action": "epoch_committed",
                "query_id": self._who["id"],
                "epoch": epoch.number,
                "rows": epoch.rows_out,
                "duration_ms": progress["durationMs"],
                "latency_ms": latencies,
            },
        )
        with self._lock:
            self._recent.append(kept)
        return progress

    def _progress(
        self,
        epoch: Epoch,
        offset: JsonValue,
        elapsed: float,
        phases: Mapping[str, float],
        latencies: Mapping[str, float],
    ) -> Json:
        worked = phases["runContinuous"] + phases["epochCommit"]
        rows = {
            "numInputRows": epoch.rows_in,
            "inputRowsPerSecond": _rate(epoch.rows_in, elapsed),
            "processedRowsPerSecond": _rate(epoch.rows_in, worked),
        }
        # The source's current end has not been looked up.
        offsets = {"startOffset": self._offset, "endOffset": offset, "latestOffset": None}
        texts = {key: None if value is None else json.dumps(value) for key, value in offsets.items()}
        return {
            **self._who,
            "timestamp": timestamp(),
            "batchId": epoch.number,
            "batchDuration": round(worked * 1000),
            **rows,
            "durationMs": {phase: round(seconds * 1000) for phase, seconds in phases.items()},
            "eventTime": {},
            "stateOperators": [],
            "sources": [{"description": self._source, **texts, **rows, "metrics": {}}],
            "sink": {
                "description": self._sink,
                "numOutputRows": epoch.rows_out,
                "metrics": {f"{LATENCY}.{name}": str(value) for name, value in latencies.items()},
            },
            "observedMetrics": {},
        }

    @property
    def recent(self) -> list[StreamingQueryProgress]:
        """The last epochs, oldest first."""
        with self._lock:
            return list(self._recent)

    @property
    def last(self) -> StreamingQueryProgress | None:
        recent = self.recent
        return recent[-1] if recent else None


def timestamp() -> str:
    """Return the current time in the form of Spark's progress."""
    return moment_text(datetime.now(UTC), "milliseconds")


def _rate(rows: int, seconds: float) -> float:
    return round(rows / seconds, 3) if seconds > 0 else 0.0


def _seconds_since_read(epoch: Epoch, now: int) -> float:
    """Return the seconds since the epoch's first row was read; infinity if the source does not know."""
    read = min((times.read for times in epoch.times), default=None)
    return math.inf if read is None else (now - read) / 1_000_000


def _latencies(epoch: Epoch, visible: int | None) -> dict[str, float]:
    """Return the milliseconds from a row's creation until it was visible: at ``visible``, or when written."""
    latencies = sorted(
        ((times.written if visible is None else visible) - times.made, times.rows) for times in epoch.times
    )
    if not latencies:
        return {}
    return {name: _percentile(latencies, share) / 1000 for name, share in _PERCENTILES.items()}


def _percentile(latencies: Sequence[tuple[int, int]], share: float) -> int:
    wanted = share * sum(rows for _, rows in latencies)
    for micros, rows in latencies:
        wanted -= rows
        if wanted <= 0:
            return micros
    return latencies[-1][0]


class QueryMonitor(Protocol):
    """Reporter for the monitor page; its methods return immediately, except for ``terminated``."""

    def started(self) -> None: ...

    def progressed(self, progress: Json) -> None: ...

    def terminated(self, error: Exception | None, timeout: float) -> None: ...


class ListenerDispatch:
    """Dispatcher of one query's events, in order, to Spark's listeners and the monitor page.

    ``original`` returns the error to report for the error that ended the query.
    """

    def __init__(
        self,
        called: str,
        listeners: ListenerBus | None,
        original: Callable[[Exception], Exception] = lambda error: error,
        monitor: QueryMonitor | None = None,
    ) -> None:
        self._called, self._listeners = called, listeners
        self._original, self._monitor = original, monitor
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque(maxlen=MOST_WAITING)
        self._last: Callable[[], None] | None = None
        self._warned = False
        self._thread: threading.Thread | None = None

    def started(self, name: str | None, timestamp: str) -> None:
        """Dispatch that the query starts, before any other event."""
        if self._monitor is not None:
            self._monitor.started()
        listeners = self._listeners
        if listeners is not None:
            self._thread = threading.Thread(
                target=self._run,
                args=[lambda: listeners.started(name, timestamp)],
                name="continuous listeners",
                daemon=True,
            )
            self._thread.start()

    def progressed(self, progress: Json) -> None:
        """Dispatch that an epoch is committed."""
        if self._monitor is not None:
            self._monitor.progressed(progress)
        listeners = self._listeners
        if listeners is not None:
            with self._changed:
                self._waiting.append(lambda: listeners.progressed(json.dumps(progress)))
                self._changed.notify_all()

    def terminated(self, error: Exception | None, timeout: float) -> None:
        """Dispatch that the query has ended; wait up to ``timeout`` seconds for all events."""
        listeners, thread = self._listeners, self._thread
        if listeners is not None:
            with self._changed:
                self._last = lambda: listeners.terminated(*self._ending(error))
                self._changed.notify_all()
        if self._monitor is not None:
            self._monitor.terminated(error, timeout)
        if thread is not None:
            thread.join(timeout)

    def _ending(self, error: Exception | None) -> tuple[str | None, str | None]:
        """Return what ended the query, and its condition."""
        if error is None:
            return None, None
        error = self._original(error)
        condition = error.getCondition() if isinstance(error, PySparkException) else None
        if isinstance(error, PenstockError):
            condition = error.condition
        return f"{type(error).__module__}.{type(error).__qualname__}: {error}", condition

    def _run(self, first: Callable[[], None]) -> None:
        self._dispatch(first)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._last)
                if not self._waiting:
                    break
                event = self._waiting.popleft()
            self._dispatch(event)
        assert self._last is not None
        self._dispatch(self._last)

    def _dispatch(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "query %s: its listeners have missed events: %s",
                    self._called,
                    shown(error),
                    extra={"action": "listeners_failed", "query": self._called, "error": condition_of(error)},
                )
