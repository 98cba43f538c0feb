"""Histories for the charts of the monitor page, with a limited number of points."""

from __future__ import annotations

from collections import deque

from penstock.json_text import Json

MAX_POINTS = 900
"""The maximum number of points of one history."""
MAX_TOTAL_POINTS = 12_000
"""The maximum number of points of all histories in one snapshot."""
MIN_POINTS = 30


class History:
    """The newest ``MAX_POINTS`` points, or every n-th of them."""

    def __init__(self) -> None:
        self.points: deque[tuple[int, Json]] = deque()
        self._count = 0

    def add(self, point: Json) -> None:
        self.points.append((self._count, point))
        self._count += 1
        if self.points[0][0] < self._count - MAX_POINTS:
            self.points.popleft()

    def every_nth(self, step: int) -> list[Json]:
        """Keep and return every ``step``-th point (always the same points) and the newest point."""
        newest = self._count - 1
        self.points = deque(
            (number, point) for number, point in self.points if number % step == 0 or number == newest
        )
        return [point for _, point in self.points]


class Percentiles:
    """Percentiles of the newest numbers, at most ``max_values`` of them."""

    def __init__(self, max_values: int) -> None:
        self._newest: deque[float] = deque(maxlen=max_values)

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
    points_per_history = max(MAX_TOTAL_POINTS // max(histories, 1), MIN_POINTS)
    return 1 << (-(-MAX_POINTS // points_per_history) - 1).bit_length()
