"""Times of a server at which its log ended at known positions."""

from __future__ import annotations

_MOST = 1024


class TimesOfLog:
    """Pairs of a position and a time: every commit that others could see at the time is at or before the
    position.

    Commit timestamps cannot be used, since a server sets them before it decides on the order of the commits.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []
        self._apart = 0
        """The least time between two pairs, in microseconds; grows while the reader lags behind."""

    def note(self, position: int, time: int) -> None:
        """Note that the log ended at a position at some moment after a time."""
        pairs = self._pairs
        if pairs and (position < pairs[-1][0] or time < pairs[-1][1]):
            # The clock was set back, or this is another server.
            pairs.clear()
        if pairs and (position == pairs[-1][0] or (len(pairs) > 1 and time - pairs[-2][1] < self._apart)):
            pairs.pop()
        elif len(pairs) == _MOST:
            self._apart = 2 * (pairs[-1][1] - pairs[0][1]) // _MOST
            del pairs[1::2]
        pairs.append((position, time))

    def before(self, position: int) -> int | None:
        """Return the latest time whose commits are all at or before a position."""
        reached = 0
        for end, _ in self._pairs:
            if end > position:
                break
            reached += 1
        if not reached:
            return None
        time = self._pairs[reached - 1][1]
        del self._pairs[: reached - 1]
        if len(self._pairs) < _MOST // 4:
            self._apart = 0
        return time
