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
from penstock.ui.reading import MIN_REPORTS, ProgressRow, ProgressTexts, QueriesState, QueryRow, iso
from penstock.ui.unreadable import UnreadableRecords, finite_or_none, record_name

SILENT = "silent"
FILES_ONLY = "files only"
"""The state of a query that is known only from its checkpoint, so it is unknown whether it runs."""
WHOLE_BATCH = "triggerExecution"
"""Spark's name for the duration of a whole micro-batch."""
SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
"""The time without a report after which a query is shown as silent."""
RECENT_BATCHES = MIN_REPORTS
"""The number of micro-batches that the percentiles of durations cover."""
_MAX_PHASES, _PHASE_CHARACTERS = 100, 100
_MAX_MILLISECONDS = 1 << 53
_NAME_CHARACTERS = 300
QUERY_ID_CHARACTERS = 64
"""The length to which ids are read, since a longer prefix may not be unique. Spark's ids have 36."""
_MAX_WARNINGS, _NOTE_CHARACTERS = 20, 1000
_MAX_NOTES = 100
OVERLAP_MICROS = 10_000_000
"""How many microseconds are read again, because processes may commit in another order than they report."""
STATES = (FAILED, SILENT, RUNNING, FILES_ONLY, STOPPED)
"""The states in the order in which queries are listed."""
_EMPTY_QUERY: Json = dict.fromkeys(
    (
        "id", "run_id", "name", "engine", "state", "batch", "unit", "rows_in", "rows_out",
        "rows_in_per_second", "latency_ms", "batch_duration_ms", "duration_ms", "watermark",
        "finalized_until", "state_rows", "state_bytes", "last_error", "spark_ui", "checkpoint", "source",
        "sink", "started_at", "updated_at",
    )
)  # fmt: skip


@dataclass
class _TrackedQuery:
    """The progress of a query, and its history."""

    last: ProgressRow | None = None
    previous: ProgressRow | None = None
    texts: ProgressTexts | None = None
    """The texts of the last progress."""
    history: History = field(default_factory=History)
    batch_durations: Percentiles = field(default_factory=lambda: Percentiles(RECENT_BATCHES))
    """Milliseconds of the micro-batches that were reported."""

    def add(self, row: ProgressRow) -> None:
        if self.last is not None and row.reported_at <= self.last.reported_at:
            return
        at = iso(row.reported_at)
        self.previous, self.last = self.last, row
        durations = self.batch_durations
        self.texts = None
        is_micro_batch = _is_micro_batch(row)
        duration = finite_or_none(row.duration)
        if is_micro_batch and duration is not None:
            durations.add(duration)
        self.history.add(
            {
                "at": at,
                "rows_in": row.rows_in,
                "rows_out": row.rows_out,
                "p50": finite_or_none(row.p50),
                "p99": finite_or_none(row.p99),
                "batch_p50": durations.percentile(50) if is_micro_batch else None,
                "batch_p99": durations.percentile(99) if is_micro_batch else None,
                "duration_ms": duration,
                "state_rows": row.state_rows,
            }
        )

    def add_texts(self, texts: ProgressTexts) -> None:
        if self.last is not None and texts.reported_at == self.last.reported_at:
            self.texts = texts

    def rate(self, state: str, now: int) -> float | None:
        """Return the rows per second since the previous progress, or until now if that is longer."""
        last, previous = self.last, self.previous
        if state != RUNNING:
            return 0.0 if state in (STOPPED, FAILED) else None
        if last is None or previous is None or previous.run_id != last.run_id:
            return None
        elapsed = max(last.reported_at - previous.reported_at, 1, now - last.reported_at)
        return float(round(last.rows_in / (elapsed / 1e6), 3))


def _is_micro_batch(row: ProgressRow) -> bool:
    """Return whether progress is from a micro-batch; a query may have used both engines."""
    return row.duration is not None and bool(row.is_micro_batch)


class Queries:
    """Tracker of all queries of a store across snapshots."""

    def __init__(self) -> None:
        self._tracked: dict[str, _TrackedQuery] = {}
        self._last_report = 0
        self.notes: list[str] = []
        """The warnings of running queries."""

    @property
    def since(self) -> int:
        """The time since which progress must be read."""
        return max(self._last_report - OVERLAP_MICROS, 0)

    def update(
        self, state: QueriesState, now: int, checkpoints: Sequence[Checkpoint], unreadable: UnreadableRecords
    ) -> list[Json]:
        """Return the queries for the page; ``now`` is the time of the state, in microseconds since 1970."""
        for row in state.queries:
            if len(row.query_id) > QUERY_ID_CHARACTERS:
                problem = ValueError(f"its id is longer than {QUERY_ID_CHARACTERS} characters")
                unreadable.add(record_name("query", row.query_id), problem)
        queries = [row for row in state.queries if len(row.query_id) <= QUERY_ID_CHARACTERS]
        ids = {row.query_id for row in queries}
        self._tracked = {query_id: self._tracked.get(query_id, _TrackedQuery()) for query_id in ids}
        for progress in state.progress:
            if progress.query_id in ids:
                try:
                    self._tracked[progress.query_id].add(progress)
                except Exception as error:
                    unreadable.add(record_name("a report of query", progress.query_id), error)
        for texts in state.texts:
            if texts.query_id in ids:
                self._tracked[texts.query_id].add_texts(texts)
        newest = max((row.reported_at for row in queries), default=self._last_report)
        self._last_report = min(newest, now)
        by_id = {checkpoint.state.query_id: checkpoint for checkpoint in checkpoints}
        rows = unreadable.build_rows(
            queries,
            lambda row: self._query_row(row, by_id.get(row.query_id), now, unreadable),
            lambda row: record_name("query", row.name or row.query_id),
        )
        rows += unreadable.build_rows(
            [unmatched for unmatched in checkpoints if unmatched.state.query_id not in ids],
            _checkpoint_row,
            lambda unmatched: record_name("checkpoint", unmatched.location),
        )
        rows.sort(key=lambda row: (STATES.index(row["state"]), row["name"] or "", row["id"]))
        notes = [note for row in rows for note in self._warnings(row, unreadable)]
        omitted_notes = len(notes) - _MAX_NOTES
        self.notes = [
            *notes[:_MAX_NOTES],
            *([f"{omitted_notes:,} more warnings of queries"] if omitted_notes > 0 else []),
        ]
        return rows

    def _warnings(self, query: Json, unreadable: UnreadableRecords) -> list[str]:
        tracked = self._tracked.get(query["id"], _TrackedQuery())
        last, texts = tracked.last, tracked.texts
        if last is None or texts is None or last.run_id != query["run_id"]:
            return []
        if query["state"] not in (RUNNING, SILENT):
            return []
        name = query["name"] or query["id"]
        try:
            warnings = parse_record(texts.warnings or "[]", f"a report of query {name}", list)
        except StoreError as error:
            unreadable.add(record_name("the warnings of query", name), error)
            return []
        return [
            truncated(f"query {name}, at {iso(last.reported_at)}: {warning}", _NOTE_CHARACTERS)
            for warning in warnings[:_MAX_WARNINGS]
        ]

    def _query_row(
        self, row: QueryRow, checkpoint: Checkpoint | None, now: int, unreadable: UnreadableRecords
    ) -> Json:
        query = {
            **_EMPTY_QUERY,
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
            unreadable.add(record_name("the progress of query", row.name or row.query_id), error)
            return query


def _progress(tracked: _TrackedQuery, query: Json, now: int) -> Json:
    last, texts = tracked.last, tracked.texts
    if last is None:
        return {}
    percentiles = {"p50": last.p50, "p90": last.p90, "p99": last.p99, "max": last.max}
    latency = {name: finite_or_none(number) for name, number in percentiles.items()}
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


def _durations(texts: ProgressTexts, record: str) -> dict[str, float]:
    """Return the milliseconds of each phase."""
    durations: dict[str, float] = {}
    for phase, milliseconds in parse_record(texts.durations, record, dict).items():
        is_number = type(milliseconds) in (int, float) and 0 <= milliseconds <= _MAX_MILLISECONDS
        if not is_number or len(durations) == _MAX_PHASES:
            raise unreadable_record(record, ValueError("its durations are not the milliseconds of phases"))
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


def _displayable(text: str | None) -> str | None:
    """Make text from a file displayable: truncate it, and replace lone surrogates."""
    return None if text is None else truncated(text, _NAME_CHARACTERS).encode(errors="replace").decode()


def _checkpoint_row(checkpoint: Checkpoint) -> Json:
    """Return the fields of a query that is known only from its checkpoint."""
    state = checkpoint.state
    last = state.planned or state.committed
    return {
        **_EMPTY_QUERY,
        "id": _displayable(state.query_id or checkpoint.location),
        "engine": state.engine,
        "state": FILES_ONLY,
        "batch": state.last_planned,
        "unit": _unit(state.engine),
        "rows_in": None if last is None else last.rows,
        "watermark": checkpoint.watermark,
        "state_bytes": checkpoint.state_bytes,
        "checkpoint": checkpoint.location,
        "source": _displayable(checkpoint.source),
        "updated_at": iso(checkpoint.written_at),
        "history": History(),
    }
