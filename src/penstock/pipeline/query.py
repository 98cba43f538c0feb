"""Triggers, running queries with PySpark's ``StreamingQuery`` interface, and the handler of SIGTERM."""

from __future__ import annotations

import logging
import signal
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.arguments import refusal
from penstock.errors import InvalidOptionError
from penstock.instants import interval_micros
from penstock.json_text import Json

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql.streaming.listener import StreamingQueryProgress

log = logging.getLogger("penstock.pipeline")

STOP_SECONDS = 60.0
_SLICE_SECONDS, _MIN_WAIT_SECONDS = 1.0, 0.001


@dataclass(frozen=True)
class Trigger:
    """When a query runs; create one with the class methods."""

    kind: str
    interval: str | None = None

    @classmethod
    def processing_time(cls, interval: str = "0 seconds") -> Trigger:
        """Run a micro-batch at every interval; by default, each one starts when the previous one has ended.

        Parameters
        ----------
        interval
            The interval, such as ``"10 seconds"``.
        """
        return cls("processing_time", _check_interval(interval, 0, "'10 seconds'"))

    @classmethod
    def available_now(cls) -> Trigger:
        """Process the rows that exist when the query starts, in one or more micro-batches, then end."""
        return cls("available_now")

    @classmethod
    def continuous(cls, interval: str = "1 second") -> Trigger:
        """Run row by row in one long Spark job, with latencies of milliseconds.

        Rows are committed immediately, together with those that arrive meanwhile, but at most once per
        interval. For transformations that work on one row at a time, from a queue or a rate source.

        Parameters
        ----------
        interval
            The minimum time between two commits, such as ``"100 ms"``.
        """
        return cls("continuous", _check_interval(interval, 1, "'100 ms' or '1 second'"))

    @property
    def seconds(self) -> float:
        """The interval in seconds."""
        return (interval_micros(self.interval or "") or 0) / 1_000_000

    def arguments(self) -> dict[str, str | bool]:
        """Return the arguments of Spark's ``DataStreamWriter.trigger``."""
        if self.kind == "available_now":
            return {"availableNow": True}
        if self.kind == "continuous":
            return {"continuous": str(self.interval)}
        # Spark does not accept short names of units.
        return {"processingTime": f"{round(self.seconds * 1000)} milliseconds"}


def _check_interval(interval: object, min_micros: int, examples: str) -> str:
    """Return the interval; refuse anything but an interval of at least ``min_micros`` microseconds."""
    micros = interval_micros(interval) if isinstance(interval, str) else None
    if not isinstance(interval, str) or micros is None or micros < min_micros:
        raise InvalidOptionError(
            f"an interval is text such as {examples}, not {interval!r}", condition="INVALID_OPTION.VALUE"
        )
    return interval


class Query(ABC):
    """A running query of a pipeline, with any trigger."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, id={self.id!r}, active={self.isActive})"

    @property
    @abstractmethod
    def id(self) -> str:
        """The query's id, the same over all runs of a checkpoint."""

    @property
    @abstractmethod
    def runId(self) -> str:
        """The id of this run."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The query's name."""

    @property
    @abstractmethod
    def isActive(self) -> bool:
        """Whether the query is running."""

    @property
    @abstractmethod
    def status(self) -> Json:
        """What the query is doing."""

    @property
    @abstractmethod
    def lastProgress(self) -> StreamingQueryProgress | None:
        """The progress of the last micro-batch, or epoch."""

    @property
    @abstractmethod
    def recentProgress(self) -> list[StreamingQueryProgress]:
        """The progress of recent micro-batches, or epochs."""

    @abstractmethod
    def exception(self) -> Exception | None:
        """Return the error that ended the query: Penstock's error if there was one, otherwise Spark's.

        None if there was no error.
        """

    @abstractmethod
    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait until the query ends; raise the error that ended it, if any.

        Parameters
        ----------
        timeout
            Seconds to wait; for ever when None.

        Returns
        -------
        bool or None
            With a timeout, whether the query has ended.

        Raises
        ------
        InvalidInputError
            When the timeout is not a number of seconds.
        """

    @abstractmethod
    def processAllAvailable(self) -> None:
        """Wait until all rows that are now in the sources have been processed and committed."""

    @abstractmethod
    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """Finish the micro-batch or epoch in flight, then stop; return whether it was finished.

        Afterwards the consumer's offset, its safe offset and the checkpoint agree.

        Parameters
        ----------
        timeout
            Seconds to wait; after that the micro-batch or epoch is interrupted, and the next run repeats it.

        Raises
        ------
        InvalidInputError
            When the timeout is not a number of seconds; the query goes on.
        """


class EndedQuery(Query):
    """A query that had nothing to do when it started; ``status`` says why."""

    def __init__(self, query_id: str, name: str | None, message: str) -> None:
        self._id, self._name, self._message = query_id, name, message
        self._run_id = str(uuid.uuid4())

    @property
    def id(self) -> str:
        return self._id

    @property
    def runId(self) -> str:
        return self._run_id

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def isActive(self) -> bool:
        return False

    @property
    def status(self) -> Json:
        return {"message": self._message, "isDataAvailable": False, "isTriggerActive": False}

    @property
    def lastProgress(self) -> None:
        return None

    @property
    def recentProgress(self) -> list[StreamingQueryProgress]:
        return []

    def exception(self) -> Exception | None:
        return None

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        check_timeout(timeout)
        return None if timeout is None else True

    def processAllAvailable(self) -> None:
        """Do nothing: all rows are processed."""

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        check_timeout(timeout)
        return True


def check_timeout(timeout: float | None) -> None:
    """Refuse a timeout that is not a number of seconds."""
    if timeout is None:
        return
    if type(timeout) not in (int, float) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise refusal("timeout", timeout, "a number of seconds, 0 or more")


def wait_in_slices(wait: Callable[[float], object], timeout: float | None) -> bool:
    """Call ``wait`` for at most a second at a time, until it returns true; return False after ``timeout``
    seconds.

    Python handles signals in the main thread. But the system may deliver a signal to another thread, for
    example after a suspended process was resumed. Such a signal does not interrupt a wait of the main thread.
    """
    check_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        seconds_left = _SLICE_SECONDS if deadline is None else deadline - time.monotonic()
        if wait(min(max(seconds_left, _MIN_WAIT_SECONDS), _SLICE_SECONDS)):
            return True
        if seconds_left <= _SLICE_SECONDS and deadline is not None:
            return False


# A process has one handler for each signal, so the handler stops the queries of all sessions.
_running_queries: weakref.WeakSet[Query] = weakref.WeakSet()


def stop_on_sigterm(query: Query) -> None:
    """Stop the query on SIGTERM, unless the program has its own handler.

    The first SIGTERM lets each query finish its micro-batch in flight, so that ``awaitTermination`` returns
    and the program ends normally; the second one ends the process immediately.
    """
    _running_queries.add(query)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # In a separate thread, since the main thread may be in the middle of a call to the JVM.
    threading.Thread(target=_stop_all, name="penstock-shutdown").start()


def _stop_all() -> None:
    # In parallel, because each query finishes its own micro-batch.
    for query in list(_running_queries):
        threading.Thread(target=_stop, args=[query], name=f"penstock-shutdown-{query.id}").start()


def _stop(query: Query) -> None:
    label = query.name or query.id
    log.info("stopping query %r", label, extra={"action": "shutdown", "query": label})
    query.stop()
