"""Who has the lock that a transaction waits for: asked while it waits, since the server forgets it afterwards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import condition_of
from penstock.store.statements import statements

log = logging.getLogger("penstock.store")


@dataclass(frozen=True)
class Holder:
    """A session that has the lock."""

    pid: int
    user: str | None
    application: str | None
    state: str | None
    """None where this role may not see it."""
    seconds: float | None
    """For how long it has been in this state."""

    def __str__(self) -> str:
        doing = f"{self.state} for {self.seconds:.0f} s" if self.state and self.seconds is not None else ""
        told = [self.application, self.user and f"user {self.user}", doing]
        return f"session {self.pid} ({', '.join(filter(None, told))})"


class LockLook:
    """Looks once who has the lock, some time after a transaction has begun to wait.

    Parameters
    ----------
    connected
        Makes a connection of its own.
    schema
        The store's, as SQL has it.
    delay
        After how many seconds to look.
    """

    def __init__(self, connected: Callable[[], Any], schema: str, delay: float) -> None:
        self.holders: list[Holder] = []
        self._statement = statements("postgres", schema)["lock_holders"]
        self._connected = connected
        self._delay = delay
        self._timer: threading.Timer | None = None

    def begin(self, pid: int) -> None:
        """Look later at what the server process of that number waits for."""
        self.end()
        self._timer = threading.Timer(self._delay, self._ask, (pid,))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Look no more; one that is asking just now may finish."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join(1.0)

    def _ask(self, pid: int) -> None:
        try:
            connection = self._connected()
            try:
                rows = connection.execute(self._statement, {"pid": pid}).fetchall()
            finally:
                connection.close()
        except Exception as error:
            log.debug(
                "who has the lock is not known: %s",
                error,
                extra={"action": "lock_look_failed", "error": condition_of(error)},
            )
            return
        self.holders = [Holder(*row) for row in rows]
