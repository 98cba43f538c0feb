"""Wait without polling until a queue has new rows or another file descriptor is ready."""

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
from penstock.redaction import redacted_message
from penstock.store import forks
from penstock.store.forks import Forkable
from penstock.store.records.catalog import QueueRecord, dropped

log = logging.getLogger("penstock.store")

_ALL = (0, 2**31)


@dataclass(frozen=True)
class Wake:
    """The reason why a wait ended; falsy after a timeout."""

    ends: dict[int, int]
    """The row index after the last row, for each partition that has unread rows."""
    ready: tuple[Any, ...]
    """Those of the other file descriptors that are readable, closed or broken."""

    def __bool__(self) -> bool:
        return bool(self.ends or self.ready)


class Watch(Forkable, ABC):
    """A watch of a queue, which notices shortly after any process has appended rows.

    A watch has its own connection. Only one thread may use it at a time, and after a fork only the parent can
    use it.

    Parameters
    ----------
    partitions
        The partitions to check; all if None.
    connect
        Opens a connection for this watch alone.
    translating
        Converts errors of the database's driver to the store's errors.
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
        self._parameters = {"queue_id": queue.queue_id, "first": first, "last": last}
        self._connect = connect
        self._translating = translating
        self.connection: Any = None
        self._lock = threading.Lock()
        self._closed = False
        self._is_unavailable = False
        self._ends: dict[int, int] = {}
        self._partition_count = queue.partitions
        self._next_check = 0.0
        """The time of the monotonic clock at which to check again, even if nothing wakes the watch."""
        forks.register(self)

    @property
    def partitions(self) -> int:
        """The queue's number of partitions at the last check."""
        return self._partition_count

    def wait(self, positions: Mapping[int, int], timeout: float, also: Sequence[Any] = ()) -> Wake:
        """Wait until there are unread rows, a descriptor in ``also`` is ready, or the timeout has passed.

        Return immediately if there are unread rows already. Rows of other queues and rows before the
        positions do not end the wait. If the store does not answer, keep waiting for it.

        Parameters
        ----------
        positions
            The first row index that the caller has not read, by partition.
        timeout
            Seconds to wait; 0 only checks. While the server is down, a check may take as long as an attempt
            to connect.
        also
            Other file descriptors to wait for, or objects that have one, such as sockets.

        Raises
        ------
        QueueNotFoundError, PartitionNotFoundError
            If the queue was dropped, or has no such partition.
        StoreError
            If the watch was closed, or the store was removed or is damaged.
        """
        if self._closed:
            raise self._closed_error()
        deadline = time.monotonic() + timeout
        while True:
            ends = self._partitions_ahead(positions)
            seconds_left = 0.0 if ends else min(deadline, self._next_check) - time.monotonic()
            woken, ready = self._poll(also, max(seconds_left, 0.0))
            if not ends and (woken or time.monotonic() >= self._next_check):
                self.check(woken)
                ends = self._partitions_ahead(positions)
            if ends or ready or time.monotonic() >= deadline:
                return Wake(ends, ready)

    def _closed_error(self) -> StoreError:
        return StoreError(
            f"the watch of queue {self._queue.name!r} has been closed: create another one",
            condition="STORE_ERROR.WATCH_CLOSED",
        )

    def _partitions_ahead(self, positions: Mapping[int, int]) -> dict[int, int]:
        ends = self._ends
        return {
            partition: ends[partition]
            for partition, position in positions.items()
            if ends.get(partition, 0) > position
        }

    def _poll(self, also: Sequence[Any], seconds: float) -> tuple[bool, tuple[Any, ...]]:
        poller = select.poll()
        own_descriptors = self._descriptors()
        for file in own_descriptors:
            poller.register(file, select.POLLIN)
        files = {
            descriptor if isinstance(descriptor, int) else descriptor.fileno(): descriptor
            for descriptor in also
        }
        for file in files:
            poller.register(file, select.POLLIN)
        ready = [file for file, _ in poller.poll(seconds * 1000)]
        return not set(own_descriptors).isdisjoint(ready), tuple(
            files[file] for file in ready if file in files
        )

    def check(self, woken: bool) -> None:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            try:
                with self._translating():
                    rows = self._read(woken)
            except StoreUnavailableError as error:
                self._report_unavailable(error)
                rows = None
            else:
                self._report_available()
            has_new_rows = rows is not None and self._update_ends(rows)
            self._next_check = time.monotonic() + self._seconds_to_next_check(has_new_rows)

    def _update_ends(self, rows: Sequence[tuple[int, int, int]]) -> bool:
        """Remember the ends of the partitions; return whether any has changed."""
        if not rows:
            raise self._missing_error()
        previous, self._partition_count = self._ends, rows[0][2]
        self._ends = {partition: end for partition, end, _ in rows}
        return self._ends != previous

    def _missing_error(self) -> Exception:
        first, last = self._parameters["first"], self._parameters["last"]
        if (first, last) == _ALL or last < self._queue.partitions:
            return dropped(self._queue)
        return PartitionNotFoundError(f"queue {self._queue.name!r} has no partition {first}", partition=first)

    def _report_unavailable(self, error: StoreUnavailableError) -> None:
        if not self._is_unavailable:
            self._is_unavailable = True
            log.warning(
                "waiting for the store to come back: %s",
                redacted_message(error),
                extra={"action": "watch_lost", "queue": self._queue.name, "error": condition_of(error)},
            )

    def _report_available(self) -> None:
        if self._is_unavailable:
            self._is_unavailable = False
            log.info(
                "the store is back: watching queue %r",
                self._queue.name,
                extra={"action": "watch_back", "queue": self._queue.name},
            )

    # What a dialect implements.

    @abstractmethod
    def _descriptors(self) -> Sequence[int]:
        """Return the file descriptors that become readable when rows may have been appended."""

    @abstractmethod
    def _read(self, woken: bool) -> list[tuple[int, int, int]] | None:
        """Return a tuple for each partition: its number, its end, and the queue's number of partitions.
        Return None if nothing has changed.
        """

    @abstractmethod
    def _seconds_to_next_check(self, has_new_rows: bool) -> float:
        """Return the seconds until the next check if nothing wakes the watch."""

    @abstractmethod
    def _disconnect(self) -> None: ...

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._closed = True
