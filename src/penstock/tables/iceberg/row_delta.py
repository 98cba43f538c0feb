"""Snapshot producer that replaces data files and adds position delete files, which pyiceberg cannot commit.

Delete files are listed in separate manifests, which are merged once there are many. When a data file is
removed, or its delete files are merged, the manifests that list its delete files are rewritten without them.
Manifests of data files are merged as in pyiceberg's appends. Manifests that only list files which earlier
snapshots removed are dropped; otherwise each micro-batch would add some permanently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import TableProperties, Transaction
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import (
    Operation,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update.snapshot import _ManifestMergeManager, _OverwriteFiles
from pyiceberg.typedef import EMPTY_DICT
from pyiceberg.utils.properties import property_as_bool, property_as_int

from penstock.lake.iceberg_deletes import only_data_file

_MAX_DELETE_MANIFESTS = 8


class DeleteManifest(ManifestWriterV2):
    """Writer for a manifest of delete files."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class RowDelta(_OverwriteFiles):
    """Snapshot producer that removes data files, and adds data files and delete files."""

    def __init__(
        self,
        transaction: Transaction,
        snapshot_properties: dict[str, str] = EMPTY_DICT,
        branch: str = MAIN_BRANCH,
    ) -> None:
        is_first = transaction.table_metadata.current_snapshot() is None
        super().__init__(
            operation=Operation.APPEND if is_first else Operation.OVERWRITE,
            transaction=transaction,
            io=transaction._table.io,
            snapshot_properties=snapshot_properties,
            branch=branch,
        )
        self._new_deletes: list[DataFile] = []
        self._superseded_deletes: set[str] = set()
        self._removed_deletes: list[DataFile] = []

    def append_delete_file(self, file: DataFile) -> None:
        self._new_deletes.append(file)

    def remove_delete_file(self, file: DataFile) -> None:
        self._superseded_deletes.add(file.file_path)

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        current = [manifest for manifest in manifests if not self._is_outdated(manifest)]
        data = [manifest for manifest in current if manifest.content == ManifestContent.DATA]
        deletes = [manifest for manifest in current if manifest.content == ManifestContent.DELETES]
        return self._merge_manager.merge_manifests(data) + self._delete_manifests(deletes)

    def _is_outdated(self, manifest: ManifestFile) -> bool:
        """Whether a manifest lists only files that an earlier snapshot has removed."""
        lists_none = manifest.added_files_count == 0 and manifest.existing_files_count == 0
        return lists_none and manifest.added_snapshot_id != self._snapshot_id

    @property
    def _merge_manager(self) -> _ManifestMergeManager[_OverwriteFiles]:
        properties, names = self._transaction.table_metadata.properties, TableProperties
        size = property_as_int(
            properties, names.MANIFEST_TARGET_SIZE_BYTES, names.MANIFEST_TARGET_SIZE_BYTES_DEFAULT
        )
        count = property_as_int(
            properties, names.MANIFEST_MIN_MERGE_COUNT, names.MANIFEST_MIN_MERGE_COUNT_DEFAULT
        )
        enabled = property_as_bool(
            properties, names.MANIFEST_MERGE_ENABLED, names.MANIFEST_MERGE_ENABLED_DEFAULT
        )
        assert size is not None
        assert count is not None
        return _ManifestMergeManager(size, count, enabled, self)

    def _delete_manifests(self, stored: Sequence[ManifestFile]) -> list[ManifestFile]:
        """Return the delete manifests, with a rewritten one for each partition spec that changes."""
        self._removed_deletes = []
        entries_by_spec, unchanged = self._added_entries(), []
        removed_paths = {file.file_path for file in self._deleted_data_files}
        manifest_counts = Counter(manifest.partition_spec_id for manifest in stored)
        specs_to_merge = {spec for spec in entries_by_spec if manifest_counts[spec] >= _MAX_DELETE_MANIFESTS}
        for manifest in stored:
            spec = manifest.partition_spec_id
            may_change = spec in specs_to_merge or removed_paths or self._superseded_deletes
            entries = self._rewrite_entries(manifest, removed_paths) if may_change else []
            if spec in specs_to_merge or any(
                entry.status == ManifestEntryStatus.DELETED for entry in entries
            ):
                entries_by_spec.setdefault(spec, []).extend(entries)
            else:
                unchanged.append(manifest)
        return [
            *(self._write_manifest(spec, entries) for spec, entries in entries_by_spec.items() if entries),
            *unchanged,
        ]

    def _added_entries(self) -> dict[int, list[ManifestEntry]]:
        """Return the entries of the new delete files, by the id of their partition spec."""
        entries_by_spec: dict[int, list[ManifestEntry]] = {}
        for file in self._new_deletes:
            entry = ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=file
            )
            entries_by_spec.setdefault(file.spec_id, []).append(entry)
        return entries_by_spec

    def _rewrite_entries(
        self, manifest: ManifestFile, removed_paths: Container[str | None]
    ) -> list[ManifestEntry]:
        """Return a manifest's entries, with status DELETED for delete files that are no longer needed.

        ``removed_paths`` are the paths of the removed data files.
        """
        entries = []
        for entry in self.fetch_manifest_entry(manifest):
            is_removed = (
                only_data_file(entry.data_file) in removed_paths
                or entry.data_file.file_path in self._superseded_deletes
            )
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

    def _write_manifest(self, spec_id: int, entries: Sequence[ManifestEntry]) -> ManifestFile:
        with DeleteManifest(
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
        """Count delete files too, by their own specs; pyiceberg assumes the current spec for added files."""
        metadata = self._transaction.table_metadata
        schema, specs, current = metadata.schema(), metadata.specs(), metadata.spec()
        collector = SnapshotSummaryCollector(
            property_as_int(metadata.properties, TableProperties.WRITE_PARTITION_SUMMARY_LIMIT, 0) or 0
        )
        for file in self._added_data_files:
            collector.add_file(file, schema, current)
        for file in self._new_deletes:
            collector.add_file(file, schema, specs[file.spec_id])
        for file in (*self._deleted_data_files, *self._removed_deletes):
            collector.remove_file(file, schema, specs[file.spec_id])
        parent_id = self._parent_snapshot_id
        previous = None if parent_id is None else metadata.snapshot_by_id(parent_id)
        return update_snapshot_summaries(
            Summary(self._operation, **collector.build(), **snapshot_properties),
            None if previous is None else previous.summary,
        )
