"""``RecentParts``: a cache of recently read parts of objects, for readers of the same rows in one process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from penstock.objects.storage import Buffer

MAX_BYTES = 16 << 20
"""The size of the cache. Parts larger than a quarter of it are not cached."""


@dataclass
class _Part:
    # Look the class up for each part, because the simulation replaces it.
    finished: threading.Event = field(default_factory=lambda: threading.Event())
    data: bytes | None = None
    """None until the part is read, or if reading failed or the part is too large for the cache."""


class RecentParts:
    """Cache of immutable parts, of at most ``max_bytes`` bytes. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._parts: OrderedDict[Hashable, _Part] = OrderedDict()
        self._bytes = 0

    def read(
        self, keys: Sequence[Hashable], load: Callable[[Sequence[int]], Sequence[Buffer]]
    ) -> list[Buffer]:
        """Return parts by key.

        ``load`` gets indexes in ``keys``, and reads the parts that are neither cached nor being read by
        another thread. If another thread fails to read a part, it is read again here, so that each thread
        raises its own error.
        """
        data_by_index: dict[int, Buffer] = {}
        own_parts: dict[int, _Part] = {}
        awaited_parts: dict[int, _Part] = {}
        with self._lock:
            for index, key in enumerate(keys):
                part = self._parts.get(key)
                if part is None:
                    own_parts[index] = self._parts[key] = _Part()
                elif part.data is None:
                    awaited_parts[index] = part
                else:
                    self._parts.move_to_end(key)
                    data_by_index[index] = part.data
        try:
            if own_parts:
                data_by_index |= zip(own_parts, load(list(own_parts)), strict=True)
        finally:
            self._cache(keys, own_parts, data_by_index)
        for index, part in awaited_parts.items():
            part.finished.wait()
            if part.data is not None:
                data_by_index[index] = part.data
        failed = [index for index in awaited_parts if index not in data_by_index]
        if failed:
            data_by_index |= zip(failed, load(failed), strict=True)
        return [data_by_index[index] for index in range(len(keys))]

    def _cache(
        self, keys: Sequence[Hashable], own_parts: dict[int, _Part], data_by_index: dict[int, Buffer]
    ) -> None:
        with self._lock:
            for index, part in own_parts.items():
                data = data_by_index.get(index)
                if data is None or len(data) > self._max_bytes // 4:
                    del self._parts[keys[index]]
                else:
                    # Copy it, because it may be a slice of a much larger buffer.
                    part.data = bytes(data)
                    self._bytes += len(data)
            while self._bytes > self._max_bytes:
                key, oldest = self._parts.popitem(last=False)
                if oldest.data is None:
                    # It is still being read.
                    self._parts[key] = oldest
                else:
                    self._bytes -= len(oldest.data)
        for part in own_parts.values():
            part.finished.set()
