"""An open feed of snapshots: its folder, and the files to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.arrow.schema import canonical_schema
from penstock.errors import DataLost, FeedUnavailable
from penstock.feeds.contract import INSERT, ChangeContract
from penstock.feeds.file_commits import DataFile, Estimate, FileCommit, Slice, Task, cut
from penstock.feeds.planned_schema import Planned, columns_of
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    METADATA_NAMES,
    Commit,
    Description,
    OpenChangelog,
    change_rows,
    check_columns_exist,
    check_reserved,
)
from penstock.feeds.snapshots.folder import Folder, Snapshot
from penstock.lake.parquet import count_rows, fitted, nullable, read_piece


class OpenSnapshotFeed(OpenChangelog):
    """A folder of snapshots that is open in one process."""

    def __init__(self, name: str, path: str, row_id: Sequence[str]) -> None:
        self.name, self._path, self._row_id = name, path, row_id
        self._folder = Folder(path, name)

    def describe(self, after: int | None = None) -> Description:
        """Describe the newest snapshot."""
        self._folder = Folder(self._path, self.name)
        newest = self._first(newest=True)
        data = self._data_schema(newest)
        check_reserved(data, "the newest snapshot")
        check_columns_exist(data, "the newest snapshot", self._row_id)
        contract = ChangeContract(
            self._row_id,
            carryover_rows=True,
            intermediate_changes=True,
            updates_as_delete_and_insert=True,
            whole_commits=True,
        )
        planned = Planned(newest.version, len(data))
        return Description(
            f"snapshots:{self.name}", pa.schema([*data, *METADATA_FIELDS]), contract, planned.to_json()
        )

    def _data_schema(self, snapshot: Snapshot) -> pa.Schema:
        """Return the columns of a snapshot's first file; all are nullable."""
        path = snapshot.files[0].path
        with self._folder.reading(path, snapshot.version), self._folder.open(path) as file:
            data = canonical_schema(pq.ParquetFile(file).schema_arrow)
        return pa.schema([pa.field(field.name, nullable(field.type)) for field in data])

    def oldest(self) -> int:
        """Return the first snapshot's version; 0 if it is number 1."""
        first = self._first().version
        return 0 if first == 1 else first

    def newest(self, after: int) -> int:
        """Return the last snapshot's version; lists the folder."""
        return max(after, self._first(newest=True).version)

    def _first(self, *, newest: bool = False) -> Snapshot:
        names = self._folder.names()
        snapshot = next(self._folder.snapshots(names, sorted(names, reverse=newest)), None)
        if snapshot is None:
            raise self._folder.no_snapshots()
        return snapshot

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """Yield the snapshots of a range, with the number of rows that are compared for each."""
        estimate = Estimate(())
        for commit in self._range(after, upto):
            if rows is None:
                count = sum(estimate.rows(file) for _, file in commit.files)
            else:
                count = sum(self._count(file, commit.version) for _, file in commit.files)
            yield Commit(commit.version, commit.timestamp, count)

    def _count(self, file: DataFile, version: int) -> int:
        with self._folder.reading(file.path, version), self._folder.open(file.path) as opened:
            return count_rows(opened)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        """Divide the files of a range: small ones together, large ones by their row groups."""
        commits = self._range(after, upto)
        return cut((self._with_columns(commit) for commit in commits), rows_per_task)

    def _with_columns(self, commit: FileCommit) -> FileCommit:
        added = [file for kind, file in commit.files if kind == "insert"]
        if not added:
            return commit
        snapshot = Snapshot(commit.version, commit.timestamp, tuple(added))
        return replace(commit, columns=columns_of(self._data_schema(snapshot)))

    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the rows of some files, a batch at a time."""
        planned, columns = Planned.of(schema), columns_of(schema)
        for piece in task.slices:
            if planned is not None and piece.columns:
                planned.check(f"the snapshots in {self.name}", piece.version, columns, piece.columns)
            yield from self._slice(piece, schema)

    def _slice(self, piece: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        def refuse(reason: str) -> FeedUnavailable:
            return FeedUnavailable(
                f"{piece.path} of {self.name} has another schema than the newest snapshot: {reason}. Begin "
                f"after version {piece.version}, or rewrite the older snapshots",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                version=piece.version,
            )

        columns = [name for name in schema.names if name not in METADATA_NAMES]
        with self._folder.reading(piece.path, piece.version), self._folder.open(piece.path) as file:
            for batch in read_piece(file, piece.piece, columns):
                yield change_rows(
                    fitted(batch, schema, refuse),
                    schema,
                    change_type=piece.change_type or INSERT,
                    version=piece.version,
                    timestamp=piece.timestamp,
                )

    def _range(self, after: int, upto: int) -> Iterator[FileCommit]:
        names = self._folder.names()
        versions = list(names)
        below = self._folder.snapshots(names, [version for version in reversed(versions) if version <= after])
        before = next(below, None)
        in_range = [version for version in versions if after < version <= upto]
        for snapshot in self._folder.snapshots(names, in_range):
            if before is None and snapshot.version != 1:
                raise self._lost(after)
            yield self._between(before, snapshot)
            before = snapshot

    def _lost(self, after: int) -> DataLost:
        first, last = self.oldest() + 1, self.newest(-1)
        left = f"changes are left for versions {first} to {last}" if first <= last else "no changes are left"
        return DataLost(
            f"the snapshot before version {after + 1}, with which its changes begin, is missing from "
            f"{self.name}; {left}",
            after=after,
            first=first,
            last=last,
        )

    def _between(self, before: Snapshot | None, snapshot: Snapshot) -> FileCommit:
        old = before.files if before is not None else ()
        shared = self._folder.shared(old, snapshot.files)
        files = [("delete", file) for file in old if file.path not in shared]
        files += [("insert", file) for file in snapshot.files if file.path not in shared]
        return FileCommit(snapshot.version, snapshot.timestamp, tuple(files))
