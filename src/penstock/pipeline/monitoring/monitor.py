"""Queries that report to a store for the monitor page: pipelines, and all others after ``ps.publish``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from penstock.arguments import require
from penstock.errors import InvalidOption, PenstockError, condition_of
from penstock.instants import now_micros
from penstock.pipeline.monitoring.listener import SessionListener, session_listener
from penstock.pipeline.monitoring.progress_format import error_of, text_of
from penstock.pipeline.monitoring.publisher import LedgerName, Publisher, in_no_ledger, publisher_of
from penstock.queue.store import connect
from penstock.spark.checkpoint import redact_location
from penstock.spark.connectors import OwnedConsumer, Sink, Source
from penstock.spark.internals.sessions import check_session, is_classic
from penstock.spark.session_store import URL_SETTING, default_url
from penstock.store.records.queries import CONTINUOUS, MICRO_BATCH, QueryRun
from penstock.store.url import parse_url

log = logging.getLogger("penstock.pipeline")

_ENDING_SECONDS = 2.0

OnEnd = Callable[[Exception | None], None]
"""Called with the error, or None, once the end of a query is known."""


def publish(spark: SparkSession, *, url: str | None = None) -> None:
    """Report the session's streaming queries to a store, for the page of ``penstock ui``.

    Queries of :func:`penstock.stream` report to the store of their sink or source on their own. This is for
    all others that start from now on, for pipelines that have no store, and for all of Spark Connect: there a
    listener of PySpark's (4.3) keeps a program from ending until it calls ``spark.stop()``, so that nothing
    listens before it is asked to.

    Parameters
    ----------
    spark
        The session, classic or Spark Connect.
    url
        The store, which has to exist; the session's ``spark.penstock.url`` when None.

    Raises
    ------
    InvalidOption
        When no store is named.
    InvalidUrl, StoreNotFound, StoreUnavailable, MissingDependency
    """
    check_session(spark)
    require("url", url, str | None, "the URL of a store, such as 'sqlite:///shop.db'")
    store_url = url or default_url(spark)
    if store_url is None:
        raise InvalidOption(f"no store is named: give url, or set {URL_SETTING} on the session", option="url")
    connect(store_url, create=False).close()
    session_listener(spark).publish_others(publisher_of(store_url), _spark_ui(spark))


@dataclass(frozen=True)
class MonitorTarget:
    """Where a pipeline's query reports to, and what is known of the query before it starts."""

    spark: SparkSession
    publisher: Publisher
    source: str | None
    sink: str | None
    ledger_name: LedgerName

    def begin(
        self, query_id: str, run_id: str, name: str | None, engine: str, checkpoint: str | None
    ) -> None:
        """Report that a query has begun."""
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
    """Return where a pipeline's query reports to; None for nowhere.

    That is the store of its sink, else of its source, else that of ``ps.publish``. Over Spark Connect it is
    None before ``ps.publish``.

    Parameters
    ----------
    consumers
        The consumers that the query owns.
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
    queues = ", ".join(dict.fromkeys(f"queue {owned.queue!r}" for owned in consumers))
    ledger_name = sink.ledger_name if url is not None and url == sink_url else in_no_ledger
    return MonitorTarget(
        spark, publisher, source.description or queues or None, sink.description, ledger_name
    )


class ContinuousMonitor:
    """Reports of a continuous query."""

    def __init__(
        self, target: MonitorTarget, query_id: str, run_id: str, name: str | None, checkpoint: str | None
    ) -> None:
        self._target, self._run_id = target, run_id
        self._about = (query_id, run_id, name, CONTINUOUS, checkpoint)

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        target: MonitorTarget | None,
        query_id: str,
        run_id: str,
        name: str | None,
        checkpoint: str | None,
    ) -> ContinuousMonitor | None:
        """Return the reports of a query; None when it reports nowhere."""
        # The session's listener gets its events as well.
        session_listener(spark, listen=False).claim(run_id, None)
        return None if target is None else cls(target, query_id, run_id, name, checkpoint)

    def started(self) -> None:
        """Report that the query begins."""
        self._target.begin(*self._about)

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Report that an epoch is committed."""
        self._target.publisher.progressed(self._run_id, progress)

    def terminated(self, error: Exception | None, timeout: float) -> None:
        """Report that the query has ended, and wait until the report is written."""
        publisher = self._target.publisher
        publisher.end(self._run_id, None if error is None else error_of(error, publisher.secrets))
        publisher.settle(self._run_id, timeout)


def start_monitored(
    spark: SparkSession, target: MonitorTarget | None, start: Callable[[], Any], checkpoint: str
) -> tuple[Any, OnEnd]:
    """Start a query that Spark runs, and report it.

    Returns
    -------
    tuple
        Spark's query, and the function to call at its end.
    """
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
    listener: SessionListener, publisher: Publisher, query: Any, run_id: str, error: Exception | None
) -> None:
    """Wait until the end is written; the last progress, and the end, come by another thread."""
    if not listener.await_end(run_id, _ENDING_SECONDS):
        error = error or _exception(query)
        publisher.end(run_id, None if error is None else error_of(error, publisher.secrets))
        listener.forget(run_id)
    publisher.settle(run_id, _ENDING_SECONDS)


def _exception(query: Any) -> Exception | None:
    try:
        exception: Exception | None = query.exception()
    except Exception as error:
        return error
    return exception


def _ignore(_error: Exception | None) -> None:
    pass


def _warn(error: Exception) -> None:
    log.warning(
        "the query does not report to the monitor page: %s",
        error,
        extra={"action": "publish_failed", "error": condition_of(error)},
    )


def _spark_ui(spark: SparkSession) -> str | None:
    context = getattr(spark, "_sc", None)
    return None if context is None else context.uiWebUrl


def _is_store(url: str) -> bool:
    try:
        parse_url(url)
    except PenstockError:
        return False
    return True
