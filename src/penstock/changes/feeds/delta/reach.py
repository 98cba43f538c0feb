"""How far back a table's changes can still be read."""

from __future__ import annotations

from collections.abc import Collection

from penstock.changes.feeds.delta.checks import elsewhere
from penstock.changes.feeds.delta.log import Log
from penstock.changes.feeds.delta.storage import Storage
from penstock.errors import DataLost, FeedUnavailable


class Reach:
    """Which commits have all their files yet."""

    def __init__(self, storage: Storage, log: Log, shown: str) -> None:
        self._storage = storage
        self._log = log
        self._shown = shown
        self._found: int | None = None
        self._probe: tuple[str, ...] = ()

    def oldest(self, refused: Collection[int] = ()) -> int:
        """The version after which all commits and all their files are there, and none is among those refused."""
        # Files go in the order in which commits made them superfluous, so that the first ones tell if any are gone since.
        if self._found is None or self._found < self._log.first - 1 or self._storage.missing(self._probe):
            self._look(refused)
        assert self._found is not None
        return self._found

    def _look(self, refused: Collection[int]) -> None:
        removed: set[str] = set()
        self._probe = ()
        for commit in self._log.backwards(self._log.newest()):
            removed.update(action.path for action in commit.removed)
            # What the table has now is not vacuumed.
            mortal = [
                action.path
                for kind, action in commit.needed
                if (kind != "insert" or action.path in removed) and not elsewhere(action)
            ]
            if commit.version in refused or self._storage.missing(mortal):
                self._found = commit.version
                return
            self._probe = tuple(mortal) or self._probe
        self._found = self._log.first - 1

    def lost(self, version: int, path: str) -> DataLost:
        """The error for a file that is gone, naming the versions that are left."""
        self._found = None
        try:
            first, last = self.oldest() + 1, self._log.newest()
            left = f"versions {first} to {last} are left" if first <= last else "no version is left"
        except (DataLost, FeedUnavailable) as error:
            return DataLost(
                f"{path} of {self._shown} is gone, and so is its table: {error.message}", version=version
            )
        return DataLost(
            f"version {version} of the Delta table {self._shown} cannot be read any more, since its file {path} was vacuumed; {left}",
            version=version,
            first=first,
            last=last,
        )
