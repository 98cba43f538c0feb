"""Wait until a queue has more rows, or another file descriptor is ready, without polling."""

from __future__ import annotations

import logging
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from penstock.errors import PartitionNotFoundError, StoreError, StoreUnavailableError, condition_of
from penstock.redaction import shown
from penstock.store import forks
from penstock.store.forks import Forkable
from penstock.store.records.catalog import QueueRecord, dropped

log = logging.getLogger("penstock.store")

_ALL = (0, 2**31)


@dataclass(frozen=True)
class Wake:
    """Why a wait ended; falsy after a timeout."""

    ends: dict[int, int]
    """The end of each partition that has rows at or after the position."""
    ready: tuple[Any, ...]
    """The other files that are readable, closed or broken."""

    def __bool__(self) -> bool:
        return bool(self.ends or self.ready)


class Watch(Forkable, ABC):
    """Notices soon when any process has appended rows to a queue.

    Only one thread may use it at a time. It has its own connection, and after a fork only the parent can use
    it.

    Parameters
    ----------
    partitions
        The partitions to look at; all when None.
    connect
        Makes a connection that nothing else uses.
    translating
        Turns the errors of the database's driver into the store's.
    """

    def __init__(
        self,
        queue: QueueRecord,
        partitions: Collection[int] | None,
        connect: Callable[[], Any],
        translating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._queue = queue
        first, last = (min(partitions), max(partitions)) if partitions else _ALL
        self._wanted = {"queue_id": queue.queue_id, "first": first, "last": last}
        self._connect = connect
        self._translating = translating
        self.connection: Any = None
        self._guard = threading.Lock()
        self._closed = False
        self._away = False
        self._ends: dict[int, int] = {}
        self._total = queue.partitions
        self._due = 0.0
        """When to look again even if nothing wakes the watch, by the monotonic clock."""
        forks.watch(self)

    @property
    def partitions(self) -> int:
        """The number of the queue's partitions at the last look."""
        return self._total

    def wait(self, positions: Mapping[int, int], timeout: float, also: Sequence[Any] = ()) -> Wake:
        """Wait for rows, for one of ``also``, or until the timeout.

        Return immediately if there are rows, and never for other queues or for rows before the positions. If
        the store does not answer, keep waiting for it.

        Parameters
        ----------
        positions
            The first row index that the caller has not read, by partition.
        timeout
            Seconds; 0 only looks. While the server is down, a look may take as long as a connection attempt.
        also
            File descriptors, or objects with one, such as sockets.

        Raises
        ------
        QueueNotFoundError, PartitionNotFoundError
            When the queue was dropped, or has no such partition.
        StoreError
            When the watch was closed, or the store was removed or is damaged.
        """
        if self._closed:
            raise self._ended()
        deadline = time.monotonic() + timeout
        while True:
            ahead = self._ahead(positions)
            left = 0.0 if ahead else min(deadline, self._due) - time.monotonic()
            heard, ready = self._listened(also, max(left, 0.0))
            if not ahead and (heard or time.monotonic() >= self._due):
                self.look(heard)
                ahead = self._ahead(positions)
            if ahead or ready or time.monotonic() >= deadline:
                return Wake(ahead, ready)

    def _ended(self) -> StoreError:
        return StoreError(
            f"the watch of queue {self._queue.name!r} has been closed: create another one",
            condition="STORE_ERROR.WATCH_CLOSED",
        )

    def _ahead(self, positions: Mapping[int, int]) -> dict[int, int]:
        ends = self._ends
        return {part: ends[part] for part, position in positions.items() if ends.get(part, 0) > position}

    def _listened(self, also: Sequence[Any], seconds: float) -> tuple[bool, tuple[Any, ...]]:
        poller = select.poll()
        own = self._descriptors()
        for file in own:
            poller.register(file, select.POLLIN)
        files = {each if isinstance(each, int) else each.fileno(): each for each in also}
        for file in files:
            poller.register(file, select.POLLIN)
        ready = [file for file, _ in poller.poll(seconds * 1000)]
        return not set(own).isdisjoint(ready), tuple(files[file] for file in ready if file in files)

    def look(self, heard: bool) -> None:
        with self._guard:
            if self._closed:
                raise self._ended()
            try:
                with self._translating():
                    rows = self._read(heard)
            except StoreUnavailableError as error:
                self._lose(error)
                rows = None
            else:
                self._found()
            changed = rows is not None and self._take(rows)
            self._due = time.monotonic() + self._pause(changed)

    def _take(self, rows: Sequence[tuple[int, int, int]]) -> bool:
        """Remember where the partitions end; return whether that has changed."""
        if not rows:
            raise self._missing()
        before, self._total = self._ends, rows[0][2]
        self._ends = {partition: end for partition, end, _ in rows}
        return self._ends != before

    def _missing(self) -> Exception:
        first, last = self._wanted["first"], self._wanted["last"]
        if (first, last) == _ALL or last < self._queue.partitions:
            return dropped(self._queue)
        return PartitionNotFoundError(f"queue {self._queue.name!r} has no partition {first}", partition=first)

    def _lose(self, error: StoreUnavailableError) -> None:
        if not self._away:
            self._away = True
            log.warning(
                "waiting for the store to come back: %s",
                shown(error),
                extra={"action": "watch_lost", "queue": self._queue.name, "error": condition_of(error)},
            )

    def _found(self) -> None:
        if self._away:
            self._away = False
            log.info(
                "the store is back: watching queue %r",
                self._queue.name,
                extra={"action": "watch_back", "queue": self._queue.name},
            )

    # What a dialect implements.

    @abstractmethod
    def _descriptors(self) -> Sequence[int]:
        """Return the files that become readable when rows may have been appended."""

    @abstractmethod
    def _read(self, heard: bool) -> list[tuple[int, int, int]] | None:
        """Return partition, end and total number of partitions for each partition; None if unchanged."""

    @abstractmethod
    def _pause(self, changed: bool) -> float:
        """Return the seconds until the next look if nothing wakes the watch; ``changed`` after new rows."""

    @abstractmethod
    def _disconnect(self) -> None: ...

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        with self._guard:
            self._closed = True
            self._disconnect()

    def before_fork(self) -> None:
        self._guard.acquire()

    def after_fork_in_parent(self) -> None:
        self._guard.release()

    def after_fork_in_child(self) -> None:
        self._guard = threading.Lock()
        self._closed = True
