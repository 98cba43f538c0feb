"""Iceberg tables for tests: a SQLite catalog and local files, and the commits that pyiceberg's client does
not make."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _FastAppendFiles, _OverwriteFiles

from penstock.feeds.contract import COMMIT_VERSION
from penstock.feeds.iceberg import IcebergFeed
from penstock.feeds.protocol import OpenFeed
from penstock.tables.iceberg.row_delta import DeleteManifest
from tests.support.feed_reading import changes

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("data", pa.string()), ("n", pa.int32())])
Row = tuple[object, ...]


class Lake:
    """A catalog and its warehouse in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/warehouse",
        }
        self.catalog = SqlCatalog("default", **self.properties)
        self.catalog.create_namespace_if_not_exists("shop")

    def table(self, name: str = "orders", schema: pa.Schema = SCHEMA, **properties: str) -> Table:
        return self.catalog.create_table(
            f"shop.{name}", schema, properties={"format-version": "2", **properties}
        )

    def edit(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the metadata of a table as another writer may have written it."""
        location = self.catalog.load_table(f"shop.{name}").metadata_location
        path = Path(location.removeprefix("file://"))
        metadata = json.loads(path.read_text())
        change(metadata)
        path.write_text(json.dumps(metadata))

    def feed(self, name: str = "orders", **options: object) -> IcebergFeed:
        return IcebergFeed(f"shop.{name}", properties=self.properties, **options)


def rows(*values: Row, schema: pa.Schema = SCHEMA) -> pa.Table:
    return pa.Table.from_pylist(
        [dict(zip(schema.names, each, strict=True)) for each in values], schema=schema
    )


def counted(table: pa.Table) -> Counter[Row]:
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def found(feed: OpenFeed, after: int, upto: int, rows_per_task: int = 1000) -> Counter[Row]:
    """Each change row as its data, change type and version."""
    return counted(changes(feed, after, upto, rows_per_task).drop_columns("_commit_timestamp"))


def replayed(table: pa.Table, state: Counter[Row]) -> Iterator[tuple[int, Counter[Row]]]:
    """What a table holds after each version of its change rows."""
    by_version: dict[int, list[Row]] = {}
    for row in counted(table.drop_columns("_commit_timestamp")).elements():
        by_version.setdefault(row[-1], []).append(row)
    for version in sorted(by_version):
        state = state.copy()
        for kind, step in (("delete", -1), ("insert", 1)):
            for row in by_version[version]:
                if row[-2] == kind:
                    state[row[:-2]] += step
                    assert state[row[:-2]] >= 0, row
        yield version, +state


def states(table: Table) -> dict[int, Counter[Row]]:
    """What the table holds at each snapshot of its main branch, as pyiceberg reads it."""
    found: dict[int, Counter[Row]] = {}
    snapshot = table.current_snapshot()
    while snapshot is not None:
        held = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
        found[snapshot.sequence_number or 0] = counted(held)
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None
    return dict(sorted(found.items()))


class _RowDelta(_FastAppendFiles):
    """A commit of delete files, and of data files if there are any; it may take delete files out again."""

    deletes: Sequence[DataFile] = ()
    dropped: Sequence[str] = ()

    def _existing_manifests(self) -> list[ManifestFile]:
        existing = super()._existing_manifests()
        gone = {
            each.manifest_path
            for each in existing
            if each.content == ManifestContent.DELETES and self._dropped(each)
        }
        return [each for each in existing if each.manifest_path not in gone]

    def _dropped(self, manifest: ManifestFile) -> list[ManifestEntry]:
        entries = manifest.fetch_manifest_entry(self._io)
        return [each for each in entries if each.data_file.file_path in self.dropped]

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        dropped = [
            entry
            for manifest in super()._existing_manifests()
            if manifest.content == ManifestContent.DELETES
            for entry in self._dropped(manifest)
        ]
        for spec_id in {each.spec_id for each in self.deletes} | {each.data_file.spec_id for each in dropped}:
            with DeleteManifest(
                self._transaction.table_metadata.specs()[spec_id],
                self._transaction.table_metadata.schema(),
                self.new_manifest_output(),
                self._snapshot_id,
                self._compression,
            ) as writer:
                for file in self.deletes:
                    if file.spec_id == spec_id:
                        writer.add(_added(file))
                for entry in dropped:
                    if entry.data_file.spec_id == spec_id:
                        writer.delete(entry)
            manifests = [*manifests, writer.to_manifest_file()]
        return manifests


def _added(file: DataFile) -> ManifestEntry:
    return ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file)


class _OldOverwrite(_OverwriteFiles):
    """As pyiceberg 0.11 wrote what it removed."""

    kept: Sequence[ManifestEntry] = ()

    def _deleted_entries(self) -> list[ManifestEntry]:
        removed = [_removed(each.data_file, each.sequence_number) for each in super()._deleted_entries()]
        return [*removed, *self.kept]


def _removed(file: DataFile, sequence: int | None) -> ManifestEntry:
    """An entry under the id of a snapshot that did not remove the file."""
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.DELETED, snapshot_id=7, sequence_number=sequence, data_file=file
    )


class _Compaction(_OverwriteFiles):
    def _summary(self, snapshot_properties: Any = None) -> Summary:
        return Summary(Operation.REPLACE)


def _commit(table: Table, kind: type[Any], operation: Operation, prepare: Callable[[Any], None]) -> None:
    with table.transaction() as transaction:
        producer = kind(operation=operation, transaction=transaction, io=table.io)
        prepare(producer)
        producer.commit()


def new_files(table: Table, data: pa.Table) -> list[DataFile]:
    """Write data files that no snapshot has yet."""
    files = list(_dataframe_to_data_files(table.metadata, data, table.io))
    for file in files:
        file.spec_id = table.spec().spec_id
    return files


def live_files(table: Table) -> list[DataFile]:
    return [task.file for task in table.scan().plan_files()]


def delete_file(
    table: Table,
    positions: Sequence[tuple[DataFile, int]],
    *,
    content: DataFileContent = DataFileContent.POSITION_DELETES,
    bounds: bool = True,
    file_format: FileFormat = FileFormat.PARQUET,
) -> DataFile:
    """Write a position delete file for data files of one partition."""
    ordered = sorted((file.file_path, position) for file, position in positions)
    paths = [path for path, _ in ordered]
    number = len(list(Path(table.location().removeprefix("file://")).glob("data/deletes-*")))
    path = f"{table.location()}/data/deletes-{number}-{abs(hash(tuple(ordered)))}.parquet"
    local = Path(path.removeprefix("file://"))
    local.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"file_path": paths, "pos": [position for _, position in ordered]}), local)
    limits = {2147483546: paths[0].encode()}, {2147483546: paths[-1].encode()}
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=file_format,
        partition=positions[0][0].partition,
        record_count=len(ordered),
        file_size_in_bytes=local.stat().st_size,
        lower_bounds=limits[0] if bounds else {},
        upper_bounds=limits[1] if bounds else {},
    )
    file.spec_id = positions[0][0].spec_id
    return file


def commit_deletes(
    table: Table, *deletes: DataFile, added: Sequence[DataFile] = (), dropped: Sequence[str] = ()
) -> None:
    """Commit delete files, as merge-on-read writers do."""

    def prepare(producer: _RowDelta) -> None:
        producer.deletes, producer.dropped = deletes, dropped
        for file in added:
            producer.append_data_file(file)

    _commit(table, _RowDelta, Operation.DELETE, prepare)


def delete_positions(table: Table, chosen: Sequence[tuple[DataFile, int]], *, bounds: bool = True) -> None:
    """Delete rows by position, with a delete file for each partition."""
    partitions: dict[str, list[tuple[DataFile, int]]] = {}
    for file, position in chosen:
        partitions.setdefault(repr((file.spec_id, file.partition)), []).append((file, position))
    commit_deletes(table, *(delete_file(table, each, bounds=bounds) for each in partitions.values()))


def remove_as_before(table: Table, *files: DataFile, gone_before: Sequence[DataFile] = ()) -> None:
    """Remove files under another snapshot's id, and name some again that are gone already."""

    def prepare(producer: _OldOverwrite) -> None:
        for file in files:
            producer.delete_data_file(file)
        producer.kept = [_removed(file, 1) for file in gone_before]

    _commit(table, _OldOverwrite, Operation.OVERWRITE, prepare)


def compact(table: Table) -> None:
    """Rewrite all files of an unpartitioned table into one, as a maintenance job does."""
    before, held = live_files(table), table.scan().to_arrow()

    def prepare(producer: _Compaction) -> None:
        for file in before:
            producer.delete_data_file(file)
        for file in new_files(table, held):
            producer.append_data_file(file)

    _commit(table, _Compaction, Operation.REPLACE, prepare)


def read_all(feed: OpenFeed) -> pa.Table:
    oldest = feed.oldest()
    return changes(feed, oldest, feed.newest(oldest))


def versions(table: pa.Table) -> list[int]:
    return sorted(set(table[COMMIT_VERSION].to_pylist()))
