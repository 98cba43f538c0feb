"""How long something may go on."""

from __future__ import annotations

import time

_QUICKEST, _SLOWEST = 0.02, 0.5
_LONGEST = 1e9
"""Seconds, 30 years: larger numbers are too large for those who wait."""


class Clock:
    """Counts from when it is made.

    Parameters
    ----------
    seconds
        How long; without end when None.
    """

    def __init__(self, seconds: float | None) -> None:
        self._began = time.monotonic()
        self._seconds = None if seconds is None else min(seconds, _LONGEST)
        self._pause = _QUICKEST

    @property
    def left(self) -> float | None:
        """Seconds until the time is over; None when it never is."""
        return None if self._seconds is None else max(0.0, self._seconds - self.passed)

    @property
    def passed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.left == 0.0

    def at_most(self, seconds: float) -> float:
        """So many seconds, or those that are left."""
        return seconds if self.left is None else min(seconds, self.left)

    def rest(self) -> None:
        """Wait before one looks again: a moment at first, longer each time."""
        time.sleep(self.at_most(self._pause))
        self._pause = min(self._pause * 1.5, _SLOWEST)

    def wake(self) -> None:
        """Something has come: the next rest is short."""
        self._pause = _QUICKEST
