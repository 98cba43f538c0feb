"""``SnapshotFeed``: the changes between the snapshots of a table that lie side by side in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.arrow.schema import canonical_schema
from penstock.errors import DataLost, FeedUnavailable, InvalidChangelogSchema
from penstock.feeds.contract import INSERT, ChangeContract
from penstock.feeds.file_commits import DataFile, Estimate, FileCommit, Slice, Task, cut
from penstock.feeds.planned_schema import Planned, columns_of
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    METADATA_NAMES,
    Commit,
    Description,
    change_rows,
    check_reserved,
    check_there,
)
from penstock.feeds.snapshots.folder import Folder, Snapshot
from penstock.feeds.urls import FeedUrl, pairs, row_id_forms
from penstock.lake.location import absolute, shown_path
from penstock.lake.parquet import count_rows, fitted, nullable, read_piece


@dataclass(frozen=True)
class SnapshotFeed:
    """The changes from each snapshot of a table to the next one.

    Every Parquet file of the folder, and every sub-folder with Parquet files in it, is a snapshot; names that begin with ``_``
    or ``.`` are left out, and so are folders in which Spark is still writing. The version of a snapshot is the number in its
    name: 7 for ``orders-0007.parquet``, 20260131 for ``2026-01-31``. So it stays when older snapshots are removed. All names
    have to be alike but for their digits, and several numbers in a name have to have as many digits in each, so that
    versions are ordered as the names are.

    Version v has the rows of the snapshot before it as deletes and its own as inserts; carry-over removal leaves the
    difference. The first snapshot is where the feed begins, and has no changes itself, unless it is number 1: before number 1
    the table was empty.

    A snapshot must not change once it is there: write it under another name (``_new``), then rename it. Remove old ones from
    the oldest on, and none that a query has yet to compare with. A folder is known by its path: where it is made anew for
    another table, a query needs a new checkpoint.

    Parameters
    ----------
    path
        The folder, or its URL in an object store that ``pyarrow.fs`` knows.
    row_id
        The columns that tell rows apart.
    """

    path: str
    row_id: str | Sequence[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute(self.path))
        if not self.row_id:
            raise InvalidChangelogSchema(
                f"the changes between snapshots need the columns that tell rows apart: "
                f"{row_id_forms('snapshots', 'path', 'SnapshotFeed')}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
            )
        object.__setattr__(self, "row_id", tuple(ChangeContract(self.row_id).row_id))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.row_id)

    @classmethod
    def from_url(cls, url: str) -> SnapshotFeed:
        """The feed of ``snapshots:PATH?row_id=NAME``.

        Raises
        ------
        InvalidUrl
            For another parameter.
        InvalidChangelogSchema
            MISSING_ROW_ID.
        """
        parts = FeedUrl.of(url)
        parts.require_known(("row_id",))
        return cls(parts.target, parts.given("row_id"))

    @property
    def url(self) -> str:
        """The feed's URL form."""
        return str(FeedUrl("snapshots", self.path, pairs(row_id=self.row_id)))

    @property
    def name(self) -> str:
        """The folder without a secret in it."""
        return shown_path(self.path)

    def describe(self) -> Description:
        """The newest snapshot's schema.

        Raises
        ------
        FeedUnavailable
            NO_SNAPSHOTS, AMBIGUOUS_NAMES, STORAGE, PARTITIONED_SNAPSHOT or UNREADABLE_FILE.
        InvalidChangelogSchema
            MISSING_COLUMN for a row id that is not there; RESERVED_COLUMN.
        """
        self.__dict__.pop("_folder", None)
        newest = self._first(newest=True)
        found = self._data_schema(newest)
        check_reserved(found, "the newest snapshot")
        check_there(found, "the newest snapshot", self.row_id)
        contract = ChangeContract(
            self.row_id,
            carryover_rows=True,
            intermediate_changes=True,
            updates_as_delete_and_insert=True,
            whole_commits=True,
        )
        planned = Planned(newest.version, len(found))
        return Description(
            f"snapshots:{self.name}", pa.schema([*found, *METADATA_FIELDS]), contract, planned.to_json()
        )

    def _data_schema(self, snapshot: Snapshot) -> pa.Schema:
        """The columns of a snapshot, as its first file has them; all may be NULL."""
        path = snapshot.files[0].path
        with self._folder.reading(path, snapshot.version), self._folder.open(path) as file:
            found = canonical_schema(pq.ParquetFile(file).schema_arrow)
        return pa.schema([pa.field(field.name, nullable(field.type)) for field in found])

    def begin(self) -> int:
        """Where all can be read that is kept; nothing has to be made for a new query."""
        return self.oldest()

    def oldest(self) -> int:
        """The first snapshot's version; 0 where it is number 1."""
        first = self._first().version
        return 0 if first == 1 else first

    def newest(self, after: int) -> int:
        """The last snapshot's version; a look at the folder."""
        return max(after, self._first(newest=True).version)

    def _first(self, *, newest: bool = False) -> Snapshot:
        names = self._folder.names()
        found = next(self._folder.snapshots(names, sorted(names, reverse=newest)), None)
        if found is None:
            raise self._folder.some()
        return found

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """The snapshots of a range, with the rows that are compared for each.

        Raises
        ------
        DataLost
            When the snapshot to compare with is not there.
        """
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
        """The files of a range, small ones together, large ones by their row groups.

        Raises
        ------
        DataLost
            As :meth:`commits`.
        """
        commits = self._range(after, upto)
        return cut((self._with_columns(commit) for commit in commits), rows_per_task)

    def _with_columns(self, commit: FileCommit) -> FileCommit:
        added = [file for kind, file in commit.files if kind == "insert"]
        if not added:
            return commit
        snapshot = Snapshot(commit.version, commit.timestamp, tuple(added))
        return replace(commit, columns=columns_of(self._data_schema(snapshot)))

    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of some files, a batch at a time.

        Raises
        ------
        DataLost
            When a file is gone.
        FeedUnavailable
            UNREADABLE_FILE or SCHEMA_CHANGED.
        """
        planned, columns = Planned.of(schema), columns_of(schema)
        for each in task.slices:
            if planned is not None and each.columns:
                planned.check(f"the snapshots in {self.name}", each.version, columns, each.columns)
            yield from self._slice(each, schema)

    def _slice(self, each: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        def refuse(what: str) -> FeedUnavailable:
            return FeedUnavailable(
                f"{each.path} of {self.name} has another schema than the newest snapshot: {what}. Begin after version "
                f"{each.version}, or write the older snapshots anew",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                version=each.version,
            )

        columns = [name for name in schema.names if name not in METADATA_NAMES]
        with self._folder.reading(each.path, each.version), self._folder.open(each.path) as file:
            for batch in read_piece(file, each.piece, columns):
                yield change_rows(
                    fitted(batch, schema, refuse),
                    schema,
                    change_type=each.change_type or INSERT,
                    version=each.version,
                    timestamp=each.timestamp,
                )

    def logged(self, upto: int) -> None:
        """Nothing: who writes the snapshots removes them."""

    def _range(self, after: int, upto: int) -> Iterator[FileCommit]:
        names = self._folder.names()
        versions = list(names)
        below = self._folder.snapshots(names, [version for version in reversed(versions) if version <= after])
        before = next(below, None)
        for here in self._folder.snapshots(
            names, [version for version in versions if after < version <= upto]
        ):
            if before is None and here.version != 1:
                raise self._lost(after)
            yield self._between(before, here)
            before = here

    def _lost(self, after: int) -> DataLost:
        first, last = self.oldest() + 1, self.newest(-1)
        left = (
            f"changes are there for versions {first} to {last}" if first <= last else "no changes are there"
        )
        return DataLost(
            f"the snapshot that the changes after version {after} begin with is not in {self.name}; {left}",
            after=after,
            first=first,
            last=last,
        )

    def _between(self, before: Snapshot | None, here: Snapshot) -> FileCommit:
        old = before.files if before is not None else ()
        shared = self._folder.shared(old, here.files)
        files = [("delete", file) for file in old if file.path not in shared]
        files += [("insert", file) for file in here.files if file.path not in shared]
        return FileCommit(here.version, here.timestamp, tuple(files))

    @cached_property
    def _folder(self) -> Folder:
        return Folder(self.path, self.name)
