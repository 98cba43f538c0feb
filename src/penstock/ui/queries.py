"""Queries on the monitor page: their reports and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.arguments import in_quotes, truncated
from penstock.errors import StoreError
from penstock.json_text import Json, parse_record, unreadable_record
from penstock.store.records.queries import CONTINUOUS, FAILED, HEARTBEAT_SECONDS, PUMP, RUNNING, STOPPED
from penstock.ui.checkpoints import Checkpoint
from penstock.ui.history import History, Percentiles
from penstock.ui.reading import FEWEST_REPORTS, ProgressRow, ProgressTexts, QueriesState, QueryRow, iso
from penstock.ui.unreadable import Unreadable, finite, named

SILENT = "silent"
FILES_ONLY = "files only"
"""The state of a query that is known only from its checkpoint, so it is unknown whether it runs."""
WHOLE_BATCH = "triggerExecution"
"""Spark's name for the duration of a whole micro-batch."""
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
"""The time without a report after which a query is shown as silent."""
RECENT_BATCHES = FEWEST_REPORTS
"""The number of micro-batches that the percentiles of durations cover."""
_MOST_PHASES, _PHASE_CHARACTERS = 100, 100
_LONGEST_MILLISECONDS = 1 << 53
_NAME_CHARACTERS = 300
QUERY_ID_CHARACTERS = 64
"""The length to which ids are read, since a longer prefix may not be unique. Spark's ids have 36."""
_MOST_WARNINGS, _NOTE_CHARACTERS = 20, 1000
_MOST_NOTES = 100
OVERLAP = 10_000_000
"""Microseconds that are read again, since two processes may commit in another order than they report."""
STATES = (FAILED, SILENT, RUNNING, FILES_ONLY, STOPPED)
"""The states in the order in which queries are listed."""
_UNKNOWN: Json = dict.fromkeys(
    (
        "id", "run_id", "name", "engine", "state", "batch", "unit", "rows_in", "rows_out",
        "rows_in_per_second", "latency_ms", "batch_duration_ms", "duration_ms", "watermark",
        "finalized_until", "state_rows", "state_bytes", "last_error", "spark_ui", "checkpoint", "source",
        "sink", "started_at", "updated_at",
    )
)  # fmt: skip


@dataclass
class _Tracked:
    """A query's progress so far."""

    last: ProgressRow | None = None
    before: ProgressRow | None = None
    texts: ProgressTexts | None = None
    """The texts of the last progress."""
    history: History = field(default_factory=History)
    batch_durations: Percentiles = field(default_factory=lambda: Percentiles(RECENT_BATCHES))
    """Milliseconds of the micro-batches that were reported."""

    def add(self, row: ProgressRow) -> None:
        if self.last is not None and row.reported_at <= self.last.reported_at:
            return
        at = iso(row.reported_at)
        self.before, self.last = self.last, row
        durations = self.batch_durations
        self.texts = None
        of_batch = _is_micro_batch(row)
        duration = finite(row.duration)
        if of_batch and duration is not None:
            durations.add(duration)
        self.history.add(
            {
                "at": at,
                "rows_in": row.rows_in,
                "rows_out": row.rows_out,
                "p50": finite(row.p50),
                "p99": finite(row.p99),
                "batch_p50": durations.percentile(50) if of_batch else None,
                "batch_p99": durations.percentile(99) if of_batch else None,
                "duration_ms": duration,
                "state_rows": row.state_rows,
            }
        )

    def add_texts(self, texts: ProgressTexts) -> None:
        if self.last is not None and texts.reported_at == self.last.reported_at:
            self.texts = texts

    def rate(self, state: str, now: int) -> float | None:
        """Return the rows per second since the previous progress, or until now if that is longer."""
        last, before = self.last, self.before
        if state != RUNNING:
            return 0.0 if state in (STOPPED, FAILED) else None
        if last is None or before is None or before.run_id != last.run_id:
            return None
        elapsed = max(last.reported_at - before.reported_at, 1, now - last.reported_at)
        return float(round(last.rows_in / (elapsed / 1e6), 3))


def _is_micro_batch(row: ProgressRow) -> bool:
    """Return whether progress is from a micro-batch; a query may have used both engines."""
    return row.duration is not None and bool(row.is_micro_batch)


class Queries:
    """All queries of a store, from one snapshot to the next."""

    def __init__(self) -> None:
        self._tracked: dict[str, _Tracked] = {}
        self._last_report = 0
        self.notes: list[str] = []
        """The warnings of running queries."""

    @property
    def since(self) -> int:
        """The time since which progress has to be read."""
        return max(self._last_report - OVERLAP, 0)

    def update(
        self, state: QueriesState, now: int, checkpoints: Sequence[Checkpoint], unreadable: Unreadable
    ) -> list[Json]:
        """Return the queries for the page; ``now`` is the time of the state, in microseconds since 1970."""
        for row in state.queries:
            if len(row.query_id) > QUERY_ID_CHARACTERS:
                why = ValueError(f"its id is longer than {QUERY_ID_CHARACTERS} characters")
                unreadable.add(named("query", row.query_id), why)
        queries = [row for row in state.queries if len(row.query_id) <= QUERY_ID_CHARACTERS]
        ids = {row.query_id for row in queries}
        self._tracked = {query_id: self._tracked.get(query_id, _Tracked()) for query_id in ids}
        for progress in state.progress:
            if progress.query_id in ids:
                try:
                    self._tracked[progress.query_id].add(progress)
                except Exception as error:
                    unreadable.add(named("a report of query", progress.query_id), error)
        for texts in state.texts:
            if texts.query_id in ids:
                self._tracked[texts.query_id].add_texts(texts)
        newest = max((row.reported_at for row in queries), default=self._last_report)
        self._last_report = min(newest, now)
        by_id = {checkpoint.state.query_id: checkpoint for checkpoint in checkpoints}
        rows = unreadable.each(
            queries,
            lambda row: self._row(row, by_id.get(row.query_id), now, unreadable),
            lambda row: named("query", row.name or row.query_id),
        )
        rows += unreadable.each(
            [unknown for unknown in checkpoints if unknown.state.query_id not in ids],
            _of_checkpoint,
            lambda unknown: named("checkpoint", unknown.location),
        )
        rows.sort(key=lambda row: (STATES.index(row["state"]), row["name"] or "", row["id"]))
        notes = [note for row in rows for note in self._warnings(row, unreadable)]
        more = len(notes) - _MOST_NOTES
        self.notes = [*notes[:_MOST_NOTES], *([f"{more:,} more warnings of queries"] if more > 0 else [])]
        return rows

    def _warnings(self, query: Json, unreadable: Unreadable) -> list[str]:
        tracked = self._tracked.get(query["id"], _Tracked())
        last, texts = tracked.last, tracked.texts
        if last is None or texts is None or last.run_id != query["run_id"]:
            return []
        if query["state"] not in (RUNNING, SILENT):
            return []
        name = query["name"] or query["id"]
        try:
            warnings = parse_record(texts.warnings or "[]", f"a report of query {name}", list)
        except StoreError as error:
            unreadable.add(named("the warnings of query", name), error)
            return []
        return [
            truncated(f"query {name}, at {iso(last.reported_at)}: {warning}", _NOTE_CHARACTERS)
            for warning in warnings[:_MOST_WARNINGS]
        ]

    def _row(self, row: QueryRow, checkpoint: Checkpoint | None, now: int, unreadable: Unreadable) -> Json:
        query = {
            **_UNKNOWN,
            "id": row.query_id,
            "run_id": row.run_id,
            "name": row.name,
            "engine": row.engine,
            "state": _state(row, now),
            "unit": _unit(row.engine),
            "last_error": _error(row),
            "spark_ui": _web_address(row.spark_ui),
            "checkpoint": row.checkpoint if checkpoint is None else checkpoint.location,
            "source": row.source,
            "sink": row.sink,
            "started_at": iso(row.started_at),
            "updated_at": iso(row.reported_at),
            "history": self._tracked[row.query_id].history,
        }
        if checkpoint is not None:
            query |= {"watermark": checkpoint.watermark, "state_bytes": checkpoint.state_bytes}
        try:
            return query | _progress(self._tracked[row.query_id], query, now)
        except Exception as error:
            unreadable.add(named("the progress of query", row.name or row.query_id), error)
            return query


def _progress(tracked: _Tracked, query: Json, now: int) -> Json:
    last, texts = tracked.last, tracked.texts
    if last is None:
        return {}
    percentiles = {"p50": last.p50, "p90": last.p90, "p99": last.p99, "max": last.max}
    latency = {name: finite(number) for name, number in percentiles.items()}
    return {
        "batch": last.batch_id,
        "rows_in": last.rows_in,
        "rows_out": last.rows_out,
        "rows_in_per_second": tracked.rate(query["state"], now),
        "latency_ms": None if latency["p50"] is None else latency,
        # Not a latency: Spark does not report how old a micro-batch's rows are.
        "batch_duration_ms": tracked.batch_durations.summary() if _is_micro_batch(last) else None,
        "duration_ms": None if texts is None else _durations(texts, f"a report of query {query['id']}"),
        "watermark": iso(last.watermark) or query["watermark"],
        "finalized_until": iso(last.finalized_until),
        "state_rows": last.state_rows,
        "state_bytes": query["state_bytes"] if last.state_bytes is None else last.state_bytes,
    }


def _durations(texts: ProgressTexts, what: str) -> dict[str, float]:
    """Return the milliseconds of each phase."""
    durations: dict[str, float] = {}
    for phase, milliseconds in parse_record(texts.durations, what, dict).items():
        is_number = type(milliseconds) in (int, float) and 0 <= milliseconds <= _LONGEST_MILLISECONDS
        if not is_number or len(durations) == _MOST_PHASES:
            raise unreadable_record(what, ValueError("its durations are not the milliseconds of phases"))
        durations[truncated(phase, _PHASE_CHARACTERS)] = milliseconds
    return durations


def _error(row: QueryRow) -> Json | None:
    if row.error_condition is None:
        return None
    return {"condition": row.error_condition, "message": row.error_message, "at": iso(row.error_at)}


def _state(row: QueryRow, now: int) -> str:
    if row.state not in (RUNNING, STOPPED, FAILED):
        raise unreadable_record("a query", ValueError(f"no query has the state {in_quotes(row.state)}"))
    is_silent = row.state == RUNNING and now - row.reported_at > SILENT_SECONDS * 1e6
    return SILENT if is_silent else row.state


def _unit(engine: str | None) -> str:
    return {CONTINUOUS: "epoch", PUMP: "append"}.get(engine or "", "batch")


def _web_address(url: str | None) -> str | None:
    """Return an address that the page may link to."""
    try:
        return url if url is not None and urlsplit(url).scheme in ("http", "https") else None
    except ValueError:
        return None


def _shown(text: str | None) -> str | None:
    """Return a text of a file in a form that can be shown: truncated, and without lone surrogates."""
    return None if text is None else truncated(text, _NAME_CHARACTERS).encode(errors="replace").decode()


def _of_checkpoint(checkpoint: Checkpoint) -> Json:
    """Return the fields of a query that is known only from its checkpoint."""
    state = checkpoint.state
    last = state.planned or state.committed
    return {
        **_UNKNOWN,
        "id": _shown(state.query_id or checkpoint.location),
        "engine": state.engine,
        "state": FILES_ONLY,
        "batch": state.last_planned,
        "unit": _unit(state.engine),
        "rows_in": None if last is None else last.rows,
        "watermark": checkpoint.watermark,
        "state_bytes": checkpoint.state_bytes,
        "checkpoint": checkpoint.location,
        "source": _shown(checkpoint.source),
        "updated_at": iso(checkpoint.written_at),
        "history": History(),
    }
