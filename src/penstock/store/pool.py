"""A small pool of connections, for the threads of one process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakSet

from penstock.errors import StoreError
from penstock.store import forks
from penstock.store.forks import Forkable

Connection: TypeAlias = Any
"""A connection of the database's driver; each dialect has its own type."""
SIZE = 16
FORK_SECONDS = 5.0
"""How many seconds a fork waits for transactions of other threads."""
IDLE_SECONDS = 30.0
"""A connection is closed after it has been idle for this long, or for twice as long at most. Spark keeps
queries that have ended, and with them their stores.
"""


@dataclass
class Lease:
    """A connection that one thread uses for one transaction."""

    connection: Connection
    sound: bool = False
    """Whether the connection may be used again."""


class Pool(Forkable):
    """Connections that are opened when needed and kept for the next transaction; messages show ``name``, the
    store's name.
    """

    def __init__(
        self, connect: Callable[[], Connection], disconnect: Callable[[Connection], None], name: str
    ) -> None:
        self.connect = connect
        self.disconnect = disconnect
        self._name = name
        self._closed = False
        self._reset()
        forks.watch(self)

    def _reset(self) -> None:
        # The connection returned last is used first, so unused ones stay at the front.
        self.idle: list[Connection] = []
        self._unused = 0
        # For a store that is never closed, and at the program's end.
        self._finalizer = weakref.finalize(self, _close_all, self.idle)
        self._guard = threading.Lock()
        self._slots = threading.BoundedSemaphore(SIZE)
        self._halted = 0
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Lend a connection to the block; it returns to the pool if the lease is marked as sound."""
        # While a fork waits, no thread may take another slot.
        self._open.wait()
        with self._slots:
            lease = Lease(self._checkout())
            try:
                yield lease
            finally:
                self._checkin(lease)

    def _checkout(self) -> Connection:
        with self._guard:
            if self._closed:
                raise StoreError(
                    f"the store {self._name} has been closed; connect again", condition="STORE_CLOSED"
                )
            if self.idle:
                connection = self.idle.pop()
                self._unused = min(self._unused, len(self.idle))
                return connection
        return self.connect()

    def _checkin(self, lease: Lease) -> None:
        with self._guard:
            kept = lease.sound and not self._closed
            if kept:
                self.idle.append(lease.connection)
        if kept:
            cleaner.watch(self)
            return
        self.disconnect(lease.connection)
        if not lease.sound:
            # The idle ones are usually broken too, since a server that went away closed them all.
            self.drain()

    def drain(self) -> None:
        """Close the idle connections."""
        with self._guard:
            idle = self.idle[:]
            self.idle.clear()
            self._unused = 0
        for connection in idle:
            self.disconnect(connection)

    def close_unused(self) -> bool:
        """Close the connections that have been idle since the last call; return whether others are left."""
        self._open.wait()
        with self._slots:  # so that a fork waits until they are closed
            with self._guard:
                unused = self.idle[: self._unused]
                del self.idle[: self._unused]
                self._unused = len(self.idle)
            for connection in unused:
                # A connection that cannot be closed is of no use either.
                with suppress(Exception):
                    self.disconnect(connection)
        return self._unused > 0

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they are returned."""
        with self._guard:
            self._closed = True
        with self._slots:
            self.drain()

    def before_fork(self) -> None:
        """Wait until no connection is in use, up to a limit: the forking thread itself may use one."""
        self._open.clear()
        deadline = time.monotonic() + FORK_SECONDS
        while self._halted < SIZE and self._slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._halted += 1
        self.drain()

    def after_fork_in_parent(self) -> None:
        halted, self._halted = self._halted, 0
        for _ in range(halted):
            self._slots.release()
        self._open.set()

    def after_fork_in_child(self) -> None:
        # Connections that were returned since then belong to the parent.
        self._finalizer.detach()
        forks.keep(self.idle)
        self._reset()


class Cleaner(Forkable):
    """A thread that closes the unused connections of all pools, and ends when there are none left."""

    def __init__(self) -> None:
        self._reset()
        forks.watch(self)

    def _reset(self) -> None:
        self._guard = threading.Lock()
        self._pools: WeakSet[Pool] = WeakSet()
        self.running = False

    def watch(self, pool: Pool) -> None:
        """Close the pool's unused connections from now on."""
        if self.running and pool in self._pools:
            return
        with self._guard:
            self._pools.add(pool)
            if self.running:
                return
            # When the program ends, no thread can be started, and none is needed.
            with suppress(RuntimeError):
                threading.Thread(target=self._run, name="penstock-idle-connections", daemon=True).start()
                self.running = True

    def _run(self) -> None:
        while True:
            time.sleep(IDLE_SECONDS)
            with self._guard:
                pools = list(self._pools)
                self._pools.clear()
            kept = [pool for pool in pools if pool.close_unused()]
            with self._guard:
                self._pools.update(kept)
                if not self._pools:
                    self.running = False
                    return
            del pools, kept

    def after_fork_in_child(self) -> None:
        self._reset()


cleaner = Cleaner()


def _close_all(connections: list[Connection]) -> None:
    # When the program ends, other exit functions may still use the pool, which then connects again.
    while connections:
        connections.pop().close()
