"""Queries on the page: what they have told of themselves, and whether they still tell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from penstock.store.records.queries import CONTINUOUS, FAILED, HEARTBEAT_SECONDS, RUNNING, STOPPED
from penstock.ui.checkpoints import Found, entry
from penstock.ui.history import History, Spread
from penstock.ui.reading import Seen, iso

SILENT = "silent"
FILES_ONLY = "files only"
"""Of a query that is known by its checkpoint alone: whether it runs cannot be told."""
WHOLE_BATCH = "triggerExecution"
"""What Spark calls the whole of a micro-batch among its phases."""
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
"""After how long without a word a query is taken for gone."""
RECENT_BATCHES = 100
"""Of how many micro-batches it is told how long they took."""
OVERLAP = 10_000_000
"""Microseconds: two processes may tell in another order than they commit."""
STATES = (FAILED, SILENT, RUNNING, FILES_ONLY, STOPPED)
"""In the order in which queries are told."""
_UNKNOWN: Mapping[str, Any] = dict.fromkeys(
    (
        "id", "run_id", "name", "engine", "state", "batch", "unit", "rows_in", "rows_out", "rows_in_per_second",
        "latency_ms", "batch_duration_ms", "duration_ms", "watermark", "state_rows", "state_bytes", "last_error",
        "spark_ui", "checkpoint", "source", "sink", "started_at", "updated_at",
    )
)  # fmt: skip


@dataclass
class _Known:
    """What was seen of a query's progress."""

    last: Any = None
    before: Any = None
    history: History = field(default_factory=History)
    batches: Spread = field(default_factory=lambda: Spread(RECENT_BATCHES))
    """Milliseconds that micro-batches took, of each time that one was told."""

    def add(self, row: Any) -> None:
        if self.last is not None and row.reported_at <= self.last.reported_at:
            return
        self.before, self.last = self.last, row
        of_batch = _is_of_batch(row)
        if of_batch:
            self.batches.add(row.duration)
        self.history.add(
            {
                "at": iso(row.reported_at),
                "rows_in": row.rows_in,
                "rows_out": row.rows_out,
                "p50": row.p50,
                "p99": row.p99,
                "batch_p50": self.batches.below(50) if of_batch else None,
                "batch_p99": self.batches.below(99) if of_batch else None,
                "duration_ms": row.duration,
                "state_rows": row.state_rows,
            }
        )


class Queries:
    """All queries of a store, from one look to the next."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._order: list[str] = []
        self._seen_to = 0
        self.notes: list[str] = []
        """What running queries have told that somebody should look at."""

    @property
    def since(self) -> int:
        """From when on progress is wanted."""
        return max(self._seen_to - OVERLAP, 0)

    @property
    def count(self) -> int:
        """How many histories there are."""
        return len(self._known)

    def told(self, seen: Seen, checkpoints: Sequence[Found]) -> list[dict[str, Any]]:
        """The queries as the page gets them, without histories, by their states."""
        rows = {row.query_id: row for row in seen.queries}
        self._known = {key: self._known.get(key, _Known()) for key in rows}
        for row in seen.progress:
            if row.query_id in self._known:
                self._known[row.query_id].add(row)
        self._seen_to = max((row.reported_at for row in seen.queries), default=self._seen_to)
        by_id = {found.state.query_id: found for found in checkpoints}
        told = [self._told(row, by_id.get(row.query_id), seen.now) for row in rows.values()]
        told += [_of_checkpoint(found) for found in checkpoints if found.state.query_id not in rows]
        self.notes = [note for each in told for note in self._notes(each)]
        told.sort(key=lambda each: (STATES.index(each["state"]), each["name"] or "", each["id"]))
        self._order = [each["id"] for each in told]
        return told

    def _notes(self, query: Mapping[str, Any]) -> list[str]:
        known = self._known.get(query["id"])
        if known is None or known.last is None or query["state"] not in (RUNNING, SILENT):
            return []
        if known.last.run_id != query["run_id"]:
            return []
        warnings = json.loads(known.last.warnings or "[]")
        name = query["name"] or query["id"]
        return [f"query {name}, at {iso(known.last.reported_at)}: {each}" for each in warnings]

    def histories(self, step: int) -> list[list[Any]]:
        """The history of each query, in the order of :meth:`told`."""
        return [self._known[key].history.every(step) if key in self._known else [] for key in self._order]

    def _told(self, row: Any, found: Found | None, now: int) -> dict[str, Any]:
        known = self._known[row.query_id]
        about = {
            **_UNKNOWN,
            "id": row.query_id,
            "run_id": row.run_id,
            "name": row.name,
            "engine": row.engine,
            "state": _state(row.state, row.reported_at, now),
            "unit": _unit(row.engine),
            "last_error": _error(row),
            "spark_ui": _web(row.spark_ui),
            "checkpoint": row.checkpoint if found is None else found.shown,
            "source": row.source,
            "sink": row.sink,
            "started_at": iso(row.started_at),
            "updated_at": iso(row.reported_at),
        }
        if found is not None:
            about |= {"watermark": found.watermark, "state_bytes": found.state_bytes}
        return about if known.last is None else about | _progress(known, about, now)


def _progress(known: _Known, about: Mapping[str, Any], now: int) -> dict[str, Any]:
    last = known.last
    return {
        "batch": last.batch_id,
        "rows_in": last.rows_in,
        "rows_out": last.rows_out,
        "rows_in_per_second": _rate(known, about["state"], now),
        "latency_ms": _latency(last),
        "batch_duration_ms": _batch_duration(known),
        "duration_ms": json.loads(last.durations),
        "watermark": iso(last.watermark) or about["watermark"],
        "state_rows": last.state_rows,
        "state_bytes": about["state_bytes"] if last.state_bytes is None else last.state_bytes,
    }


def _rate(known: _Known, state: str, now: int) -> float | None:
    """Rows per second: those of the last progress, over the time since the one before or, when nothing came since, until now."""
    last, before = known.last, known.before
    if state != RUNNING:
        return 0.0 if state in (STOPPED, FAILED) else None
    if before is None or before.run_id != last.run_id:
        return None
    told = max(last.reported_at - before.reported_at, 1)
    quiet = now - last.reported_at
    return float(round(last.rows_in / (max(told, quiet) / 1e6), 3))


def _latency(row: Any) -> dict[str, float] | None:
    if row.p50 is None:
        return None
    return {"p50": row.p50, "p90": row.p90, "p99": row.p99, "max": row.max}


def _is_of_batch(row: Any) -> bool:
    """Whether progress is a micro-batch's; a query may have had both engines."""
    return row.duration is not None and f'"{WHOLE_BATCH}"' in row.durations


def _batch_duration(known: _Known) -> dict[str, float | None] | None:
    """How long the newest micro-batches took, where the last progress is one's: Spark does not tell how old their rows are."""
    return known.batches.told() if _is_of_batch(known.last) else None


def _error(row: Any) -> dict[str, Any] | None:
    if row.error_condition is None:
        return None
    return {"condition": row.error_condition, "message": row.error_message, "at": iso(row.error_at)}


def _state(told: str, reported_at: int, now: int) -> str:
    return SILENT if told == RUNNING and now - reported_at > SILENT_SECONDS * 1e6 else told


def _unit(engine: str | None) -> str:
    return "epoch" if engine == CONTINUOUS else "batch"


def _web(url: str | None) -> str | None:
    """An address that a page may link to."""
    return url if url is not None and urlsplit(url).scheme in ("http", "https") else None


def _of_checkpoint(found: Found) -> dict[str, Any]:
    about = entry(found)
    return {**_UNKNOWN, **about, "state": FILES_ONLY, "unit": _unit(about["engine"])}
