"""Reader for manifests with the fields of format 3: pyiceberg reads those of format 2 only.

Entries inherit values from the manifest list that were unknown when their manifest was written
(https://iceberg.apache.org/spec, "Sequence Number Inheritance" and "First Row ID Inheritance").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from pyiceberg.table.snapshots import Snapshot

_FORMAT = 3
_IN_LIST = {field.name: place for place, field in enumerate(MANIFEST_LIST_FILE_SCHEMAS[_FORMAT].fields)}
_IN_FILE = {field.name: place for place, field in enumerate(DATA_FILE_TYPE[_FORMAT].fields)}


class Manifest(ManifestFile):
    """A manifest as an entry of the manifest list."""

    @property
    def first_row_id(self) -> int | None:
        """The first row id for its files without one; None before format 3."""
        value: int | None = self[_IN_LIST["first_row_id"]]
        return value


class File(DataFile):
    """A data file, or a delete file."""

    @property
    def first_row_id(self) -> int | None:
        """The row id of its first row; None if it has none."""
        value: int | None = self[_IN_FILE["first_row_id"]]
        return value

    @first_row_id.setter
    def first_row_id(self, value: int) -> None:
        self[_IN_FILE["first_row_id"]] = value

    @property
    def referenced_data_file(self) -> str | None:
        """The only data file whose rows it deletes."""
        value: str | None = self[_IN_FILE["referenced_data_file"]]
        return value

    @property
    def content_offset(self) -> int | None:
        """The offset of a deletion vector in the file."""
        value: int | None = self[_IN_FILE["content_offset"]]
        return value

    @property
    def content_size_in_bytes(self) -> int | None:
        """The length of the deletion vector."""
        value: int | None = self[_IN_FILE["content_size_in_bytes"]]
        return value


class Entry(ManifestEntry):
    """What a snapshot did with a file."""

    @property
    def file(self) -> File:
        """The file, in the class of the read types below."""
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
    """Read the entries of manifests, including removed files, with inherited values."""
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
    # A manifest of format 1 has no sequence number; its files count as the oldest.
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
