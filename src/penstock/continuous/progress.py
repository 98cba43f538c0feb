"""What a continuous query says of its epochs, in the form of Spark's query progress."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Any

from penstock.continuous.epochs import Epoch

log = logging.getLogger("penstock.continuous")

_KEPT = 100


class Progress:
    """The last epochs of a query."""

    def __init__(self, query_id: str, run_id: str, name: str | None) -> None:
        self._who = {"id": query_id, "runId": run_id, "name": name}
        self._recent: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def committed(self, epoch: Epoch, offset: Any, seconds: float) -> None:
        """Take note of an epoch that took so long to commit."""
        told = {
            **self._who,
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "batchId": epoch.number,
            "numInputRows": epoch.rows_in,
            "numOutputRows": epoch.rows_out,
            "durationMs": {"epochCommit": round(seconds * 1000, 3)},
            "sources": [{"endOffset": offset, "numInputRows": epoch.rows_in}],
        }
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
