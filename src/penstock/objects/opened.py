"""``OpenedStorages``: the object storages of a store, each opened once, and a cache of read parts."""

from __future__ import annotations

import os

from penstock.objects.cloud import CloudStorage
from penstock.objects.local import LocalStorage
from penstock.objects.location import is_local
from penstock.objects.recent import RecentParts
from penstock.objects.storage import ObjectStorage


class OpenedStorages:
    """Opened storages by location. Thread-safe."""

    def __init__(self) -> None:
        # A forked child must not use its parent's connections.
        self._opened: dict[tuple[str, int], ObjectStorage] = {}
        self._recent: dict[int, RecentParts] = {}

    @property
    def recent(self) -> RecentParts:
        """The parts of objects that this process has read recently."""
        pid = os.getpid()
        return self._recent.get(pid) or self._recent.setdefault(pid, RecentParts())

    def at(self, url: str) -> ObjectStorage:
        """Return the storage at a location.

        Raises
        ------
        MissingDependencyError, StoreUnavailableError
        """
        key = url, os.getpid()
        storage = self._opened.get(key)
        if storage is None:
            # Two threads may open it at the same time; only one of the two is kept.
            opened = LocalStorage(url) if is_local(url) else CloudStorage(url)
            storage = self._opened.setdefault(key, opened)
        return storage
