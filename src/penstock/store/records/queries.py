"""Reports of streaming queries: one row for each query, and its newest progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from penstock.store.database import MAX_CLOCK_SKEW, Row, Transaction

RUNNING, STOPPED, FAILED = "running", "stopped", "failed"
MICRO_BATCH, CONTINUOUS, PUMP = "micro-batch", "continuous", "pump"
MAX_PROGRESS_ROWS = 900
"""The number of progress rows that the store keeps for a query."""
MAX_QUERIES = 1000
"""The number of queries to read, newest first."""
HEARTBEAT_SECONDS = 10.0
"""How often the process of a running query reports, in seconds, whatever the query does."""
RETENTION_SECONDS = 30 * 86_400
"""How long the store keeps a query's records after its last report, in seconds."""


@dataclass(frozen=True)
class QueryRun:
    """A run of a query, as the query reports it when the run begins.

    ``started_at`` is in microseconds since 1970. Unknown values are None, and no value contains secrets.
    """

    query_id: str
    run_id: str
    name: str | None
    engine: str
    started_at: int
    source: str | None = None
    sink: str | None = None
    checkpoint: str | None = None
    spark_ui: str | None = None


@dataclass(frozen=True)
class QueryProgress:
    """The progress of a query since its last report; unknown values are None or empty.

    ``latency``, ``duration`` and ``durations`` (by phase) are those of the newest micro-batch or epoch, in
    milliseconds. ``watermark`` and ``finalized_until`` are in microseconds since 1970. The query has all
    commits of its change feeds before ``finalized_until``. ``warnings`` are problems of the systems that it
    reads from, without secrets.
    """

    batch_id: int
    rows_in: int
    rows_out: int | None = None
    latency: Mapping[str, float] = field(default_factory=dict)
    duration: float | None = None
    durations: Mapping[str, float] = field(default_factory=dict)
    watermark: int | None = None
    state_rows: int | None = None
    state_bytes: int | None = None
    warnings: tuple[str, ...] = ()
    finalized_until: int | None = None


@dataclass(frozen=True)
class QueryError:
    """The error that ended a run, without secrets."""

    condition: str
    message: str


def begin(tx: Transaction, run: QueryRun) -> None:
    """Report that a run begins. It replaces the previous run of the query."""
    now = tx.now()
    tx.run("begin_query", now=now, **asdict(run))
    tx.run("drop_old_queries", before=now - RETENTION_SECONDS * 1_000_000)


def report(
    tx: Transaction,
    run: QueryRun,
    progress: QueryProgress | None,
    *,
    source: str | None = None,
    sink: str | None = None,
) -> bool:
    """Report that a run is alive, and any progress; return False if a newer run has replaced it.

    Pass ``source`` and ``sink`` if they were not known when the run began.
    """
    now = tx.now()
    updated = tx.run(
        "report_query",
        now=now,
        query_id=run.query_id,
        run_id=run.run_id,
        rows_in=0 if progress is None else progress.rows_in,
        rows_out=None if progress is None else progress.rows_out,
        source=source,
        sink=sink,
    )
    if updated and progress is not None:
        _insert_progress(tx, run, progress, now)
    return bool(updated)


def _insert_progress(tx: Transaction, run: QueryRun, progress: QueryProgress, now: int) -> None:
    latency = progress.latency
    tx.run(
        "insert_query_progress",
        now=now,
        query_id=run.query_id,
        run_id=run.run_id,
        batch_id=progress.batch_id,
        rows_in=progress.rows_in,
        rows_out=progress.rows_out,
        p50=latency.get("p50"),
        p90=latency.get("p90"),
        p99=latency.get("p99"),
        max=latency.get("max"),
        duration=progress.duration,
        durations=json.dumps(dict(progress.durations)),
        watermark=progress.watermark,
        finalized_until=progress.finalized_until,
        state_rows=progress.state_rows,
        state_bytes=progress.state_bytes,
        warnings=json.dumps(progress.warnings) if progress.warnings else None,
    )
    tx.run("prune_query_progress", query_id=run.query_id, most=MAX_PROGRESS_ROWS, ahead=now + MAX_CLOCK_SKEW)


def end(tx: Transaction, run: QueryRun, error: QueryError | None) -> None:
    """Report that a run has ended, and the error that ended it if any."""
    tx.run(
        "end_query",
        now=tx.now(),
        query_id=run.query_id,
        run_id=run.run_id,
        state=STOPPED if error is None else FAILED,
        condition=None if error is None else error.condition,
        message=None if error is None else error.message,
    )


def reported_queries(tx: Transaction) -> list[Row]:
    """Return the rows of the queries with the newest reports."""
    return tx.all("list_reported_queries", most=MAX_QUERIES)


def progress_since(tx: Transaction, since: int, *, upto: int, max_rows_per_query: int) -> list[Row]:
    """Return the progress rows that were reported after ``since`` and up to ``upto``, ordered by query and
    time. At most the newest ``max_rows_per_query`` rows of each query are returned.
    """
    return tx.all(
        "progress_since", since=since, upto=upto, skipped=max_rows_per_query - 1, queries=MAX_QUERIES
    )


def newest_texts(tx: Transaction, since: int, *, upto: int) -> list[Row]:
    """Return the durations and warnings of each query's newest progress after ``since`` and up to
    ``upto``.
    """
    return tx.all("newest_progress_texts", since=since, upto=upto, queries=MAX_QUERIES)


def rows_committed(tx: Transaction, sink: str, query_id: str, after: int, upto: int) -> int | None:
    """Return the number of rows that a query's micro-batches from ``after`` + 1 to ``upto`` wrote to a sink;
    None if the ledger has none of these micro-batches.
    """
    row = tx.one("rows_committed", sink=sink, app_id=query_id, after=after, upto=upto)
    return None if row.row_count is None else int(row.row_count)
