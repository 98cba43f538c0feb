"""What a continuous query says of its epochs, in the form of Spark's query progress."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.continuous.epochs import Epoch
from penstock.instants import now_micros

log = logging.getLogger("penstock.continuous")

_KEPT = 100
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Progress:
    """The last epochs of a query.

    Parameters
    ----------
    clock
        Seconds, from anywhere.
    """

    def __init__(self, query_id: str, run_id: str, name: str | None, clock: Callable[[], float]) -> None:
        self._who = {"id": query_id, "runId": run_id, "name": name}
        self._clock = clock
        self._recent: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        self._planning: float | None = None
        self._since = clock()
        self._offset: Any = None

    def run_begins(self) -> None:
        """The query is planned from here on."""
        self._since = self._clock()

    def run_is_there(self) -> None:
        """All tasks are there: rows are taken from here on."""
        self._planning, self._since = self._clock() - self._since, self._clock()

    def committed(self, epoch: Epoch, offset: Any, began: float, *, at_once: bool) -> None:
        """Take note of an epoch.

        Parameters
        ----------
        began
            When its commit began, by the clock.
        at_once
            Whether rows were seen when they were written, and not only now.
        """
        now = self._clock()
        phases = {"runContinuous": began - self._since, "epochCommit": now - began}
        if self._planning is not None:
            phases = {"queryPlanning": self._planning, **phases}
        told = {
            **self._who,
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "batchId": epoch.number,
            "numInputRows": epoch.rows_in,
            "numOutputRows": epoch.rows_out,
            "durationMs": {phase: round(seconds * 1000, 3) for phase, seconds in phases.items()},
            "latencyMs": _latencies(epoch, None if at_once else now_micros()),
            "sources": [{"startOffset": self._offset, "endOffset": offset, "numInputRows": epoch.rows_in}],
        }
        self._planning, self._since, self._offset = None, now, offset
        log.debug("epoch %s committed: %s", epoch.number, json.dumps(told), extra={"action": "epoch"})
        with self._lock:
            self._recent.append(told)

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The last epochs, oldest first."""
        with self._lock:
            return list(self._recent)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last epoch."""
        recent = self.recent
        return recent[-1] if recent else None


def _latencies(epoch: Epoch, seen: int | None) -> dict[str, float]:
    """Milliseconds from when rows were made to when they were seen; empty where the source does not say.

    Parameters
    ----------
    seen
        When all rows of the epoch were; None where each was when it was written.
    """
    taken = sorted(
        ((times.written if seen is None else seen) - times.made, times.rows) for times in epoch.times
    )
    return {name: _percentile(taken, share) / 1000 for name, share in _PERCENTILES.items()} if taken else {}


def _percentile(taken: Sequence[tuple[int, int]], share: float) -> int:
    wanted = share * sum(rows for _, rows in taken)
    for micros, rows in taken:
        wanted -= rows
        if wanted <= 0:
            return micros
    return taken[-1][0]
