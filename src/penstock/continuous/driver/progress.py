"""Progress of a continuous query, in the form of Spark's query progress."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

from penstock.continuous.driver.epochs import Epoch
from penstock.instants import moment_text, now_micros

log = logging.getLogger("penstock.continuous")

LATENCY = "latencyMs"
_KEPT = 100
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Progress:
    """Progress of a query's last epochs.

    Parameters
    ----------
    clock
        Returns seconds, from any starting point.
    source, sink
        Their descriptions.
    """

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
        self._offset: Any = None

    def run_started(self) -> None:
        """Record that the planning of a run begins."""
        self._since = self._clock()

    def tasks_connected(self) -> None:
        """Record that all tasks are connected: rows are read from here on."""
        self._planning, self._since = self._clock() - self._since, self._clock()

    def committed(self, epoch: Epoch, offset: Any, began: float, *, at_once: bool) -> Mapping[str, Any]:
        """Record an epoch; return its progress, in the form of Spark's JSON.

        Parameters
        ----------
        began
            When its commit began, by the clock.
        at_once
            Whether rows were visible when they were written, and not only now.
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
        # As numbers too; Spark's form takes text alone.
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
        offset: Any,
        elapsed: float,
        phases: Mapping[str, float],
        latencies: Mapping[str, float],
    ) -> dict[str, Any]:
        worked = phases["runContinuous"] + phases["epochCommit"]
        rows = {
            "numInputRows": epoch.rows_in,
            "inputRowsPerSecond": _rate(epoch.rows_in, elapsed),
            "processedRowsPerSecond": _rate(epoch.rows_in, worked),
        }
        # Nobody has asked where the source ends now.
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
        """The last epoch."""
        recent = self.recent
        return recent[-1] if recent else None


def timestamp() -> str:
    """Return the time now in the form of Spark's progress."""
    return moment_text(datetime.now(UTC), "milliseconds")


def _rate(rows: int, seconds: float) -> float:
    return round(rows / seconds, 3) if seconds > 0 else 0.0


def _seconds_since_read(epoch: Epoch, now: int) -> float:
    """Return the seconds since its first row was read; infinity if the source does not know."""
    read = min((times.read for times in epoch.times), default=None)
    return math.inf if read is None else (now - read) / 1_000_000


def _latencies(epoch: Epoch, visible: int | None) -> dict[str, float]:
    """Return the milliseconds from a row's creation until it was visible; empty if the source does not know.

    Parameters
    ----------
    visible
        When all rows of the epoch became visible; None if each did when it was written.
    """
    latencies = sorted(
        ((times.written if visible is None else visible) - times.made, times.rows) for times in epoch.times
    )
    return (
        {name: _percentile(latencies, share) / 1000 for name, share in _PERCENTILES.items()}
        if latencies
        else {}
    )


def _percentile(latencies: Sequence[tuple[int, int]], share: float) -> int:
    wanted = share * sum(rows for _, rows in latencies)
    for micros, rows in latencies:
        wanted -= rows
        if wanted <= 0:
            return micros
    return latencies[-1][0]
