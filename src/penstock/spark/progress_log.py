"""Streaming listener that logs the events of a session's queries."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from penstock.redaction import sentence
from penstock.spark.internals.sessions import check_session, session_id

log = logging.getLogger("penstock.progress")

_MAX_CHARACTERS = 500
_Event = QueryStartedEvent | QueryIdleEvent | QueryTerminatedEvent | StreamingQueryProgress

_logged_sessions: set[str] = set()
_lock = threading.Lock()


def log_progress(spark: SparkSession) -> None:
    """Log the events of all streaming queries of a session to ``penstock.progress``.

    A second call does nothing.

    The log has the start and the end of each query, including Penstock's continuous queries (INFO, or ERROR
    if the query failed), and each micro-batch or epoch and each idle trigger (DEBUG). Over Spark Connect,
    PySpark's listener (4.3) keeps the program from exiting until it calls ``spark.stop()``.

    Parameters
    ----------
    spark
        A session, classic or Spark Connect.
    """
    check_session(spark)
    with _lock:
        session = session_id(spark)
        if session not in _logged_sessions:
            spark.streams.addListener(ProgressLog())
            _logged_sessions.add(session)


class ProgressLog(StreamingQueryListener):
    """Listener that logs each event. Spark waits for it, so it raises no errors."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        with suppress(Exception):
            self._names[str(event.runId)] = event.name
            log.info(
                "query %s has started",
                event.name or event.id,
                extra={"action": "started", **_ids(event, event.name)},
            )

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        with suppress(Exception):
            progress = event.progress
            log.debug(
                "query %s: batch %d had %s rows",
                progress.name or progress.id,
                progress.batchId,
                progress.numInputRows,
                extra={
                    "action": "progress",
                    **_ids(progress, progress.name),
                    "batch": progress.batchId,
                    "rows": progress.numInputRows,
                    "rows_out": _none_if_unknown(progress.sink.numOutputRows),
                    "rows_per_second": progress.processedRowsPerSecond,
                    "duration_ms": dict(progress.durationMs),
                    "watermark": progress.eventTime.get("watermark"),
                    "rows_late": _total(progress, "numRowsDroppedByWatermark"),
                    "state_rows": _total(progress, "numRowsTotal"),
                    "state_bytes": _total(progress, "memoryUsedBytes"),
                },
            )

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        with suppress(Exception):
            name = self._names.get(str(event.runId))
            log.debug(
                "query %s has nothing to do",
                name or event.id,
                extra={"action": "idle", **_ids(event, name)},
            )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with suppress(Exception):
            name = self._names.pop(str(event.runId), None)
            reason, condition = _first_line(event.exception), event.errorClassOnException
            log.log(
                logging.INFO if reason is None else logging.ERROR,
                "query %s has ended: %s",
                name or event.id,
                reason or "it was stopped or finished",
                extra={
                    "action": "terminated",
                    **_ids(event, name),
                    "error": condition if reason is None else condition or "UNKNOWN",
                },
            )


def _ids(event: _Event, name: str | None) -> dict[str, str | None]:
    return {"query": name, "query_id": str(event.id), "run_id": str(event.runId)}


def _none_if_unknown(rows: int | None) -> int | None:
    """Replace -1, which Spark reports if a sink does not count rows, with None."""
    return None if rows is None or rows < 0 else rows


def _total(progress: StreamingQueryProgress, metric: str) -> int | None:
    values = [int(getattr(operator, metric)) for operator in progress.stateOperators]
    return sum(values) if values else None


def _first_line(exception: str | None) -> str | None:
    """Return the first line of an exception's message, without passwords."""
    if exception is None:
        return None
    return sentence(exception.strip().partition("\n")[0], _MAX_CHARACTERS)
