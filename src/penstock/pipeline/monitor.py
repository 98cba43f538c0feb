"""Reports of queries to a store, for the monitor page: pipelines, and all queries after ``penstock.monitor``.

A session's streaming listener passes the events of Spark's queries to a publisher.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.arguments import require
from penstock.errors import InvalidOptionError, PenstockError, condition_of
from penstock.instants import now_micros
from penstock.json_text import Json
from penstock.pipeline.progress_format import error_of, text_of
from penstock.pipeline.publisher import LedgerName, Publisher, publisher_of, without_ledger_name
from penstock.queue.store import connect
from penstock.redaction import redacted_message
from penstock.spark.checkpoint import redact_location
from penstock.spark.connectors import OwnedConsumer, Sink, Source
from penstock.spark.internals.listeners import add_listener
from penstock.spark.internals.sessions import check_session, context_of, is_classic
from penstock.spark.session import URL_SETTING, default_url
from penstock.store.records.queries import CONTINUOUS, MICRO_BATCH, QueryRun
from penstock.store.url import parse_url

log = logging.getLogger("penstock.pipeline")

_END_SECONDS = 2.0

OnEnd = Callable[[Exception | None], None]
"""Called with the error, or None, when a query has ended."""


def monitor(spark: SparkSession, *, url: str | None = None) -> None:
    """Report the session's streaming queries to a store, for the page of ``penstock ui``.

    Queries of :func:`penstock.stream` report to the store of their sink or source automatically. Call this
    for all other queries that start from now on, and for pipelines without a store. Over Spark Connect, no
    query reports until you call it, since PySpark's listener (4.3) keeps a program running until
    ``spark.stop()``.

    Parameters
    ----------
    spark
        The session, classic or Spark Connect.
    url
        The store, which must exist; the session's ``spark.penstock.url`` when None.

    Raises
    ------
    InvalidOptionError
        When no store is named.
    InvalidUrlError, StoreNotFoundError, StoreUnavailableError, MissingDependencyError
    """
    check_session(spark)
    require("url", url, str | None, "the URL of a store, such as 'sqlite:///shop.db'")
    store_url = url or default_url(spark)
    if store_url is None:
        raise InvalidOptionError(
            f"no store is named: pass url, or set {URL_SETTING} on the session",
            condition="INVALID_OPTION.MISSING",
            option="url",
        )
    connect(store_url, create=False).close()
    session_listener(spark).set_default_publisher(publisher_of(store_url), _spark_ui(spark))


@dataclass(frozen=True)
class MonitorTarget:
    """Where a pipeline's query reports to, and what is known about the query before it starts."""

    spark: SparkSession
    publisher: Publisher
    source: str | None
    sink: str | None
    ledger_name: LedgerName

    def begin(
        self, query_id: str, run_id: str, name: str | None, engine: str, checkpoint: str | None
    ) -> None:
        secrets = self.publisher.secrets
        run = QueryRun(
            query_id,
            run_id,
            text_of(name, secrets),
            engine,
            now_micros(),
            text_of(self.source, secrets),
            text_of(self.sink, secrets),
            text_of(None if checkpoint is None else redact_location(checkpoint), secrets),
            _spark_ui(self.spark),
        )
        self.publisher.begin(run, self.ledger_name)


def monitor_target(
    spark: SparkSession, source: Source, sink: Sink, consumers: Sequence[OwnedConsumer] = ()
) -> MonitorTarget | None:
    """Return where a pipeline's query reports to; None if nowhere.

    It is the store of the sink, or else of the source, or else the store of ``penstock.monitor``. Over Spark
    Connect, queries report only after ``penstock.monitor``.
    """
    listener = session_listener(spark, listen=False)
    if not (is_classic(spark) or listener.is_registered):
        return None
    sink_url = sink.store_url(spark)
    urls = [sink_url, source.store_url(spark), *(owned.url for owned in consumers)]
    url = next((url for url in urls if url is not None and _is_store(url)), None)
    publisher = listener.default_publisher if url is None else publisher_of(url)
    if publisher is None:
        return None
    # Transforms may read further queues.
    sources = dict.fromkeys([source.description, *(f"queue {owned.queue!r}" for owned in consumers)])
    ledger_name = sink.ledger_name if url is not None and url == sink_url else without_ledger_name
    source_description = ", ".join(filter(None, sources)) or None
    return MonitorTarget(spark, publisher, source_description, sink.description, ledger_name)


@dataclass(frozen=True)
class ContinuousMonitor:
    """Reporter of a continuous query."""

    target: MonitorTarget
    query_id: str
    run_id: str
    name: str | None
    checkpoint: str | None

    def started(self) -> None:
        self.target.begin(self.query_id, self.run_id, self.name, CONTINUOUS, self.checkpoint)

    def progressed(self, progress: Json) -> None:
        self.target.publisher.progressed(self.run_id, progress)

    def terminated(self, error: Exception | None, timeout: float) -> None:
        """Report the end of the query, and wait until it is written."""
        publisher = self.target.publisher
        publisher.end(self.run_id, None if error is None else error_of(error, publisher.secrets))
        publisher.await_end(self.run_id, timeout)


def start_monitored(
    spark: SparkSession, target: MonitorTarget | None, start: Callable[[], StreamingQuery], checkpoint: str
) -> tuple[StreamingQuery, OnEnd]:
    """Start a Spark query and report it; return it with the function to call when it ends."""
    try:
        listener = session_listener(spark, listen=target is not None)
    except Exception as error:
        _log_failure(error)
        return start(), _ignore
    with listener.starting():
        query = start()
        try:
            run_id = str(query.runId)
            listener.claim(run_id, None if target is None else target.publisher)
            if target is not None:
                target.begin(str(query.id), run_id, query.name, MICRO_BATCH, checkpoint)
        except Exception as error:
            _log_failure(error)
            return query, _ignore
    return query, _ignore if target is None else partial(
        _await_end, listener, target.publisher, query, run_id
    )


def _await_end(
    listener: SessionListener,
    publisher: Publisher,
    query: StreamingQuery,
    run_id: str,
    error: Exception | None,
) -> None:
    """Wait until a query's end is written; if the listener is late, report the end here."""
    if not listener.await_end(run_id, _END_SECONDS):
        error = error or _error_of_query(query)
        publisher.end(run_id, None if error is None else error_of(error, publisher.secrets))
        listener.forget(run_id)
    publisher.await_end(run_id, _END_SECONDS)


def _error_of_query(query: StreamingQuery) -> Exception | None:
    try:
        return query.exception()
    except Exception as error:
        return error


def _ignore(_error: Exception | None) -> None:
    pass


def _log_failure(error: Exception) -> None:
    log.warning(
        "the query does not report to the monitor page: %s",
        redacted_message(error),
        extra={"action": "monitor_failed", "error": condition_of(error)},
    )


def _spark_ui(spark: SparkSession) -> str | None:
    context = context_of(spark)
    return None if context is None else context.uiWebUrl


def _is_store(url: str) -> bool:
    try:
        parse_url(url)
    except PenstockError:
        return False
    return True


class SessionListener:
    """Listener for the queries of a session; it knows the publisher of each query."""

    def __init__(self) -> None:
        self.is_registered = False
        """Whether the listener is registered with Spark."""
        self._changed = threading.Condition()
        self._runs: dict[str, Publisher | None] = {}
        """The publisher of each run; None if the run is not reported."""
        self._starting_queries = 0
        self._held_events: list[Callable[[], None]] = []
        self.default_publisher: Publisher | None = None
        """The publisher of queries that are not started by pipelines."""
        self._spark_ui: str | None = None

    def set_default_publisher(self, publisher: Publisher, spark_ui: str | None) -> None:
        """Report queries that are not started by pipelines to this publisher from now on."""
        with self._changed:
            self.default_publisher, self._spark_ui = publisher, spark_ui

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Hold back events of unknown queries while a pipeline starts and claims its query."""
        with self._changed:
            self._starting_queries += 1
        try:
            yield
        finally:
            with self._changed:
                self._starting_queries -= 1
                held_events, self._held_events = (
                    (self._held_events, []) if not self._starting_queries else ([], self._held_events)
                )
            for event in held_events:
                event()

    def claim(self, run_id: str, publisher: Publisher | None) -> None:
        """Set the publisher of a run; None if the run is not reported."""
        with self._changed:
            if self.is_registered:
                self._runs[run_id] = publisher

    def forget(self, run_id: str) -> None:
        with self._changed:
            self._runs.pop(run_id, None)
            self._changed.notify_all()

    def await_end(self, run_id: str, timeout: float) -> bool:
        """Wait until the end of a run is reported; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: run_id not in self._runs, timeout)

    # Called by Spark in its own threads.

    def started(self, query_id: str, run_id: str, name: str | None) -> None:
        if self._hold_event(run_id, lambda: self.started(query_id, run_id, name)):
            return
        with self._changed:
            publisher, is_known = self.default_publisher, run_id in self._runs
            if is_known or publisher is None:
                return
            self._runs[run_id] = publisher
        query_name = text_of(name, publisher.secrets)
        run = QueryRun(query_id, run_id, query_name, MICRO_BATCH, now_micros(), spark_ui=self._spark_ui)
        publisher.begin(run)

    def progressed(self, progress: Json) -> None:
        run_id = str(progress["runId"])
        if not self._hold_event(run_id, lambda: self.progressed(progress)):
            publisher = self._runs.get(run_id)
            if publisher is not None:
                publisher.progressed(run_id, progress)

    def terminated(self, run_id: str, exception: str | None, condition: str | None) -> None:
        if self._hold_event(run_id, lambda: self.terminated(run_id, exception, condition)):
            return
        publisher = self._runs.get(run_id)
        if publisher is not None:
            error = None
            if exception is not None:
                error = error_of(RuntimeError(exception), publisher.secrets, condition)
            publisher.end(run_id, error)
        self.forget(run_id)

    def _hold_event(self, run_id: str, event: Callable[[], None]) -> bool:
        with self._changed:
            if self._starting_queries and run_id not in self._runs:
                self._held_events.append(event)
                return True
        return False


_listeners: WeakKeyDictionary[SparkSession, SessionListener] = WeakKeyDictionary()
_listeners_lock = threading.Lock()


def session_listener(spark: SparkSession, *, listen: bool = True) -> SessionListener:
    """Return the listener of a session; with ``listen``, register it with Spark if it is not registered yet.

    Continuous queries need no registration.
    """
    with _listeners_lock:
        listener = _listeners.get(spark)
        if listener is None:
            listener = _listeners[spark] = SessionListener()
        if listen and not listener.is_registered:
            add_listener(spark, listener)
            listener.is_registered = True
        return listener
