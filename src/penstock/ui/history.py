"""What was seen of one thing before, as far as a chart has room for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any

MOST = 900
"""Points that are kept."""
BUDGET = 12_000
"""Points of all histories together that one snapshot holds."""
FEWEST = 60


class History:
    """Points in time, the oldest of which goes when there are too many."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=MOST)
        self._count = 0

    def add(self, point: Mapping[str, Any]) -> None:
        """Add the newest point."""
        self._points.append((self._count, point))
        self._count += 1

    def every(self, step: int) -> list[Mapping[str, Any]]:
        """Each ``step``-th point, the same ones as they grow older, and the newest."""
        newest = self._count - 1
        return [point for number, point in self._points if number % step == 0 or number == newest]


class Spread:
    """How the newest of some numbers are spread.

    Parameters
    ----------
    most
        How many of them count.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, number: float) -> None:
        """Add the newest number."""
        self._newest.append(number)
        insort(self._sorted, number)
        if len(self._newest) > self._most:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]

    @property
    def count(self) -> int:
        """How many numbers count."""
        return len(self._sorted)

    def below(self, percent: int) -> float | None:
        """The least of them that so many in a hundred do not exceed; None where there are none."""
        if not self._sorted:
            return None
        return self._sorted[max(-(-percent * self.count // 100), 1) - 1]

    def told(self) -> dict[str, float | None]:
        """The percentiles that the page shows, and of how many numbers they are."""
        percentiles = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
        return {name: self.below(percent) for name, percent in percentiles.items()} | {"batches": self.count}


def step_for(histories: int) -> int:
    """Which points of each history a snapshot holds, so that all of them together stay within what it may hold."""
    room = max(BUDGET // max(histories, 1), FEWEST)
    return -(-MOST // room)
