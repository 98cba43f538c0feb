"""For how long a transaction that failed is tried again."""

from __future__ import annotations

import random
import time

from penstock.errors import StoreLocked


class Retries:
    """The tries of one piece of work, whose pauses grow.

    A store that is away is tried again for so many seconds after the first failure: what that try did before does not count, nor
    does a time for which the process was stopped. Where a lock was not free only the waiting counts, so that work of minutes is
    repeated too.

    Parameters
    ----------
    away, locked
        For how many seconds.
    """

    def __init__(self, away: float, locked: float) -> None:
        self._away, self._locked = away, locked
        self._pause = 0.02
        self._deadline: float | None = None
        self._began = time.monotonic()
        self.waited = 0.0
        """Seconds of waiting for locks."""

    def begin(self) -> None:
        """A try begins."""
        self._began = time.monotonic()

    def left(self, error: Exception) -> bool:
        """Whether there is time for another try after this error."""
        now = time.monotonic()
        if isinstance(error, StoreLocked):
            # Where several wait, each waits first for its place at the head of the line, and then for the lock.
            self.waited += min(now - self._began, 2 * error.parameters.get("seconds", self._locked))
            left = self.waited + self._pause < self._locked * 0.99
            self.waited += self._pause
            return left
        if self._deadline is None:
            self._deadline = now + self._away
        return now + self._pause <= self._deadline

    def rest(self) -> None:
        """Pause before the next try."""
        time.sleep(self._pause * (0.5 + random.random()))
        self._pause = min(self._pause * 2, 2.0)
