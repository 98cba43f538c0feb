"""Dispatch of a query's events to listeners, in a thread of its own, so that no listener delays an epoch."""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pyspark.errors import PySparkException

from penstock.errors import PenstockError, condition_of

log = logging.getLogger("penstock.continuous")

MOST_WAITING = 100
"""Epochs that wait for dispatch; beyond that the oldest one is dropped."""


class Listeners(Protocol):
    """Spark's listeners; each call returns when they have handled the event, or raises."""

    def started(self, name: str | None, timestamp: str) -> None: ...

    def progressed(self, progress: str) -> None: ...

    def terminated(self, exception: str | None, condition: str | None) -> None: ...


class QueryMonitor(Protocol):
    """Reports for the monitor page, made at once; only ``terminated`` waits."""

    def started(self) -> None: ...

    def progressed(self, progress: Mapping[str, Any]) -> None: ...

    def terminated(self, error: Exception | None, timeout: float) -> None: ...


class ListenerDispatch:
    """Dispatcher of one query's events, in order.

    Parameters
    ----------
    called
        What log records call the query.
    listeners
        None without any.
    original
        Returns the error to report for the one that ended the query.
    monitor
        Gets the events besides the listeners; it must not fail.
    """

    def __init__(
        self,
        called: str,
        listeners: Listeners | None,
        original: Callable[[Exception], Exception] = lambda error: error,
        monitor: QueryMonitor | None = None,
    ) -> None:
        self._called, self._listeners = called, listeners
        self._original, self._monitor = original, monitor
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque(maxlen=MOST_WAITING)
        self._last: Callable[[], None] | None = None
        self._warned = False
        self._thread: threading.Thread | None = None

    def started(self, name: str | None, timestamp: str) -> None:
        """Dispatch that the query starts, before any other event."""
        if self._monitor is not None:
            self._monitor.started()
        listeners = self._listeners
        if listeners is not None:
            self._thread = threading.Thread(
                target=self._run,
                args=[lambda: listeners.started(name, timestamp)],
                name="continuous listeners",
                daemon=True,
            )
            self._thread.start()

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Dispatch that an epoch is committed."""
        if self._monitor is not None:
            self._monitor.progressed(progress)
        listeners = self._listeners
        if listeners is not None:
            with self._changed:
                self._waiting.append(lambda: listeners.progressed(json.dumps(progress)))
                self._changed.notify_all()

    def terminated(self, error: Exception | None, timeout: float) -> None:
        """Dispatch that the query has ended, with an error or without.

        Wait up to ``timeout`` seconds for all events.
        """
        listeners, thread = self._listeners, self._thread
        if listeners is not None:
            with self._changed:
                self._last = lambda: listeners.terminated(*self._ending(error))
                self._changed.notify_all()
        if self._monitor is not None:
            self._monitor.terminated(error, timeout)
        if thread is not None:
            thread.join(timeout)

    def _ending(self, error: Exception | None) -> tuple[str | None, str | None]:
        """Return what ended the query, and its condition."""
        if error is None:
            return None, None
        error = self._original(error)
        condition = error.getCondition() if isinstance(error, PySparkException) else None
        if isinstance(error, PenstockError):
            condition = error.condition
        return f"{type(error).__module__}.{type(error).__qualname__}: {error}", condition

    def _run(self, first: Callable[[], None]) -> None:
        self._dispatch(first)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._last)
                if not self._waiting:
                    break
                event = self._waiting.popleft()
            self._dispatch(event)
        assert self._last is not None
        self._dispatch(self._last)

    def _dispatch(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "query %s: its listeners have missed events: %s",
                    self._called,
                    error,
                    extra={"action": "listeners_failed", "query": self._called, "error": condition_of(error)},
                )
