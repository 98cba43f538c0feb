"""Queries that report to a store for the monitor page: pipelines, and all others after ``penstock.monitor``.

A session's streaming listener passes events of the queries that Spark runs on to a publisher.
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
from penstock.pipeline.publisher import LedgerName, Publisher, in_no_ledger, publisher_of
from penstock.queue.store import connect
from penstock.redaction import shown
from penstock.spark.checkpoint import redact_location
from penstock.spark.connectors import OwnedConsumer, Sink, Source
from penstock.spark.internals.listeners import add_listener
from penstock.spark.internals.sessions import check_session, context_of, is_classic
from penstock.spark.session import URL_SETTING, default_url
from penstock.store.records.queries import CONTINUOUS, MICRO_BATCH, QueryRun
from penstock.store.url import parse_url

log = logging.getLogger("penstock.pipeline")

_ENDING_SECONDS = 2.0

OnEnd = Callable[[Exception | None], None]
"""Called with the error, or None, once the end of a query is known."""


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
            f"no store is named: give url, or set {URL_SETTING} on the session",
            condition="INVALID_OPTION.MISSING",
            option="url",
        )
    connect(store_url, create=False).close()
    session_listener(spark).publish_others(publisher_of(store_url), _spark_ui(spark))


@dataclass(frozen=True)
class MonitorTarget:
    """The store that a pipeline's query reports to, and what is known about the query before it starts."""

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
    """Return where a pipeline's query reports to, or None.

    That is the store of its sink, or else of its source, or else the store of ``penstock.monitor``. Over
    Spark Connect it is None before ``penstock.monitor``.
    """
    listener = session_listener(spark, listen=False)
    if not (is_classic(spark) or listener.listens):
        return None
    sink_url = sink.store_url(spark)
    urls = [sink_url, source.store_url(spark), *(owned.url for owned in consumers)]
    url = next((url for url in urls if url is not None and _is_store(url)), None)
    publisher = listener.others if url is None else publisher_of(url)
    if publisher is None:
        return None
    # A transformation may read further queues.
    sources = dict.fromkeys([source.description, *(f"queue {owned.queue!r}" for owned in consumers)])
    ledger_name = sink.ledger_name if url is not None and url == sink_url else in_no_ledger
    described = ", ".join(filter(None, sources)) or None
    return MonitorTarget(spark, publisher, described, sink.description, ledger_name)


@dataclass(frozen=True)
class ContinuousMonitor:
    """Reports of a continuous query."""

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
        """Report that the query has ended, and wait until the report is written."""
        publisher = self.target.publisher
        publisher.end(self.run_id, None if error is None else error_of(error, publisher.secrets))
        publisher.settle(self.run_id, timeout)


def start_monitored(
    spark: SparkSession, target: MonitorTarget | None, start: Callable[[], StreamingQuery], checkpoint: str
) -> tuple[StreamingQuery, OnEnd]:
    """Start a query that Spark runs and report it; return it with the function to call when it ends."""
    try:
        listener = session_listener(spark, listen=target is not None)
    except Exception as error:
        _warn(error)
        return start(), _ignore
    with listener.starting():
        query = start()
        try:
            run_id = str(query.runId)
            listener.claim(run_id, None if target is None else target.publisher)
            if target is not None:
                target.begin(str(query.id), run_id, query.name, MICRO_BATCH, checkpoint)
        except Exception as error:
            _warn(error)
            return query, _ignore
    return query, _ignore if target is None else partial(_end, listener, target.publisher, query, run_id)


def _end(
    listener: SessionListener,
    publisher: Publisher,
    query: StreamingQuery,
    run_id: str,
    error: Exception | None,
) -> None:
    """Wait until the end is written; another thread reports the last progress and the end."""
    if not listener.await_end(run_id, _ENDING_SECONDS):
        error = error or _exception(query)
        publisher.end(run_id, None if error is None else error_of(error, publisher.secrets))
        listener.forget(run_id)
    publisher.settle(run_id, _ENDING_SECONDS)


def _exception(query: StreamingQuery) -> Exception | None:
    try:
        return query.exception()
    except Exception as error:
        return error


def _ignore(_error: Exception | None) -> None:
    pass


def _warn(error: Exception) -> None:
    log.warning(
        "the query does not report to the monitor page: %s",
        shown(error),
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
    """Listener for a session's queries, with the publisher of each."""

    def __init__(self) -> None:
        self.listens = False
        """Whether it is registered with Spark."""
        self._guard = threading.Condition()
        self._runs: dict[str, Publisher | None] = {}
        """The publishers by run; None for runs that are not reported."""
        self._starting = 0
        self._parked: list[Callable[[], None]] = []
        self.others: Publisher | None = None
        """The publisher for queries that are not a pipeline's."""
        self._spark_ui: str | None = None

    def publish_others(self, publisher: Publisher, spark_ui: str | None) -> None:
        """Report all queries that are not a pipeline's to this publisher from now on."""
        with self._guard:
            self.others, self._spark_ui = publisher, spark_ui

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Hold events of unknown queries while a pipeline starts one, until it has claimed its query."""
        with self._guard:
            self._starting += 1
        try:
            yield
        finally:
            with self._guard:
                self._starting -= 1
                parked, self._parked = (self._parked, []) if not self._starting else ([], self._parked)
            for event in parked:
                event()

    def claim(self, run_id: str, publisher: Publisher | None) -> None:
        """Report a run to a publisher, or do not report it."""
        with self._guard:
            if self.listens:
                self._runs[run_id] = publisher

    def forget(self, run_id: str) -> None:
        with self._guard:
            self._runs.pop(run_id, None)
            self._guard.notify_all()

    def await_end(self, run_id: str, timeout: float) -> bool:
        """Wait until the end of a run is reported; return whether that happened in time."""
        with self._guard:
            return self._guard.wait_for(lambda: run_id not in self._runs, timeout)

    # Called by Spark, from its own threads.

    def started(self, query_id: str, run_id: str, name: str | None) -> None:
        if self._holds_back(run_id, lambda: self.started(query_id, run_id, name)):
            return
        with self._guard:
            publisher, known = self.others, run_id in self._runs
            if known or publisher is None:
                return
            self._runs[run_id] = publisher
        called = text_of(name, publisher.secrets)
        run = QueryRun(query_id, run_id, called, MICRO_BATCH, now_micros(), spark_ui=self._spark_ui)
        publisher.begin(run)

    def progressed(self, progress: Json) -> None:
        run_id = str(progress["runId"])
        if not self._holds_back(run_id, lambda: self.progressed(progress)):
            publisher = self._runs.get(run_id)
            if publisher is not None:
                publisher.progressed(run_id, progress)

    def terminated(self, run_id: str, exception: str | None, condition: str | None) -> None:
        if self._holds_back(run_id, lambda: self.terminated(run_id, exception, condition)):
            return
        publisher = self._runs.get(run_id)
        if publisher is not None:
            error = None
            if exception is not None:
                error = error_of(RuntimeError(exception), publisher.secrets, condition)
            publisher.end(run_id, error)
        self.forget(run_id)

    def _holds_back(self, run_id: str, later: Callable[[], None]) -> bool:
        with self._guard:
            if self._starting and run_id not in self._runs:
                self._parked.append(later)
                return True
        return False


_listeners: WeakKeyDictionary[SparkSession, SessionListener] = WeakKeyDictionary()
_guard = threading.Lock()


def session_listener(spark: SparkSession, *, listen: bool = True) -> SessionListener:
    """Return the listener of a session; the first call with ``listen`` registers it with Spark.

    Queries that Spark does not run need no registration.
    """
    with _guard:
        listener = _listeners.get(spark)
        if listener is None:
            listener = _listeners[spark] = SessionListener()
        if listen and not listener.listens:
            add_listener(spark, listener)
            listener.listens = True
        return listener
