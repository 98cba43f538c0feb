"""The streaming listener of a session: it passes events of the queries that Spark runs on to a publisher."""

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
from penstock.spark.internals.listeners import add_listener
from penstock.store.records.queries import MICRO_BATCH, QueryRun

log = logging.getLogger("penstock.pipeline")


class SessionListener:
    """Listener for a session's queries, with the publisher of each."""

    def __init__(self) -> None:
        self.listens = False
        """Whether it is registered with Spark."""
        self._guard = threading.Condition()
        self._runs: dict[str, Publisher | None] = {}
        """By run; None for runs that it does not report."""
        self._starting = 0
        self._parked: list[Callable[[], None]] = []
        self._others: Publisher | None = None
        self._spark_ui: str | None = None

    def publish_others(self, publisher: Publisher, spark_ui: str | None) -> None:
        """Report all queries that are not a pipeline's to this publisher from now on."""
        with self._guard:
            self._others, self._spark_ui = publisher, spark_ui

    @property
    def others(self) -> Publisher | None:
        """The publisher for queries that are not a pipeline's."""
        return self._others

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Park events of unknown queries while a pipeline starts one, until it has claimed its own."""
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
        """Drop a run that has ended."""
        with self._guard:
            self._runs.pop(run_id, None)
            self._guard.notify_all()

    def await_end(self, run_id: str, timeout: float) -> bool:
        """Wait until the end of a run was reported; return whether it was in time."""
        with self._guard:
            return self._guard.wait_for(lambda: run_id not in self._runs, timeout)

    # Called by Spark, from threads of its own.

    def started(self, query_id: str, run_id: str, name: str | None) -> None:
        """Handle the start of a query."""
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

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Handle a query's progress."""
        run_id = str(progress["runId"])
        if not self._parks(run_id, lambda: self.progressed(progress)):
            publisher = self._runs.get(run_id)
            if publisher is not None:
                publisher.progressed(run_id, progress)

    def terminated(self, run_id: str, exception: str | None, condition: str | None) -> None:
        """Handle the end of a query."""
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


_listeners: WeakKeyDictionary[SparkSession, SessionListener] = WeakKeyDictionary()
_guard = threading.Lock()


def session_listener(spark: SparkSession, *, listen: bool = True) -> SessionListener:
    """Return the listener of a session; it is registered with Spark by the first call that asks for it.

    Parameters
    ----------
    listen
        False for queries that Spark does not run: they need no registration.
    """
    with _guard:
        listener = _listeners.get(spark)
        if listener is None:
            listener = _listeners[spark] = SessionListener()
        if listen and not listener.listens:
            add_listener(spark, listener)
            listener.listens = True
        return listener
