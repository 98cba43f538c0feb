"""What listeners are told of a query, from a thread of its own: a slow or broken one holds up no epoch."""

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
"""Epochs that wait to be told; when there are more, the oldest one is not told."""


class Listeners(Protocol):
    """Who is told; each call returns when they have heard it, or raises."""

    def started(self, name: str | None, timestamp: str) -> None: ...

    def progressed(self, progress: str) -> None: ...

    def terminated(self, exception: str | None, condition: str | None) -> None: ...


class QueryMonitor(Protocol):
    """What is told besides, at once and without waiting but for the end."""

    def started(self) -> None: ...

    def progressed(self, told: Mapping[str, Any]) -> None: ...

    def terminated(self, error: Exception | None, timeout: float) -> None: ...


class ListenerDispatch:
    """Events of one query, in their order.

    Parameters
    ----------
    called
        How the log calls the query.
    listeners
        None when nobody is to be told.
    plain
        Finds the error that is told in the one that ended the query.
    published
        Who is told besides the listeners; it must not fail.
    """

    def __init__(
        self,
        called: str,
        listeners: Listeners | None,
        plain: Callable[[Exception], Exception] = lambda error: error,
        published: QueryMonitor | None = None,
    ) -> None:
        self._published = published
        self._called, self._listeners, self._plain = called, listeners, plain
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque(maxlen=MOST_WAITING)
        self._last: Callable[[], None] | None = None
        self._warned = False
        self._thread: threading.Thread | None = None

    def started(self, name: str | None, timestamp: str) -> None:
        """The query begins; nobody is told of what comes before."""
        if self._published is not None:
            self._published.started()
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
        """An epoch is committed."""
        if self._published is not None:
            self._published.progressed(progress)
        listeners = self._listeners
        if listeners is not None:
            with self._changed:
                self._waiting.append(lambda: listeners.progressed(json.dumps(progress)))
                self._changed.notify_all()

    def terminated(self, error: Exception | None, timeout: float) -> None:
        """The query has ended, with an error or without; wait ``timeout`` seconds at the most until everything is told."""
        listeners, thread = self._listeners, self._thread
        if listeners is not None:
            with self._changed:
                self._last = lambda: listeners.terminated(*self._end(error))
                self._changed.notify_all()
        if self._published is not None:
            self._published.terminated(error, timeout)
        if thread is not None:
            thread.join(timeout)

    def _end(self, error: Exception | None) -> tuple[str | None, str | None]:
        """What ended the query, and its condition."""
        if error is None:
            return None, None
        found = self._plain(error)
        condition = found.getCondition() if isinstance(found, PySparkException) else None
        if isinstance(found, PenstockError):
            condition = found.condition
        return f"{type(found).__module__}.{type(found).__qualname__}: {found}", condition

    def _run(self, first: Callable[[], None]) -> None:
        self._tell(first)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._last)
                if not self._waiting:
                    break
                event = self._waiting.popleft()
            self._tell(event)
        assert self._last is not None
        self._tell(self._last)

    def _tell(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "query %s: its listeners are not told of everything: %s",
                    self._called,
                    error,
                    extra={"action": "listeners_failed", "query": self._called, "error": condition_of(error)},
                )
