"""The snapshots that made a table what it is, and whether they are still those that were read before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from penstock.errors import DataLost

_COUNTS = ("added-records", "deleted-records", "added-position-deletes")


@dataclass(frozen=True)
class Change:
    """A snapshot that changed rows."""

    snapshot: Snapshot
    parent: Snapshot | None
    """None for the first one that has a number."""

    @property
    def version(self) -> int:
        return self.snapshot.sequence_number or 0

    @property
    def timestamp(self) -> int:
        """Microseconds since 1970."""
        return self.snapshot.timestamp_ms * 1000

    @property
    def rows(self) -> int:
        """As the writer counted them."""
        summary = self.snapshot.summary
        return sum(int((summary[name] if summary is not None else None) or 0) for name in _COUNTS)


@dataclass
class History:
    """The current snapshot's ancestors, the oldest first: what the main branch is, however it came to be.

    A sequence number is given out once for each table, so one that is in the history stands for the same commits below it for
    ever; one that was given to a snapshot which the table has gone back from is not in it any more.
    """

    name: str
    chain: dict[int, Snapshot]
    """By sequence number."""
    cut: bool
    """Whether older ones have been expired."""
    unnumbered: bool
    """Whether older ones were made in format 1."""
    abandoned: frozenset[int]
    """Those that were the newest once, and are no ancestors of what is the newest now."""
    logged: int | None = field(default=None)

    @classmethod
    def of(cls, name: str, metadata: TableMetadata, had_parent: Callable[[Snapshot], bool]) -> History:
        """The history that a table's metadata tells.

        Parameters
        ----------
        had_parent
            Whether a snapshot without a parent had one when it was made: pyiceberg, unlike others, takes the parent's id out of a
            snapshot when it expires the parent.
        """
        by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
        found: list[Snapshot] = []
        parent = metadata.current_snapshot_id
        while parent is not None and parent in by_id:
            found.append(by_id[parent])
            parent = by_id[parent].parent_snapshot_id
        numbered = {each.sequence_number: each for each in reversed(found) if each.sequence_number}
        ancestors = {each.snapshot_id for each in found}
        # Number 1 is the first that a table gives out.
        bottom = found[-1] if parent is None and found and (found[-1].sequence_number or 0) > 1 else None
        once = {entry.snapshot_id for entry in metadata.snapshot_log} - ancestors
        return cls(
            name,
            numbered,
            cut=parent is not None or (bottom is not None and had_parent(bottom)),
            unnumbered=len(numbered) < len(found),
            abandoned=frozenset(by_id[each].sequence_number or 0 for each in once if each in by_id),
        )

    @property
    def last(self) -> int:
        """The newest version; 0 for a table that has never been written to."""
        return next(reversed(self.chain), 0)

    @property
    def oldest(self) -> int:
        """The version after which everything is there."""
        return next(iter(self.chain), 0) if self.cut else 0

    @property
    def oldest_with_lineage(self) -> int:
        """The version after which all rows have row lineage: a table may have had another format before."""
        bare = max(
            (version for version, each in self.chain.items() if each.first_row_id is None), default=None
        )
        if bare is None:
            return self.oldest
        # The first commit of format 3 may still remove files from before it.
        return next((version for version in self.chain if version > bare), bare)

    def newest(self, after: int) -> int:
        """The newest version; ``after`` where none is above it.

        Raises
        ------
        DataLost
            When ``after`` has been read, and the table has gone back from it.
        """
        self._check_still_there(after)
        return max(after, self.last)

    def between(self, after: int, upto: int) -> Iterator[Change]:
        """The snapshots of a range that changed rows.

        Raises
        ------
        DataLost
            When some have been expired, or the table has gone back from them.
        """
        if after < self.oldest or (after < 0 and self.unnumbered):
            raise self._expired(after)
        self._check_still_there(after)
        if upto > self.last or upto in self.abandoned:
            raise self._changed(upto)
        parent = None
        for version, snapshot in self.chain.items():
            replaced = snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE
            if after < version <= upto and not replaced:
                yield Change(snapshot, parent)
            parent = snapshot

    def _check_still_there(self, after: int) -> None:
        if after != self.logged or after <= 0 or after in self.chain:
            return
        raise self._expired(after) if after < self.oldest else self._changed(after)

    def _expired(self, after: int) -> DataLost:
        what = "expired" if self.cut else "made in format 1, without a sequence number"
        return DataLost(
            f"snapshots of {self.name} above version {after} have been {what}; versions above {self.oldest} up to {self.last} are "
            f"left: start from version {self.oldest + 1}, with a new checkpoint, and read what the table held by then from the "
            "table",
            condition="DATA_LOST.EXPIRED",
            **self._parameters(after),
        )

    def _changed(self, version: int) -> DataLost:
        return DataLost(
            f"version {version} is not in the history of {self.name} any more: the table was rolled back, replaced, or set to "
            f"another snapshot, and is at version {self.last} now. What was read of the version does not hold: read anew what "
            "depends on it, with a new checkpoint",
            condition="DATA_LOST.HISTORY_CHANGED",
            **self._parameters(version),
        )

    def _parameters(self, version: int) -> dict[str, Any]:
        return {"feed": self.name, "version": version, "oldest": self.oldest, "newest": self.last}
