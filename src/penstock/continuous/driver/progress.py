"""Progress of a continuous query, in the format of Spark's query progress, and its dispatch to listeners.

A separate thread calls the listeners, so that they cannot delay an epoch.
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
from penstock.redaction import redacted_message
from penstock.spark.internals.listeners import ListenerBus

log = logging.getLogger("penstock.continuous")

LATENCY = "latencyMs"
MAX_WAITING_EVENTS = 100
"""The maximum number of events that wait for dispatch. If there are more, the oldest is dropped."""
_MAX_RECENT = 100
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
        self._query_ids = {"id": query_id, "runId": run_id, "name": name}
        self._clock, self._source, self._sink = clock, source, sink
        self._recent: deque[StreamingQueryProgress] = deque(maxlen=_MAX_RECENT)
        self._lock = threading.Lock()
        self._planning_seconds: float | None = None
        self._epoch_started = clock()
        self._last_offset: JsonValue = None

    def run_started(self) -> None:
        """Record that the planning of a run has begun."""
        self._epoch_started = self._clock()

    def tasks_connected(self) -> None:
        """Record that all tasks are connected and read rows from now on."""
        self._planning_seconds, self._epoch_started = self._clock() - self._epoch_started, self._clock()

    def committed(
        self, epoch: Epoch, offset: JsonValue, commit_started: float, *, visible_when_written: bool
    ) -> Json:
        """Record a committed epoch; return its progress as Spark's JSON.

        ``commit_started`` is the time of the clock when the commit began. With ``visible_when_written``, rows
        were visible as soon as they were written, before the commit.
        """
        now, visible_at = self._clock(), now_micros()
        commit_seconds = now - commit_started
        run_seconds = min(
            commit_started - self._epoch_started, _seconds_since_read(epoch, visible_at) - commit_seconds
        )
        phases = {"runContinuous": max(run_seconds, 0.0), "epochCommit": commit_seconds}
        if self._planning_seconds is not None:
            phases = {"queryPlanning": self._planning_seconds, **phases}
        latencies = _latencies(epoch, None if visible_when_written else visible_at)
        progress = self._progress(epoch, offset, now - self._epoch_started, phases, latencies)
        self._planning_seconds, self._epoch_started, self._last_offset = None, now, offset
        spark_progress = StreamingQueryProgress.fromJson(progress)
        # Spark's format has them as text; users also get numbers.
        spark_progress[LATENCY] = latencies
        log.debug(
            "query %s committed epoch %d with %d rows",
            self._query_ids["name"] or self._query_ids["id"],
            epoch.number,
            epoch.rows_out,
            extra={
                "action": "epoch_committed",
                "query_id": self._query_ids["id"],
                "epoch": epoch.number,
                "rows": epoch.rows_out,
                "duration_ms": progress["durationMs"],
                "latency_ms": latencies,
            },
        )
        with self._lock:
            self._recent.append(spark_progress)
        return progress

    def _progress(
        self,
        epoch: Epoch,
        offset: JsonValue,
        elapsed: float,
        phases: Mapping[str, float],
        latencies: Mapping[str, float],
    ) -> Json:
        working_seconds = phases["runContinuous"] + phases["epochCommit"]
        rows = {
            "numInputRows": epoch.rows_in,
            "inputRowsPerSecond": _rate(epoch.rows_in, elapsed),
            "processedRowsPerSecond": _rate(epoch.rows_in, working_seconds),
        }
        # The source's current end is not looked up for each epoch.
        offsets = {"startOffset": self._last_offset, "endOffset": offset, "latestOffset": None}
        texts = {key: None if value is None else json.dumps(value) for key, value in offsets.items()}
        return {
            **self._query_ids,
            "timestamp": timestamp(),
            "batchId": epoch.number,
            "batchDuration": round(working_seconds * 1000),
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
        """The progress of the last epochs, oldest first."""
        with self._lock:
            return list(self._recent)

    @property
    def last(self) -> StreamingQueryProgress | None:
        recent = self.recent
        return recent[-1] if recent else None


def timestamp() -> str:
    """Return the current time in the format of Spark's progress."""
    return moment_text(datetime.now(UTC), "milliseconds")


def _rate(rows: int, seconds: float) -> float:
    return round(rows / seconds, 3) if seconds > 0 else 0.0


def _seconds_since_read(epoch: Epoch, now: int) -> float:
    """Return the seconds since the epoch's first row was read; infinity if not known."""
    read = min((times.read for times in epoch.times), default=None)
    return math.inf if read is None else (now - read) / 1_000_000


def _latencies(epoch: Epoch, visible_at: int | None) -> dict[str, float]:
    """Return percentiles of the milliseconds from a row's creation until it was visible.

    All rows became visible at ``visible_at``, or, if that is None, when they were written.
    """
    latencies = sorted(
        ((times.written if visible_at is None else visible_at) - times.created, times.rows)
        for times in epoch.times
    )
    if not latencies:
        return {}
    return {name: _percentile(latencies, share) / 1000 for name, share in _PERCENTILES.items()}


def _percentile(latencies: Sequence[tuple[int, int]], share: float) -> int:
    rows_left = share * sum(rows for _, rows in latencies)
    for micros, rows in latencies:
        rows_left -= rows
        if rows_left <= 0:
            return micros
    return latencies[-1][0]


class QueryMonitor(Protocol):
    """Reporter for the monitor page. Its methods return immediately, except ``terminated``."""

    def started(self) -> None: ...

    def progressed(self, progress: Json) -> None: ...

    def terminated(self, error: Exception | None, timeout: float) -> None: ...


class ListenerDispatch:
    """Dispatcher of one query's events, in order, to Spark's listeners and the monitor page.

    ``original_error`` returns the error to report for the error that ended the query.
    """

    def __init__(
        self,
        query_label: str,
        listeners: ListenerBus | None,
        original_error: Callable[[Exception], Exception] = lambda error: error,
        monitor: QueryMonitor | None = None,
    ) -> None:
        self._query_label, self._listeners = query_label, listeners
        self._original_error, self._monitor = original_error, monitor
        self._changed = threading.Condition()
        self._waiting_events: deque[Callable[[], None]] = deque(maxlen=MAX_WAITING_EVENTS)
        self._last_event: Callable[[], None] | None = None
        self._warned = False
        self._thread: threading.Thread | None = None

    def started(self, name: str | None, timestamp: str) -> None:
        """Dispatch the start of the query, before any other event."""
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
        """Dispatch the progress of a committed epoch."""
        if self._monitor is not None:
            self._monitor.progressed(progress)
        listeners = self._listeners
        if listeners is not None:
            with self._changed:
                self._waiting_events.append(lambda: listeners.progressed(json.dumps(progress)))
                self._changed.notify_all()

    def terminated(self, error: Exception | None, timeout: float) -> None:
        """Dispatch the end of the query; wait up to ``timeout`` seconds for all events."""
        listeners, thread = self._listeners, self._thread
        if listeners is not None:
            with self._changed:
                self._last_event = lambda: listeners.terminated(*self._end_reason(error))
                self._changed.notify_all()
        if self._monitor is not None:
            self._monitor.terminated(error, timeout)
        if thread is not None:
            thread.join(timeout)

    def _end_reason(self, error: Exception | None) -> tuple[str | None, str | None]:
        """Return the text and the condition of the error that ended the query."""
        if error is None:
            return None, None
        error = self._original_error(error)
        condition = error.getCondition() if isinstance(error, PySparkException) else None
        if isinstance(error, PenstockError):
            condition = error.condition
        return f"{type(error).__module__}.{type(error).__qualname__}: {error}", condition

    def _run(self, first: Callable[[], None]) -> None:
        self._dispatch(first)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting_events or self._last_event)
                if not self._waiting_events:
                    break
                event = self._waiting_events.popleft()
            self._dispatch(event)
        assert self._last_event is not None
        self._dispatch(self._last_event)

    def _dispatch(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "listeners of query %s have missed events: %s",
                    self._query_label,
                    redacted_message(error),
                    extra={
                        "action": "listeners_failed",
                        "query": self._query_label,
                        "error": condition_of(error),
                    },
                )
