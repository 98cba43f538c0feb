"""Times at which the log of a server ended at known positions."""

from __future__ import annotations

_MAX_PAIRS = 1024


class TimesOfLog:
    """Pairs of a position and a time; commits that were visible at the time are at or before the position.

    Commit timestamps cannot be used, because a server sets them before it orders the commits.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []
        self._min_distance = 0
        """Minimum time between two pairs, in microseconds; it grows while the reader lags behind."""

    def record(self, position: int, time: int) -> None:
        """Record that the log ended at a position at some moment after a time."""
        pairs = self._pairs
        if pairs and (position < pairs[-1][0] or time < pairs[-1][1]):
            # The clock was set back, or the server is another one.
            pairs.clear()
        if pairs and (
            position == pairs[-1][0] or (len(pairs) > 1 and time - pairs[-2][1] < self._min_distance)
        ):
            pairs.pop()
        elif len(pairs) == _MAX_PAIRS:
            self._min_distance = 2 * (pairs[-1][1] - pairs[0][1]) // _MAX_PAIRS
            del pairs[1::2]
        pairs.append((position, time))

    def before(self, position: int) -> int | None:
        """Return the latest time before which all commits are at or before a position; None if unknown."""
        reached = 0
        for end, _ in self._pairs:
            if end > position:
                break
            reached += 1
        if not reached:
            return None
        time = self._pairs[reached - 1][1]
        del self._pairs[: reached - 1]
        if len(self._pairs) < _MAX_PAIRS // 4:
            self._min_distance = 0
        return time
