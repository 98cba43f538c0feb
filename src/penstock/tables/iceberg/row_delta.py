"""A snapshot that replaces data files and deletes rows of others by position; pyiceberg commits no delete
files itself.

Delete files are listed in manifests of their own. When there are many of those, or a data file leaves the
table, they are written anew as one, without the delete files of data files that are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Transaction
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.typedef import EMPTY_DICT

from penstock.tables.iceberg.position_deletes import only_data_file

_MOST_MANIFESTS = 8


class _DeleteManifest(ManifestWriterV2):
    """A writer of a manifest that lists delete files."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class RowDelta(_OverwriteFiles):
    """Takes data files out of a table and puts data files and delete files in, in one snapshot."""

    def __init__(self, transaction: Transaction, snapshot_properties: dict[str, str] = EMPTY_DICT) -> None:
        is_first = transaction.table_metadata.current_snapshot() is None
        super().__init__(
            operation=Operation.APPEND if is_first else Operation.OVERWRITE,
            transaction=transaction,
            io=transaction._table.io,
            snapshot_properties=snapshot_properties,
        )
        self._new_deletes: list[DataFile] = []
        self._removed_deletes: list[DataFile] = []

    def append_delete_file(self, file: DataFile) -> None:
        self._new_deletes.append(file)

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        data = [each for each in manifests if each.content == ManifestContent.DATA]
        return data + self._delete_manifests([each for each in manifests if each not in data])

    def _delete_manifests(self, stored: Sequence[ManifestFile]) -> list[ManifestFile]:
        self._removed_deletes = []
        new = [
            ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=file
            )
            for file in self._new_deletes
        ]
        if stored and (self._deleted_data_files or len(stored) >= _MOST_MANIFESTS):
            return self._written([*self._kept(stored), *new])
        return [*self._written(new), *stored]

    def _kept(self, stored: Sequence[ManifestFile]) -> list[ManifestEntry]:
        """Return the entries of some manifests; those of delete files without a data file are removed."""
        gone = {file.file_path for file in self._deleted_data_files}
        entries = []
        for entry in (each for manifest in stored for each in self.fetch_manifest_entry(manifest)):
            is_removed = only_data_file(entry.data_file) in gone
            if is_removed:
                self._removed_deletes.append(entry.data_file)
            entries.append(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.DELETED if is_removed else ManifestEntryStatus.EXISTING,
                    snapshot_id=self._snapshot_id if is_removed else entry.snapshot_id,
                    sequence_number=entry.sequence_number,
                    file_sequence_number=entry.file_sequence_number,
                    data_file=entry.data_file,
                )
            )
        return entries

    def _written(self, entries: Sequence[ManifestEntry]) -> list[ManifestFile]:
        """Write a manifest for each partitioning that delete files have."""
        by_spec: dict[int, list[ManifestEntry]] = {}
        for entry in entries:
            by_spec.setdefault(entry.data_file.spec_id, []).append(entry)
        return [self._one_written(spec_id, listed) for spec_id, listed in by_spec.items()]

    def _one_written(self, spec_id: int, entries: Sequence[ManifestEntry]) -> ManifestFile:
        with _DeleteManifest(
            self.spec(spec_id),
            self._transaction.table_metadata.schema(),
            self.new_manifest_output(),
            self._snapshot_id,
            self._compression,
        ) as writer:
            for entry in entries:
                writer.add_entry(entry)
        return writer.to_manifest_file()

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        added, removed = self._added_data_files, self._deleted_data_files
        self._added_data_files = [*added, *self._new_deletes]
        self._deleted_data_files = {*removed, *self._removed_deletes}
        try:
            return super()._summary(snapshot_properties)
        finally:
            self._added_data_files, self._deleted_data_files = added, removed
