"""Pool of database connections for the threads of one process."""

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
POOL_SIZE = 16
FORK_WAIT_SECONDS = 5.0
"""How long a fork waits for transactions of other threads, in seconds."""
IDLE_SECONDS = 30.0
"""Connections are closed after they have been idle for between one and two times this many seconds. This
matters because Spark keeps references to queries that have ended, and so to their stores.
"""


@dataclass
class Lease:
    """A connection that one thread uses for one transaction."""

    connection: Connection
    reusable: bool = False
    """Whether the connection may be used again."""


class Pool(Forkable):
    """A pool that opens connections when they are needed and keeps them for the next transaction. Messages
    show ``name``, the name of the store.
    """

    def __init__(
        self, connect: Callable[[], Connection], disconnect: Callable[[Connection], None], name: str
    ) -> None:
        self.connect = connect
        self.disconnect = disconnect
        self._name = name
        self._closed = False
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        # The connection that was returned last is used first, so unused connections stay at the front.
        self.idle: list[Connection] = []
        self._unused_count = 0
        # Closes the connections of a store that is never closed, also when the program ends.
        self._finalizer = weakref.finalize(self, _close_all, self.idle)
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(POOL_SIZE)
        self._slots_held_for_fork = 0
        self._no_fork_pending = threading.Event()
        self._no_fork_pending.set()

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Lend a connection to the block. It returns to the pool afterwards if the block sets ``reusable`` on
        the lease.
        """
        # While a fork waits, no thread may take another slot.
        self._no_fork_pending.wait()
        with self._slots:
            lease = Lease(self._checkout())
            try:
                yield lease
            finally:
                self._checkin(lease)

    def _checkout(self) -> Connection:
        with self._lock:
            if self._closed:
                raise StoreError(
                    f"the store {self._name} has been closed; connect again", condition="STORE_CLOSED"
                )
            if self.idle:
                connection = self.idle.pop()
                self._unused_count = min(self._unused_count, len(self.idle))
                return connection
        return self.connect()

    def _checkin(self, lease: Lease) -> None:
        with self._lock:
            is_kept = lease.reusable and not self._closed
            if is_kept:
                self.idle.append(lease.connection)
        if is_kept:
            idle_closer.register(self)
            return
        self.disconnect(lease.connection)
        if not lease.reusable:
            # The idle connections are usually broken too: a server that shuts down closes them all.
            self.drain()

    def drain(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle = self.idle[:]
            self.idle.clear()
            self._unused_count = 0
        for connection in idle:
            self.disconnect(connection)

    def close_unused(self) -> bool:
        """Close the connections that have been idle since the last call; return whether any other connections
        remain.
        """
        self._no_fork_pending.wait()
        with self._slots:  # a fork waits until they are closed
            with self._lock:
                unused = self.idle[: self._unused_count]
                del self.idle[: self._unused_count]
                self._unused_count = len(self.idle)
            for connection in unused:
                # A connection that cannot be closed is useless anyway.
                with suppress(Exception):
                    self.disconnect(connection)
        return self._unused_count > 0

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they are returned."""
        with self._lock:
            self._closed = True
        with self._slots:
            self.drain()

    def before_fork(self) -> None:
        """Wait until no connection is in use. The wait is limited, since the forking thread itself may use
        one.
        """
        self._no_fork_pending.clear()
        deadline = time.monotonic() + FORK_WAIT_SECONDS
        while self._slots_held_for_fork < POOL_SIZE and self._slots.acquire(
            timeout=max(0.0, deadline - time.monotonic())
        ):
            self._slots_held_for_fork += 1
        self.drain()

    def after_fork_in_parent(self) -> None:
        held, self._slots_held_for_fork = self._slots_held_for_fork, 0
        for _ in range(held):
            self._slots.release()
        self._no_fork_pending.set()

    def after_fork_in_child(self) -> None:
        # Connections that were returned after ``before_fork`` belong to the parent.
        self._finalizer.detach()
        forks.keep_inherited(self.idle)
        self._reset()


class IdleConnectionCloser(Forkable):
    """A thread that closes the unused connections of all pools. It ends when no connections are left."""

    def __init__(self) -> None:
        self._reset()
        forks.register(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pools: WeakSet[Pool] = WeakSet()
        self.running = False

    def register(self, pool: Pool) -> None:
        """Close the pool's unused connections from now on."""
        if self.running and pool in self._pools:
            return
        with self._lock:
            self._pools.add(pool)
            if self.running:
                return
            # While the program ends, no thread can be started, and none is needed.
            with suppress(RuntimeError):
                threading.Thread(target=self._run, name="penstock-idle-connections", daemon=True).start()
                self.running = True

    def _run(self) -> None:
        while True:
            time.sleep(IDLE_SECONDS)
            with self._lock:
                pools = list(self._pools)
                self._pools.clear()
            pools_in_use = [pool for pool in pools if pool.close_unused()]
            with self._lock:
                self._pools.update(pools_in_use)
                if not self._pools:
                    self.running = False
                    return
            del pools, pools_in_use

    def after_fork_in_child(self) -> None:
        self._reset()


idle_closer = IdleConnectionCloser()


def _close_all(connections: list[Connection]) -> None:
    # While the program ends, other exit functions may still use the pool, which then connects again.
    while connections:
        connections.pop().close()
