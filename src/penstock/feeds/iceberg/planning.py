"""Planning of reads: finds the files that each snapshot changed, and divides them into tasks.

The rules are those of the table format (https://iceberg.apache.org/spec): the status and snapshot id of a
manifest entry show whether a snapshot added or removed a file. A position delete file applies to the data
files of its partition with the same or a lower sequence number, and a deletion vector to the file it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from pyiceberg.manifest import DataFileContent, FileFormat, ManifestContent, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform

from penstock.errors import FeedUnavailableError
from penstock.feeds.contract import DELETE, INSERT
from penstock.feeds.file_commits import Column, grouped
from penstock.feeds.iceberg.history import Change, Entry, File, Manifest, entries, manifests
from penstock.feeds.iceberg.scan import DeleteFile, FileRows, ReadTask, TableView, columns_of
from penstock.feeds.urls import row_id_forms
from penstock.lake.iceberg_deletes import only_data_file, path_bounds
from penstock.lake.parquet import FileSplit, split_file


class _DeleteFiles:
    """Position delete files and deletion vectors, indexed by data file if they apply to only one."""

    def __init__(self) -> None:
        self._by_data_file: dict[str, list[Entry]] = {}
        self._for_several_files: list[Entry] = []

    def __bool__(self) -> bool:
        return bool(self._by_data_file or self._for_several_files)

    def add(self, entry: Entry) -> None:
        only = _only_data_file(entry.file)
        (self._for_several_files if only is None else self._by_data_file.setdefault(only, [])).append(entry)

    def applying(self, data: Entry) -> tuple[DeleteFile, ...]:
        """Return the delete files that may apply to a data file; some may list no position in it."""
        deletes = chain(self._by_data_file.get(data.file.file_path, ()), self._for_several_files)
        return tuple(_delete_file(entry.file) for entry in deletes if _applies(entry, data))


@dataclass(frozen=True)
class _Deletes:
    """The delete files before and after a snapshot."""

    before: _DeleteFiles = field(default_factory=_DeleteFiles)
    after: _DeleteFiles = field(default_factory=_DeleteFiles)
    changed: _DeleteFiles = field(default_factory=_DeleteFiles)
    """Delete files that the snapshot added or removed."""


class Planner:
    """Planner of the read tasks for a range of snapshots."""

    def __init__(self, name: str, table: Table, view: TableView, rows_per_task: int) -> None:
        self._name, self._io, self._specs = name, table.io, table.metadata.specs()
        self._columns: dict[int | None, tuple[Column, ...]] = {
            schema.schema_id: columns_of(schema.fields) for schema in table.metadata.schemas
        }
        self._newest_columns = columns_of(table.schema().fields)
        self._view, self._rows_per_task = view, rows_per_task

    def tasks(self, changes: Iterable[Change]) -> list[ReadTask]:
        parts = chain.from_iterable(map(self._parts, changes))
        return [ReadTask(self._view, group) for group in grouped(parts, self._rows_per_task)]

    def _parts(self, change: Change) -> Iterator[tuple[FileRows, int]]:
        for rows in self._files(change):
            for split in split_file(rows.records, self._rows_per_task):
                yield replace(rows, split=split), -(-rows.records // split.count)

    def _files(self, change: Change) -> Iterator[FileRows]:
        """Yield the files with rows that the snapshot inserted or deleted."""
        snapshot = change.snapshot.snapshot_id
        all_manifests = manifests(self._io, change.snapshot)
        data = [manifest for manifest in all_manifests if manifest.content == ManifestContent.DATA]
        changed_entries = self._entries_of_snapshot(
            change, [manifest for manifest in data if manifest.added_snapshot_id == snapshot]
        )
        removed = [entry for entry in changed_entries if entry.status == ManifestEntryStatus.DELETED]
        deletes = self._deletes(all_manifests, snapshot, needed=bool(removed))
        for entry in changed_entries:
            if entry.status == ManifestEntryStatus.ADDED:
                yield self._rows(change, entry, INSERT, exclude=deletes.after.applying(entry))
        for entry in removed:
            yield self._rows(change, entry, DELETE, exclude=deletes.before.applying(entry))
        if deletes.changed:
            yield from self._files_with_changed_deletes(
                change, data, {entry.file.file_path for entry in changed_entries}, deletes
            )

    def _entries_of_snapshot(self, change: Change, written: Sequence[Manifest]) -> list[Entry]:
        """Return the entries that the snapshot added or removed, from the manifests that it wrote."""
        snapshot = change.snapshot.snapshot_id
        changed = [
            entry for entry in entries(self._io, *written) if entry.status != ManifestEntryStatus.EXISTING
        ]
        changed_entries = [entry for entry in changed if entry.snapshot_id == snapshot]
        # pyiceberg up to 0.11 left the id of the snapshot that added a file in the entry that removes it.
        unattributed = [
            entry
            for entry in changed
            if entry.snapshot_id != snapshot and entry.status == ManifestEntryStatus.DELETED
        ]
        lacks_row_ids = self._view.lineage and any(
            entry.file.first_row_id is None for entry in changed_entries
        )
        if change.parent is not None and (unattributed or lacks_row_ids):
            before = self._live(change.parent)
            changed_entries += [entry for entry in unattributed if entry.file.file_path in before]
            for file in (entry.file for entry in changed_entries):
                # The writer may have left the row id out of the entry of a removed file.
                if file.first_row_id is None and file.file_path in before:
                    file.first_row_id = before[file.file_path].first_row_id
        return changed_entries

    def _live(self, snapshot: Snapshot) -> dict[str, File]:
        """Return the live data files of a snapshot by path."""
        data = (
            manifest for manifest in manifests(self._io, snapshot) if manifest.content == ManifestContent.DATA
        )
        return {
            entry.file.file_path: entry.file
            for entry in entries(self._io, *data)
            if entry.status != ManifestEntryStatus.DELETED
        }

    def _files_with_changed_deletes(
        self, change: Change, written: Sequence[Manifest], changed_entries: set[str], deletes: _Deletes
    ) -> Iterator[FileRows]:
        """Yield files that the snapshot kept, but in which it deleted or restored rows."""
        for entry in entries(self._io, *written):
            is_kept = (
                entry.status != ManifestEntryStatus.DELETED and entry.file.file_path not in changed_entries
            )
            if not is_kept or not deletes.changed.applying(entry):
                continue
            before, after = deletes.before.applying(entry), deletes.after.applying(entry)
            yield self._rows(change, entry, DELETE, only=after, exclude=before)
            if set(before) - set(after):
                yield self._rows(change, entry, INSERT, only=before, exclude=after)

    def _deletes(self, written: Sequence[Manifest], snapshot: int, *, needed: bool) -> _Deletes:
        """Return the delete files before and after the snapshot; none if they cannot affect its changes."""
        delete_manifests = [manifest for manifest in written if manifest.content == ManifestContent.DELETES]
        if not needed and all(manifest.added_snapshot_id != snapshot for manifest in delete_manifests):
            return _Deletes()
        deletes = _Deletes()
        for manifest in delete_manifests:
            for entry in entries(self._io, manifest):
                removed = entry.status == ManifestEntryStatus.DELETED
                if removed and manifest.added_snapshot_id != snapshot:
                    continue
                self._check_delete(entry.file)
                existed = removed or entry.snapshot_id != snapshot
                if existed:
                    deletes.before.add(entry)
                if not removed:
                    deletes.after.add(entry)
                if removed or not existed:
                    deletes.changed.add(entry)
        return deletes

    def _check_delete(self, file: File) -> None:
        if file.content == DataFileContent.EQUALITY_DELETES:
            raise FeedUnavailableError(
                f"{self._name} has equality deletes, which Flink writes, and pyiceberg cannot read them: "
                "configure the writer to use position deletes or copy-on-write, and start after the next "
                "compaction",
                condition="FEED_UNAVAILABLE.EQUALITY_DELETES",
                file=file.file_path,
            )
        if file.file_format != FileFormat.PUFFIN:
            self._check_format(file)

    def _check_format(self, file: File) -> None:
        if file.file_format != FileFormat.PARQUET:
            raise FeedUnavailableError(
                f"{self._name} has {file.file_format.value} files, but only Parquet is supported: set "
                "write.format.default to parquet, and start after the last commit with other files",
                condition="FEED_UNAVAILABLE.FILE_FORMAT",
                file=file.file_path,
            )

    def _rows(
        self,
        change: Change,
        entry: Entry,
        change_type: str,
        *,
        exclude: tuple[DeleteFile, ...],
        only: tuple[DeleteFile, ...] | None = None,
    ) -> FileRows:
        file = entry.file
        self._check_format(file)
        if self._view.lineage and file.first_row_id is None:
            raise FeedUnavailableError(
                f"version {change.version} of {self._name} has rows without row lineage, from before its "
                "upgrade to format 3: start from a later version, or name the columns that identify rows: "
                f"{row_id_forms('iceberg', 'table', 'IcebergFeed')}",
                condition="FEED_UNAVAILABLE.NO_ROW_LINEAGE",
                version=change.version,
            )
        return FileRows(
            version=change.version,
            timestamp=change.timestamp,
            change_type=change_type,
            path=file.file_path,
            records=file.record_count,
            split=FileSplit(),
            constants=self._partition_constants(file),
            exclude=exclude,
            only=only,
            first_row_id=file.first_row_id,
            updated=entry.sequence_number,
            # A snapshot may have no schema id. Then the current schema is used to detect changed columns.
            columns=self._columns.get(change.snapshot.schema_id, self._newest_columns),
        )

    def _partition_constants(self, file: File) -> tuple[tuple[int, object], ...]:
        """Return values of partition columns, which a file may not store."""
        fields = self._specs[file.spec_id].fields
        return tuple(
            (field.source_id, file.partition[index])
            for index, field in enumerate(fields)
            if isinstance(field.transform, IdentityTransform)
        )


def _delete_file(file: File) -> DeleteFile:
    if file.file_format != FileFormat.PUFFIN:
        return DeleteFile(file.file_path)
    return DeleteFile(file.file_path, file.content_offset or 0, file.content_size_in_bytes or 0)


def _only_data_file(deletes: File) -> str | None:
    """Return the only data file that a delete file applies to; None if there may be several."""
    only: str | None = deletes.referenced_data_file
    return only_data_file(deletes) if only is None else only


def _applies(delete: Entry, data: Entry) -> bool:
    file, data_file = delete.file, data.file
    if (delete.sequence_number or 0) < (data.sequence_number or 0) or file.spec_id != data_file.spec_id:
        return False
    if not _is_same_partition(file, data_file):
        return False
    only: str | None = file.referenced_data_file
    if only is not None:
        return only == data_file.file_path
    path = data_file.file_path.encode()
    lower, upper = path_bounds(file)
    return (lower is None or lower <= path) and (upper is None or path <= upper)


def _is_same_partition(one: File, other: File) -> bool:
    """Whether two files of one partition spec are in the same partition; NaN equals NaN here."""
    pairs = [(one.partition[place], other.partition[place]) for place in range(len(one.partition))]
    return all(left == right or (left != left and right != right) for left, right in pairs)
