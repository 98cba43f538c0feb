"""PostgreSQL locks: advisory locks of owners, and lookups of who holds a lock that a transaction waits
for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import condition_of
from penstock.store import forks
from penstock.store.database import OwnerLock
from penstock.store.statements import statements

if TYPE_CHECKING:
    from penstock.store.postgres.connection import PgConnection

log = logging.getLogger("penstock.store")

RANDOM_KEY_BITS = 20
"""The number of random bits in an advisory lock's key. They are new each time the lock is taken, so that no
other role can take the key first.
"""


@dataclass(frozen=True)
class LockHolder:
    """A session that holds a lock."""

    pid: int
    user: str | None
    application: str | None
    state: str | None
    """The session's state; None if this role may not see it."""
    seconds: float | None
    """How long the session has been in this state, in seconds."""

    def __str__(self) -> str:
        activity = f"{self.state} for {self.seconds:.0f} s" if self.state and self.seconds is not None else ""
        details = [self.application, self.user and f"user {self.user}", activity]
        return f"session {self.pid} ({', '.join(filter(None, details))})"


class LockHolderLookup:
    """Looks up who holds a lock after a transaction has waited ``delay`` seconds for it.

    The lookup runs during the wait, since afterwards the server no longer has this information. ``connect``
    opens a separate connection, and ``schema`` is a quoted name.
    """

    def __init__(self, connect: Callable[[], PgConnection], schema: str, delay: float) -> None:
        self.holders: list[LockHolder] = []
        self._statement = statements("postgres", schema)["lock_holders"]
        self._connect = connect
        self._delay = delay
        self._timer: threading.Timer | None = None

    def start(self, pid: int) -> None:
        """After the delay, look up who holds the lock that the server process ``pid`` waits for."""
        self.cancel()
        self._timer = threading.Timer(self._delay, self._look_up, (pid,))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Cancel the lookup, unless it has already begun."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join(1.0)

    def _look_up(self, pid: int) -> None:
        try:
            with closing(self._connect()) as connection:
                rows = connection.execute(self._statement.encode(), {"pid": pid}).fetchall()
        except Exception as error:
            log.debug(
                "cannot look up who holds the lock: %s",
                error,
                extra={"action": "lock_look_failed", "error": condition_of(error)},
            )
            return
        self.holders = [LockHolder(*row) for row in rows]


def _key_prefix(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> RANDOM_KEY_BITS


def advisory_key(name: str) -> int:
    """Return a 64-bit key for the advisory lock with this name. Each call returns another key with the same
    first bits.
    """
    key = _key_prefix(name) << RANDOM_KEY_BITS | secrets.randbits(RANDOM_KEY_BITS)
    return key - (1 << 64) if key >> 63 else key


def advisory_halves(name: str) -> tuple[int, int]:
    """Return the first bits of a name's keys as the two halves in which ``pg_locks`` shows a key."""
    key = _key_prefix(name) << RANDOM_KEY_BITS
    return key >> 32, (key & 0xFFFFFFFF) >> RANDOM_KEY_BITS


class AdvisoryOwnerLock(OwnerLock):
    """A session advisory lock on a separate connection.

    Roles without access to the store can also take advisory locks, and see which ones are held. So each name
    has a million keys, and its lock counts as held if a role that may move consumers holds any of them.
    ``open_locked`` returns a connection that holds the lock, or None if another session holds it.
    """

    def __init__(self, open_locked: Callable[[], PgConnection | None], is_held: Callable[[], bool]) -> None:
        self._connection: PgConnection | None = None
        self._open_locked = open_locked
        self._is_held = is_held
        super().__init__()

    def acquire(self) -> bool:
        if not self._is_connected():
            self._connection = self._open_locked()
        return self._connection is not None

    def _is_connected(self) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.execute("select 1")
        except Exception:
            # The lock was lost with the connection.
            self.release()
            return False
        return True

    def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # Unlock explicitly, since the server notices a closed connection only a moment later.
            with suppress(Exception):
                connection.execute("select pg_advisory_unlock_all()")
            connection.close()

    def held_elsewhere(self) -> bool:
        return self._connection is None and self._is_held()

    def after_fork_in_child(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            close_inherited(connection)

    def __del__(self) -> None:
        self.release()


def close_inherited(connection: PgConnection) -> None:
    """Drop a parent's connection in a forked child. Closing it normally would end the parent's session."""
    forks.keep_inherited(connection)
    with suppress(OSError):
        os.close(connection.fileno())
