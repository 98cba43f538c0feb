"""How far back the changes of a Delta table can still be read."""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import DataLost, FeedUnavailable
from penstock.feeds.delta.checks import is_outside_table
from penstock.feeds.delta.log import Log
from penstock.lake.storage import Storage


class RetentionHorizon:
    """The oldest commits that still have all their files."""

    def __init__(self, storage: Storage, log: Log, shown: str) -> None:
        self._storage = storage
        self._log = log
        self._shown = shown
        self._oldest: int | None = None
        self._probe: tuple[str, ...] = ()

    def oldest(self, refused: Collection[int] = ()) -> int:
        """Return the version after which all commits and their files exist, and none is refused."""
        # VACUUM removes files in the order in which commits made them obsolete: the first ones tell if any
        # are missing.
        if self._oldest is None or self._oldest < self._log.first - 1 or self._storage.missing(self._probe):
            self._search(refused)
        assert self._oldest is not None
        return self._oldest

    def _search(self, refused: Collection[int]) -> None:
        removed: set[str] = set()
        self._probe = ()
        for commit in self._log.backwards(self._log.newest()):
            removed.update(action.path for action in commit.removed)
            # Files of the current table are not vacuumed.
            obsolete = [
                action.path
                for kind, action in commit.needed
                if (kind != "insert" or action.path in removed) and not is_outside_table(action)
            ]
            if commit.version in refused or self._storage.missing(obsolete):
                self._oldest = commit.version
                return
            self._probe = tuple(obsolete) or self._probe
        self._oldest = self._log.first - 1

    def lost(self, version: int, path: str) -> DataLost:
        """Return the error for a missing file, naming the versions that are left."""
        self._oldest = None
        try:
            first, last = self.oldest() + 1, self._log.newest()
            left = f"versions {first} to {last} are left" if first <= last else "no version is left"
        except (DataLost, FeedUnavailable) as error:
            return DataLost(
                f"{path} of {self._shown} is missing, and its table cannot be read: {error.message}",
                version=version,
            )
        return DataLost(
            f"version {version} of the Delta table {self._shown} can no longer be read, since its file "
            f"{path} was vacuumed; {left}",
            version=version,
            first=first,
            last=last,
        )
