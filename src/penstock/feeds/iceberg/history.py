"""The history of an Iceberg table: the snapshots of its main branch, and the entries of their manifests.

pyiceberg reads only the fields of format 2 from manifests; this module also reads those of format 3. Entries
inherit values from the manifest list that were unknown when their manifest was written
(https://iceberg.apache.org/spec, "Sequence Number Inheritance" and "First Row ID Inheritance").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from pyiceberg.avro.file import AvroFile
from pyiceberg.io import FileIO
from pyiceberg.manifest import (
    DATA_FILE_TYPE,
    MANIFEST_ENTRY_SCHEMAS,
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    PartitionFieldSummary,
)
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from penstock.errors import DataLostError
from penstock.feeds.protocol import history_changed

_FORMAT = 3
_MANIFEST_POSITIONS = {
    field.name: place for place, field in enumerate(MANIFEST_LIST_FILE_SCHEMAS[_FORMAT].fields)
}
_FILE_POSITIONS = {field.name: place for place, field in enumerate(DATA_FILE_TYPE[_FORMAT].fields)}
_COUNTS = ("added-records", "deleted-records", "added-position-deletes")


@dataclass(frozen=True)
class Change:
    """A snapshot that changed rows."""

    snapshot: Snapshot
    parent: Snapshot | None
    """None for the first snapshot with a sequence number."""

    @property
    def version(self) -> int:
        return self.snapshot.sequence_number or 0

    @property
    def timestamp(self) -> int:
        """Microseconds since 1970."""
        return self.snapshot.timestamp_ms * 1000

    @property
    def rows(self) -> int:
        """The number of rows, from the writer's snapshot summary."""
        summary = self.snapshot.summary
        return sum(int((summary[name] if summary is not None else None) or 0) for name in _COUNTS)


@dataclass(frozen=True)
class History:
    """The current snapshot and its ancestors, oldest first.

    A table never reuses a sequence number, so a sequence number in the history always identifies the same
    commits up to it. Snapshots that were rolled back are not in the history.
    """

    name: str
    chain: dict[int, Snapshot]
    """Snapshots by sequence number."""
    is_expired: bool
    """Whether older snapshots have been expired."""
    has_unnumbered: bool
    """Whether older snapshots were written in format 1."""
    rolled_back: frozenset[int]
    """Versions that were the current snapshot once, but are not ancestors of it now (rolled back)."""

    @classmethod
    def of(cls, name: str, metadata: TableMetadata, had_parent: Callable[[Snapshot], bool]) -> History:
        """Return the history in a table's metadata.

        ``had_parent`` returns whether a snapshot without a parent id was written with one: pyiceberg, unlike
        other libraries, removes the parent's id from a snapshot when it expires the parent.
        """
        by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
        branch: list[Snapshot] = []
        parent = metadata.current_snapshot_id
        while parent is not None and parent in by_id:
            branch.append(by_id[parent])
            parent = by_id[parent].parent_snapshot_id
        numbered = {
            snapshot.sequence_number: snapshot for snapshot in reversed(branch) if snapshot.sequence_number
        }
        ancestors = {snapshot.snapshot_id for snapshot in branch}
        # Sequence numbers start at 1.
        first = branch[-1] if parent is None and branch and (branch[-1].sequence_number or 0) > 1 else None
        former = {entry.snapshot_id for entry in metadata.snapshot_log} - ancestors
        return cls(
            name,
            numbered,
            is_expired=parent is not None or (first is not None and had_parent(first)),
            has_unnumbered=len(numbered) < len(branch),
            rolled_back=frozenset(by_id[key].sequence_number or 0 for key in former if key in by_id),
        )

    @property
    def last(self) -> int:
        """The newest version; 0 if the table has no snapshot."""
        return next(reversed(self.chain), 0)

    @property
    def oldest(self) -> int:
        """The version after which all commits exist."""
        return next(iter(self.chain), 0) if self.is_expired else 0

    @property
    def oldest_with_lineage(self) -> int:
        """The version after which all rows have row lineage, which starts with the upgrade to format 3."""
        last_without = max(
            (version for version, snapshot in self.chain.items() if snapshot.first_row_id is None),
            default=None,
        )
        if last_without is None:
            return self.oldest
        # The first commit of format 3 may still remove files without row lineage.
        return next((version for version in self.chain if version > last_without), last_without)

    def newest(self, after: int, logged: int | None) -> int:
        """Return the newest version, at least ``after``.

        Raise if ``after`` is the version that Spark has logged and the history no longer has it.
        """
        self._check_in_history(after, logged)
        return max(after, self.last)

    def between(self, after: int, upto: int, logged: int | None) -> Iterator[Change]:
        """Yield the snapshots of a range that changed rows."""
        if after < self.oldest or (after < 0 and self.has_unnumbered):
            raise self._expired(after)
        self._check_in_history(after, logged)
        if upto > self.last or upto in self.rolled_back:
            raise history_changed(self.name, upto, self.last)
        parent = None
        for version, snapshot in self.chain.items():
            replaced = snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE
            if after < version <= upto and not replaced:
                yield Change(snapshot, parent)
            parent = snapshot

    def _check_in_history(self, after: int, logged: int | None) -> None:
        if after != logged or after <= 0 or after in self.chain:
            return
        raise self._expired(after) if after < self.oldest else history_changed(self.name, after, self.last)

    def _expired(self, after: int) -> DataLostError:
        reason = "expired" if self.is_expired else "written in format 1, without a sequence number"
        return DataLostError(
            f"snapshots of {self.name} after version {after} have been {reason}; versions {self.oldest + 1} "
            f"to {self.last} can be read: start from version {self.oldest + 1} with a new checkpoint, and "
            "load earlier rows from the table",
            condition="DATA_LOST.EXPIRED",
            version=after,
            oldest=self.oldest,
            newest=self.last,
        )


class Manifest(ManifestFile):
    """A manifest, as listed in the manifest list."""

    @property
    def first_row_id(self) -> int | None:
        """The first row id to assign to files without one; None before format 3."""
        value: int | None = self[_MANIFEST_POSITIONS["first_row_id"]]
        return value


def _file_field(name: str) -> property:
    """Return a property for a field of format 3, which pyiceberg's class lacks."""
    place = _FILE_POSITIONS[name]
    return property(lambda file: file[place], lambda file, value: file.__setitem__(place, value))


class File(DataFile):
    """A data file, or a delete file."""

    first_row_id = _file_field("first_row_id")
    """The row id of the first row; None if unassigned."""
    referenced_data_file = _file_field("referenced_data_file")
    """For a delete file: the only data file that it applies to."""
    content_offset = _file_field("content_offset")
    """The offset of a deletion vector in the file."""
    content_size_in_bytes = _file_field("content_size_in_bytes")
    """The length of the deletion vector."""


class Entry(ManifestEntry):
    """A manifest entry: whether a snapshot added, kept or removed a file."""

    @property
    def file(self) -> File:
        """The file, with the fields of format 3."""
        return cast(File, self.data_file)


def manifests(io: FileIO, snapshot: Snapshot) -> list[Manifest]:
    """Read the manifests of a snapshot."""
    with AvroFile[Manifest](
        io.new_input(snapshot.manifest_list),
        MANIFEST_LIST_FILE_SCHEMAS[_FORMAT],
        read_types={-1: Manifest, 508: PartitionFieldSummary},
        read_enums={517: ManifestContent},
    ) as reader:
        return list(reader)


def entries(io: FileIO, *manifests: Manifest) -> Iterator[Entry]:
    """Read the entries of manifests, including those of removed files, with inherited values."""
    for manifest in manifests:
        with AvroFile[Entry](
            io.new_input(manifest.manifest_path),
            MANIFEST_ENTRY_SCHEMAS[_FORMAT],
            read_types={-1: Entry, 2: File},
            read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
        ) as reader:
            read = list(reader)
        for entry in read:
            _inherit(entry, manifest)
        if manifest.first_row_id is not None:
            _assign_row_ids(read, manifest.first_row_id)
        yield from read


def _inherit(entry: Entry, manifest: Manifest) -> None:
    entry.file.spec_id = manifest.partition_spec_id
    if entry.snapshot_id is None and manifest.added_snapshot_id is not None:
        entry.snapshot_id = manifest.added_snapshot_id
    # A manifest of format 1 has the sequence number 0, which its files inherit.
    if entry.sequence_number is None and (
        manifest.sequence_number == 0 or entry.status == ManifestEntryStatus.ADDED
    ):
        entry.sequence_number = manifest.sequence_number


def _assign_row_ids(entries: Iterable[Entry], first: int) -> None:
    """Assign row ids to files without them, including those from before the upgrade to format 3."""
    for entry in entries:
        file = entry.file
        if entry.status != ManifestEntryStatus.DELETED and file.first_row_id is None:
            file.first_row_id = first
            first += file.record_count
