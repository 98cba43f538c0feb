"""Histories for the charts of the monitor page, with a limited number of points."""

from __future__ import annotations

from collections import deque

from penstock.json_text import Json

MOST = 900
"""The maximum number of points of one history."""
BUDGET = 12_000
"""The maximum number of points of all histories in one snapshot."""
FEWEST = 30


class History:
    """The newest ``MOST`` points, or every n-th of them."""

    def __init__(self) -> None:
        self.points: deque[tuple[int, Json]] = deque()
        self._count = 0

    def add(self, point: Json) -> None:
        self.points.append((self._count, point))
        self._count += 1
        if self.points[0][0] < self._count - MOST:
            self.points.popleft()

    def every(self, step: int) -> list[Json]:
        """Return every ``step``-th point, always the same ones, and the newest; forget all others."""
        newest = self._count - 1
        self.points = deque(
            (number, point) for number, point in self.points if number % step == 0 or number == newest
        )
        return [point for _, point in self.points]


class Percentiles:
    """Percentiles of the newest numbers, at most ``most`` of them."""

    def __init__(self, most: int) -> None:
        self._newest: deque[float] = deque(maxlen=most)

    def add(self, number: float) -> None:
        self._newest.append(number)

    def percentile(self, percent: int) -> float | None:
        """Return the smallest number that ``percent`` % of them do not exceed; None without numbers."""
        if not self._newest:
            return None
        return sorted(self._newest)[max(-(-percent * len(self._newest) // 100), 1) - 1]

    def summary(self) -> dict[str, float | None]:
        """Return the percentiles that the page shows, and the number of values."""
        percentiles = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
        summary = {name: self.percentile(percent) for name, percent in percentiles.items()}
        return summary | {"batches": len(self._newest)}


def step_for(histories: int) -> int:
    """Return the step at which ``histories`` histories stay within the budget.

    It is a power of two, so that the points kept by a larger step are also points of a smaller one.
    """
    room = max(BUDGET // max(histories, 1), FEWEST)
    return 1 << (-(-MOST // room) - 1).bit_length()
