"""Which queries are told of, and where: pipelines by themselves, others by ``ps.publish``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from penstock.arguments import require
from penstock.commit.micro_batch import sink_name
from penstock.errors import InvalidOption, PenstockError, condition_of
from penstock.feeds.queue_feed import QueueFeed
from penstock.instants import now_micros
from penstock.pipeline.endpoints import ConsoleSink, FunctionSink, QueueSink, QueueSource, RateSource
from penstock.pipeline.monitoring.listener import Hearing, hearing_of
from penstock.pipeline.monitoring.progress_format import error_of, text_of
from penstock.pipeline.monitoring.publisher import LedgerName, Publisher, in_no_ledger, publisher
from penstock.pipeline.offset_sync import QuerySource
from penstock.queue.store import connect
from penstock.spark.checkpoint import redact_location
from penstock.spark.internals.sessions import check_session, is_classic
from penstock.spark.session_store import URL_SETTING, default_url
from penstock.store.database import Transaction
from penstock.store.records.catalog import find_queue
from penstock.store.records.queries import CONTINUOUS, MICRO_BATCH, QueryRun
from penstock.store.url import parse_url
from penstock.tables.names import resolve
from penstock.tables.sink import TableSink

log = logging.getLogger("penstock.pipeline")

_ENDING_SECONDS = 2.0


def publish(spark: SparkSession, *, url: str | None = None) -> None:
    """Tell a store of the session's streaming queries, for the page of ``penstock ui``.

    Queries of :func:`penstock.stream` tell the store of their sink or source by themselves. This is for all others that start from
    now on, for pipelines that have no store, and for all of Spark Connect: there a listener of PySpark's (4.3) keeps a program from
    ending until it calls ``spark.stop()``, so that nothing listens before it is asked to.

    Parameters
    ----------
    spark
        The session, classic or Spark Connect.
    url
        The store, which has to be there; the session's ``spark.penstock.url`` when None.

    Raises
    ------
    InvalidOption
        When no store is named.
    InvalidUrl, StoreNotFound, StoreUnavailable, MissingDependency
    """
    check_session(spark)
    require("url", url, str | None, "the URL of a store, such as 'sqlite:///shop.db'")
    place = url or default_url(spark)
    if place is None:
        raise InvalidOption(f"no store is named: give url, or set {URL_SETTING} on the session", option="url")
    connect(place, create=False).close()
    hearing_of(spark).publish_others(publisher(place), _spark_ui(spark))


@dataclass(frozen=True)
class Place:
    """Where a pipeline's query is told of, and what is known of it before it starts."""

    spark: SparkSession
    publisher: Publisher
    source: str | None
    sink: str | None
    ledger_name: LedgerName

    def begin(
        self, query_id: str, run_id: str, name: str | None, engine: str, checkpoint: str | None
    ) -> None:
        """Tell that a query has begun."""
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


def place_of(spark: SparkSession, source: Any, sink: Any, read: Sequence[QuerySource] = ()) -> Place | None:
    """Where a pipeline's query is told of: the store of its sink, else of its source, else that of ``ps.publish``; or nowhere.

    Over Spark Connect nowhere before ``ps.publish``.

    Parameters
    ----------
    read
        The consumers that the query owns.
    """
    listens = hearing_of(spark, listen=False).listens
    if not (is_classic(spark) or listens):
        return None
    default = default_url(spark)
    found = [_store_of_sink(sink, default), _store_of_source(source, default), *(each.url for each in read)]
    url = next((each for each in found if each is not None and _is_store(each)), None)
    place = hearing_of(spark, listen=False).others if url is None else publisher(url)
    if place is None:
        return None
    told_by_ledger = url is not None and url == found[0]
    called = _source(source) or ", ".join(dict.fromkeys(f"queue {each.queue!r}" for each in read))
    ledger_name = _ledger_name(sink) if told_by_ledger else in_no_ledger
    return Place(spark, place, called or None, _sink(sink), ledger_name)


class ContinuousPublishing:
    """A continuous query, which tells of itself."""

    def __init__(
        self, place: Place, query_id: str, run_id: str, name: str | None, checkpoint: str | None
    ) -> None:
        self._place, self._run_id = place, run_id
        self._about = (query_id, run_id, name, CONTINUOUS, checkpoint)

    def started(self) -> None:
        """The query begins."""
        self._place.begin(*self._about)

    def progressed(self, told: Mapping[str, Any]) -> None:
        """An epoch is committed."""
        self._place.publisher.progressed(self._run_id, told)

    def terminated(self, error: Exception | None, timeout: float) -> None:
        """The query has ended; wait until that is told."""
        publisher = self._place.publisher
        publisher.end(self._run_id, None if error is None else error_of(error, publisher.secrets))
        publisher.settle(self._run_id, timeout)


def continuous(
    spark: SparkSession,
    place: Place | None,
    query_id: str,
    run_id: str,
    name: str | None,
    checkpoint: str | None,
) -> ContinuousPublishing | None:
    """What a continuous query tells of itself; None when it is told of nowhere."""
    # The session's listener hears of it as well.
    hearing_of(spark, listen=False).claim(run_id, None)
    return None if place is None else ContinuousPublishing(place, query_id, run_id, name, checkpoint)


def started(
    spark: SparkSession, place: Place | None, start: Callable[[], Any], checkpoint: str
) -> tuple[Any, Any]:
    """Start a query that Spark runs, and tell of it.

    Returns
    -------
    tuple
        Spark's query, and what is to be called with the error, or None, when its end is known.
    """
    try:
        hearing = hearing_of(spark, listen=place is not None)
    except Exception as error:
        _warn(error)
        return start(), _nothing
    with hearing.starting():
        query = start()
        try:
            run_id = str(query.runId)
            hearing.claim(run_id, None if place is None else place.publisher)
            if place is not None:
                place.begin(str(query.id), run_id, query.name, MICRO_BATCH, checkpoint)
        except Exception as error:
            _warn(error)
            return query, _nothing
    return query, _nothing if place is None else partial(_ended, hearing, place.publisher, query, run_id)


def _ended(hearing: Hearing, there: Publisher, query: Any, run_id: str, error: Exception | None) -> None:
    """Wait until it is told; the last progress, and the end, come by another thread."""
    if not hearing.await_end(run_id, _ENDING_SECONDS):
        found = error or _exception(query)
        there.end(run_id, None if found is None else error_of(found, there.secrets))
        hearing.forget(run_id)
    there.settle(run_id, _ENDING_SECONDS)


def _exception(query: Any) -> Exception | None:
    try:
        found: Exception | None = query.exception()
    except Exception as error:
        return error
    return found


def _nothing(_error: Exception | None) -> None:
    pass


def _warn(error: Exception) -> None:
    log.warning(
        "the query is not told of: %s",
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


def _given_url(end: QueueSource | QueueSink, default: str | None) -> str | None:
    given = {name.lower(): value for name, value in end.given().items()}
    return given.get("url", default)


def _store_of_sink(sink: Any, default: str | None) -> str | None:
    if isinstance(sink, QueueSink):
        return _given_url(sink, default)
    return (sink.url or default) if isinstance(sink, TableSink) else None


def _store_of_source(source: Any, default: str | None) -> str | None:
    if isinstance(source, QueueSource):
        return _given_url(source, default)
    return source.store if isinstance(source, QueueFeed) else None


def _source(source: Any) -> str | None:
    if isinstance(source, QueueSource | QueueFeed):
        return f"queue {source.queue!r}"
    return f"rate of {source.rows_per_second} rows per second" if isinstance(source, RateSource) else None


def _sink(sink: Any) -> str | None:
    if isinstance(sink, QueueSink):
        return f"queue {sink.queue!r}"
    if isinstance(sink, TableSink):
        return f"table {sink.name!r}"
    if isinstance(sink, ConsoleSink):
        return "console"
    return "a function" if isinstance(sink, FunctionSink) else None


def _ledger_name(sink: Any) -> LedgerName:
    """What the ledger of its own store calls a sink."""

    def of_queue(tx: Transaction) -> str:
        return sink_name(find_queue(tx, sink.queue))

    def of_table(tx: Transaction) -> str:
        return resolve(tx, sink.name).ledger_name

    if isinstance(sink, QueueSink):
        return of_queue
    return of_table if isinstance(sink, TableSink) else in_no_ledger
