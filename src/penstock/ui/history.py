"""What was seen of one thing before, as far as a chart has room for it."""

from __future__ import annotations

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


def step_for(histories: int) -> int:
    """Which points of each history a snapshot holds, so that all of them together stay within what it may hold."""
    room = max(BUDGET // max(histories, 1), FEWEST)
    return -(-MOST // room)
