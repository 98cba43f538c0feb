"""What manifests say, as format 3 has it: pyiceberg asks them for the fields of format 2 only.

The inheritance is the table format's (https://iceberg.apache.org/spec): what a commit did not know when it wrote a manifest, its
entries take over from the manifest list, "Sequence Number Inheritance" and "First Row ID Inheritance".
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """A manifest, as the manifest list has it."""

    @property
    def first_row_id(self) -> int | None:
        """The row id from which on its files without one have theirs; None before format 3."""
        found: int | None = self[_IN_LIST["first_row_id"]]
        return found


class File(DataFile):
    """A data file, or a delete file."""

    @property
    def first_row_id(self) -> int | None:
        """The row id of its first row; None where it was never given one."""
        found: int | None = self[_IN_FILE["first_row_id"]]
        return found

    @first_row_id.setter
    def first_row_id(self, value: int) -> None:
        self[_IN_FILE["first_row_id"]] = value

    @property
    def referenced_data_file(self) -> str | None:
        """The only data file whose rows it deletes."""
        found: str | None = self[_IN_FILE["referenced_data_file"]]
        return found

    @property
    def content_offset(self) -> int | None:
        """Where in the file a deletion vector begins."""
        found: int | None = self[_IN_FILE["content_offset"]]
        return found

    @property
    def content_size_in_bytes(self) -> int | None:
        """How long the deletion vector is."""
        found: int | None = self[_IN_FILE["content_size_in_bytes"]]
        return found


class Entry(ManifestEntry):
    """What a snapshot did with a file."""

    @property
    def file(self) -> File:
        """The file, as the read types below make it."""
        return cast(File, self.data_file)


def manifests(io: FileIO, snapshot: Snapshot) -> list[Manifest]:
    """The manifests of a snapshot."""
    with AvroFile[Manifest](
        io.new_input(snapshot.manifest_list),
        MANIFEST_LIST_FILE_SCHEMAS[_FORMAT],
        read_types={-1: Manifest, 508: PartitionFieldSummary},
        read_enums={517: ManifestContent},
    ) as found:
        return list(found)


def entries(io: FileIO, manifest: Manifest) -> list[Entry]:
    """The entries of a manifest, removed files included, with what they inherit."""
    with AvroFile[Entry](
        io.new_input(manifest.manifest_path),
        MANIFEST_ENTRY_SCHEMAS[_FORMAT],
        read_types={-1: Entry, 2: File},
        read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    ) as reader:
        found = list(reader)
    for entry in found:
        _inherit(entry, manifest)
    if manifest.first_row_id is not None:
        _number(found, manifest.first_row_id)
    return found


def _inherit(entry: Entry, manifest: Manifest) -> None:
    entry.file.spec_id = manifest.partition_spec_id
    if entry.snapshot_id is None and manifest.added_snapshot_id is not None:
        entry.snapshot_id = manifest.added_snapshot_id
    # A manifest of format 1 has no number; its files count as if they had always been there.
    if entry.sequence_number is None and (
        manifest.sequence_number == 0 or entry.status == ManifestEntryStatus.ADDED
    ):
        entry.sequence_number = manifest.sequence_number


def _number(found: Iterable[Entry], first: int) -> None:
    """Give files without row ids theirs, existing ones too: they may have been there when the table came to format 3."""
    for entry in found:
        file = entry.file
        if entry.status != ManifestEntryStatus.DELETED and file.first_row_id is None:
            file.first_row_id = first
            first += file.record_count
