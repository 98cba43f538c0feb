"""One streaming listener of a session, for the queries that Spark runs: it leaves a note with a publisher, and that is all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession

from penstock.instants import now_micros
from penstock.pipeline.monitoring.progress_format import error_of, text_of
from penstock.pipeline.monitoring.publisher import Publisher
from penstock.spark.internals.listeners import add_listener as hear
from penstock.store.records.queries import MICRO_BATCH, QueryRun

log = logging.getLogger("penstock.pipeline")


class SessionListener:
    """What is heard of a session's queries, and which publisher wants it."""

    def __init__(self) -> None:
        self.listens = False
        """Whether Spark tells it anything."""
        self._guard = threading.Condition()
        self._runs: dict[str, Publisher | None] = {}
        """By run; None for those that nobody is told of from here."""
        self._starting = 0
        self._parked: list[Callable[[], None]] = []
        self._others: Publisher | None = None
        self._spark_ui: str | None = None

    def publish_others(self, publisher: Publisher, spark_ui: str | None) -> None:
        """From now on that publisher is told of the queries that are nobody else's."""
        with self._guard:
            self._others, self._spark_ui = publisher, spark_ui

    @property
    def others(self) -> Publisher | None:
        """Who is told of queries that are nobody else's."""
        return self._others

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While a pipeline starts a query, what is heard of unknown ones waits until it is known whose they are."""
        with self._guard:
            self._starting += 1
        try:
            yield
        finally:
            with self._guard:
                self._starting -= 1
                parked, self._parked = (self._parked, []) if not self._starting else ([], self._parked)
            for each in parked:
                each()

    def claim(self, run_id: str, publisher: Publisher | None) -> None:
        """A run is told of to that publisher, or is not told of from here."""
        with self._guard:
            if self.listens:
                self._runs[run_id] = publisher

    def forget(self, run_id: str) -> None:
        """A run has ended."""
        with self._guard:
            self._runs.pop(run_id, None)
            self._guard.notify_all()

    def await_end(self, run_id: str, timeout: float) -> bool:
        """Wait until the end of a run was heard."""
        with self._guard:
            return self._guard.wait_for(lambda: run_id not in self._runs, timeout)

    # What Spark calls, from threads of its own.

    def started(self, query_id: str, run_id: str, name: str | None) -> None:
        """A query has started."""
        if self._parks(run_id, lambda: self.started(query_id, run_id, name)):
            return
        with self._guard:
            publisher, known = self._others, run_id in self._runs
            if known or publisher is None:
                return
            self._runs[run_id] = publisher
        called = text_of(name, publisher.secrets)
        run = QueryRun(query_id, run_id, called, MICRO_BATCH, now_micros(), spark_ui=self._spark_ui)
        publisher.begin(run)

    def progressed(self, told: Mapping[str, Any]) -> None:
        """A query has come further."""
        run_id = str(told["runId"])
        if not self._parks(run_id, lambda: self.progressed(told)):
            publisher = self._runs.get(run_id)
            if publisher is not None:
                publisher.progressed(run_id, told)

    def terminated(self, run_id: str, exception: str | None, condition: str | None) -> None:
        """A query has ended."""
        if self._parks(run_id, lambda: self.terminated(run_id, exception, condition)):
            return
        publisher = self._runs.get(run_id)
        if publisher is not None:
            error = None
            if exception is not None:
                error = error_of(RuntimeError(exception), publisher.secrets, condition)
            publisher.end(run_id, error)
        self.forget(run_id)

    def _parks(self, run_id: str, later: Callable[[], None]) -> bool:
        with self._guard:
            if self._starting and run_id not in self._runs:
                self._parked.append(later)
                return True
        return False


_hearings: WeakKeyDictionary[SparkSession, SessionListener] = WeakKeyDictionary()
_guard = threading.Lock()


def session_listener(spark: SparkSession, *, listen: bool = True) -> SessionListener:
    """What is heard of the queries of a session; it listens from the first call on that asks it to.

    Parameters
    ----------
    listen
        False where queries are told of that Spark does not run: they need no listener.
    """
    with _guard:
        found = _hearings.get(spark)
        if found is None:
            found = _hearings[spark] = SessionListener()
        if listen and not found.listens:
            hear(spark, found)
            found.listens = True
        return found
