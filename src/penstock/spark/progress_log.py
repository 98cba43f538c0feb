"""What Spark tells of the streaming queries of a session, in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

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

_MOST_CHARACTERS = 500

_logged: set[str] = set()
"""The sessions that have a listener."""
_turn = threading.Lock()


def log_progress(spark: SparkSession) -> None:
    """Write what happens to the streaming queries of a session to the log ``penstock.progress``; a second call does nothing.

    Any query is meant, Spark's own and Penstock's continuous ones among them: its start and end (INFO; ERROR where it has failed),
    each micro-batch or epoch and each time that it has nothing to do (DEBUG). Over Spark Connect a listener of PySpark's (4.3) keeps the
    program from ending until it calls ``spark.stop()``.

    Parameters
    ----------
    spark
        A session, classic or Spark Connect.
    """
    check_session(spark)
    with _turn:
        session = session_id(spark)
        if session not in _logged:
            spark.streams.addListener(ProgressLog())
            _logged.add(session)


class ProgressLog(StreamingQueryListener):
    """The listener: it is in Spark's way for a moment, and an error of the log never gets there."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """A query starts."""
        with suppress(Exception):
            self._names[str(event.runId)] = event.name
            log.info(
                "query %s has started",
                event.name or event.id,
                extra={
                    "action": "started",
                    "query": event.name,
                    "query_id": str(event.id),
                    "run_id": str(event.runId),
                },
            )

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """A micro-batch, or an epoch, is done."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        with suppress(Exception):
            told = event.progress
            log.debug(
                "query %s: batch %d had %s rows",
                told.name or told.id,
                told.batchId,
                told.numInputRows,
                extra={
                    "action": "progress",
                    "query": told.name,
                    "query_id": str(told.id),
                    "run_id": str(told.runId),
                    "batch": told.batchId,
                    "rows": told.numInputRows,
                    "rows_out": _known(told.sink.numOutputRows),
                    "rows_per_second": told.processedRowsPerSecond,
                    "duration_ms": dict(told.durationMs),
                    "watermark": told.eventTime.get("watermark"),
                    "state_rows": _total(told, "numRowsTotal"),
                    "state_bytes": _total(told, "memoryUsedBytes"),
                },
            )

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """A query has nothing to do."""
        with suppress(Exception):
            name = self._names.get(str(event.runId))
            log.debug(
                "query %s has nothing to do",
                name or event.id,
                extra={
                    "action": "idle",
                    "query": name,
                    "query_id": str(event.id),
                    "run_id": str(event.runId),
                },
            )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """A query has ended."""
        with suppress(Exception):
            name = self._names.pop(str(event.runId), None)
            why = _first_line(event.exception)
            log.log(
                logging.INFO if why is None else logging.ERROR,
                "query %s has ended: %s",
                name or event.id,
                why or "it was stopped, or had all its rows",
                extra={
                    "action": "terminated",
                    "query": name,
                    "query_id": str(event.id),
                    "run_id": str(event.runId),
                    "error": event.errorClassOnException
                    if why is None
                    else event.errorClassOnException or "UNKNOWN",
                },
            )


def _known(rows: int | None) -> int | None:
    """Spark has -1 for what a sink does not tell."""
    return None if rows is None or rows < 0 else rows


def _total(told: StreamingQueryProgress, what: str) -> int | None:
    operators: Iterable[Any] = told.stateOperators
    found = [int(getattr(operator, what)) for operator in operators]
    return sum(found) if found else None


def _first_line(exception: str | None) -> str | None:
    """What ended a query, without plans, stacks and passwords."""
    if exception is None:
        return None
    return sentence(exception.strip().partition("\n")[0], _MOST_CHARACTERS)
