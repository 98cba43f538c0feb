"""Planning of reads: the changes of each snapshot to its files, from its manifests, divided into tasks.

The rules are those of the table format (https://iceberg.apache.org/spec): the status and snapshot id of a
manifest entry say whether a snapshot added or removed a file; a position delete applies to the data files of
its partition whose sequence number is not above its own, and a deletion vector to the file that it names.
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
from penstock.lake.parquet import Piece, pieces


class _DeleteFiles:
    """Position delete files and deletion vectors, found by the data file whose rows they list."""

    def __init__(self) -> None:
        self._of_one: dict[str, list[Entry]] = {}
        self._of_several: list[Entry] = []

    def __bool__(self) -> bool:
        return bool(self._of_one or self._of_several)

    def add(self, entry: Entry) -> None:
        only = _only_data_file(entry.file)
        (self._of_several if only is None else self._of_one.setdefault(only, [])).append(entry)

    def applying(self, data: Entry) -> tuple[DeleteFile, ...]:
        """Return those that may apply to a data file; only their rows say whether they do."""
        found = chain(self._of_one.get(data.file.file_path, ()), self._of_several)
        return tuple(_delete_file(entry.file) for entry in found if _applies(entry, data))


@dataclass(frozen=True)
class _Deletes:
    """The delete files before and after a snapshot."""

    before: _DeleteFiles = field(default_factory=_DeleteFiles)
    after: _DeleteFiles = field(default_factory=_DeleteFiles)
    changed: _DeleteFiles = field(default_factory=_DeleteFiles)
    """Those that are only in one of the two."""


class Planner:
    """Plans the tasks of a range."""

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
            for piece in pieces(rows.records, self._rows_per_task):
                yield replace(rows, piece=piece), -(-rows.records // piece.of)

    def _files(self, change: Change) -> Iterator[FileRows]:
        """Yield all files whose live rows the snapshot changed."""
        snapshot = change.snapshot.snapshot_id
        all_manifests = manifests(self._io, change.snapshot)
        data = [manifest for manifest in all_manifests if manifest.content == ManifestContent.DATA]
        own = self._own(change, [manifest for manifest in data if manifest.added_snapshot_id == snapshot])
        removed = [entry for entry in own if entry.status == ManifestEntryStatus.DELETED]
        deletes = self._deletes(all_manifests, snapshot, needed=bool(removed))
        for entry in own:
            if entry.status == ManifestEntryStatus.ADDED:
                yield self._rows(change, entry, INSERT, exclude=deletes.after.applying(entry))
        for entry in removed:
            yield self._rows(change, entry, DELETE, exclude=deletes.before.applying(entry))
        if deletes.changed:
            yield from self._touched(change, data, {entry.file.file_path for entry in own}, deletes)

    def _own(self, change: Change, written: Sequence[Manifest]) -> list[Entry]:
        """Return the entries that the snapshot added and removed, from the manifests that it wrote."""
        snapshot = change.snapshot.snapshot_id
        changed = [
            entry for entry in entries(self._io, *written) if entry.status != ManifestEntryStatus.EXISTING
        ]
        own = [entry for entry in changed if entry.snapshot_id == snapshot]
        # Up to 0.11 pyiceberg left a removed file the id of the snapshot that had added it.
        doubtful = [
            entry
            for entry in changed
            if entry.snapshot_id != snapshot and entry.status == ManifestEntryStatus.DELETED
        ]
        lacks_row_ids = self._view.lineage and any(entry.file.first_row_id is None for entry in own)
        if change.parent is not None and (doubtful or lacks_row_ids):
            before = self._live(change.parent)
            own += [entry for entry in doubtful if entry.file.file_path in before]
            for file in (entry.file for entry in own):
                # The writer of a removed file may have left its row id out.
                if file.first_row_id is None and file.file_path in before:
                    file.first_row_id = before[file.file_path].first_row_id
        return own

    def _live(self, snapshot: Snapshot) -> dict[str, File]:
        """Return the data files of a snapshot by path."""
        data = (
            manifest for manifest in manifests(self._io, snapshot) if manifest.content == ManifestContent.DATA
        )
        return {
            entry.file.file_path: entry.file
            for entry in entries(self._io, *data)
            if entry.status != ManifestEntryStatus.DELETED
        }

    def _touched(
        self, change: Change, written: Sequence[Manifest], own: set[str], deletes: _Deletes
    ) -> Iterator[FileRows]:
        """Yield files that stay, whose deleted rows the snapshot changed."""
        for entry in entries(self._io, *written):
            stays = entry.status != ManifestEntryStatus.DELETED and entry.file.file_path not in own
            if not stays or not deletes.changed.applying(entry):
                continue
            before, after = deletes.before.applying(entry), deletes.after.applying(entry)
            yield self._rows(change, entry, DELETE, only=after, exclude=before)
            if set(before) - set(after):
                yield self._rows(change, entry, INSERT, only=before, exclude=after)

    def _deletes(self, written: Sequence[Manifest], snapshot: int, *, needed: bool) -> _Deletes:
        """Return the delete files before and after the snapshot; none if they cannot matter."""
        delete_manifests = [manifest for manifest in written if manifest.content == ManifestContent.DELETES]
        if not needed and all(manifest.added_snapshot_id != snapshot for manifest in delete_manifests):
            return _Deletes()
        found = _Deletes()
        for manifest in delete_manifests:
            for entry in entries(self._io, manifest):
                removed = entry.status == ManifestEntryStatus.DELETED
                if removed and manifest.added_snapshot_id != snapshot:
                    continue
                self._check_delete(entry.file)
                existed = removed or entry.snapshot_id != snapshot
                if existed:
                    found.before.add(entry)
                if not removed:
                    found.after.add(entry)
                if removed or not existed:
                    found.changed.add(entry)
        return found

    def _check_delete(self, file: File) -> None:
        if file.content == DataFileContent.EQUALITY_DELETES:
            raise FeedUnavailableError(
                f"{self._name} has equality deletes, which Flink writes and pyiceberg cannot read: configure "
                "the writer to use position deletes or copy-on-write, and start after the next compaction",
                condition="FEED_UNAVAILABLE.EQUALITY_DELETES",
                file=file.file_path,
            )
        if file.file_format != FileFormat.PUFFIN:
            self._check_format(file)

    def _check_format(self, file: File) -> None:
        if file.file_format != FileFormat.PARQUET:
            raise FeedUnavailableError(
                f"{self._name} has {file.file_format.value} files, and only Parquet is supported: set "
                "write.format.default to parquet, and start after the commits that wrote others",
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
                f"version {change.version} of {self._name} has rows without row lineage, from before the "
                "table had format 3: start from a later one, or give the columns that identify rows: "
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
            piece=Piece(),
            constants=self._partition_constants(file),
            exclude=exclude,
            only=only,
            first_row_id=file.first_row_id,
            updated=entry.sequence_number,
            # A snapshot need not say its schema. Then the table's own shows whether columns have changed.
            columns=self._columns.get(change.snapshot.schema_id, self._newest_columns),
        )

    def _partition_constants(self, file: File) -> tuple[tuple[int, object], ...]:
        """Return the columns that a file may lack, since its partition has their single value."""
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
    """Return the data file whose rows a delete file lists; None if they may be of several."""
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
    low, high = path_bounds(file)
    return (low is None or low <= path) and (high is None or path <= high)


def _is_same_partition(one: File, other: File) -> bool:
    """Whether two files are of the same partition of one spec; NaN is a partition like any other."""
    pairs = [(one.partition[place], other.partition[place]) for place in range(len(one.partition))]
    return all(left == right or (left != left and right != right) for left, right in pairs)
