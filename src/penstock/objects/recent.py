"""Cache of recently read parts of objects, for readers in one process that read the same rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from penstock.objects.storage import Buffer

MOST_BYTES = 16 << 20
"""The size of the cache. Parts that are larger than a quarter of it are not cached."""


@dataclass
class _Part:
    # Looked up at each call, since the simulation replaces the threads.
    done: threading.Event = field(default_factory=lambda: threading.Event())
    data: bytes | None = None
    """None until the part is read, and if reading failed or the part is too large to be cached."""


class RecentParts:
    """A cache of at most ``most`` bytes of immutable parts; safe to use from several threads."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._parts: OrderedDict[Hashable, _Part] = OrderedDict()
        self._bytes = 0

    def read(
        self, keys: Sequence[Hashable], load: Callable[[Sequence[int]], Sequence[Buffer]]
    ) -> list[Buffer]:
        """Return parts by key. ``load`` reads the parts that are neither cached nor being read by another
        thread; it gets their indexes in ``keys``.

        A part that another thread fails to read is read again here, so that each thread raises its own error.
        """
        found: dict[int, Buffer] = {}
        mine: dict[int, _Part] = {}
        others: dict[int, _Part] = {}
        with self._lock:
            for place, key in enumerate(keys):
                part = self._parts.get(key)
                if part is None:
                    mine[place] = self._parts[key] = _Part()
                elif part.data is None:
                    others[place] = part
                else:
                    self._parts.move_to_end(key)
                    found[place] = part.data
        try:
            if mine:
                found |= zip(mine, load(list(mine)), strict=True)
        finally:
            self._keep(keys, mine, found)
        for place, part in others.items():
            part.done.wait()
            if part.data is not None:
                found[place] = part.data
        left = [place for place in others if place not in found]
        if left:
            found |= zip(left, load(left), strict=True)
        return [found[place] for place in range(len(keys))]

    def _keep(self, keys: Sequence[Hashable], mine: dict[int, _Part], found: dict[int, Buffer]) -> None:
        with self._lock:
            for place, part in mine.items():
                data = found.get(place)
                if data is None or len(data) > self._most // 4:
                    del self._parts[keys[place]]
                else:
                    # Copied, since it may be a slice of a much larger buffer.
                    part.data = bytes(data)
                    self._bytes += len(data)
            while self._bytes > self._most:
                key, oldest = self._parts.popitem(last=False)
                if oldest.data is None:
                    # It is still being read.
                    self._parts[key] = oldest
                else:
                    self._bytes -= len(oldest.data)
        for part in mine.values():
            part.done.set()
