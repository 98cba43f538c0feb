"""An open Delta feed: its log, its files, and the table as it was described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from penstock.errors import DataLost, FeedUnavailable, InvalidChangelogSchema, PenstockError
from penstock.feeds.contract import CHANGE_TYPE, ChangeContract
from penstock.feeds.delta.actions import CommitFile, Metadata
from penstock.feeds.delta.checks import (
    check_files,
    check_metadata,
    check_protocol,
    history_shortened,
    no_feed,
    replaced,
)
from penstock.feeds.delta.log import Log
from penstock.feeds.delta.retention_horizon import RetentionHorizon
from penstock.feeds.delta.values import data_schema, partition_value
from penstock.feeds.file_commits import Estimate, FileCommit, Slice, Task, cut
from penstock.feeds.planned_schema import Column, Planned, columns_of
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    METADATA_NAMES,
    Commit,
    Description,
    OpenChangelog,
    begins_late,
    change_rows,
    check_columns_exist,
)
from penstock.feeds.urls import row_id_forms
from penstock.lake.parquet import count_rows, fitted, read_piece, readable, with_constants
from penstock.lake.storage import Storage, library


class OpenDeltaFeed(OpenChangelog):
    """A Delta table that is open in one process; its log is read when it is first needed."""

    def __init__(
        self,
        name: str,
        path: str,
        row_id: Sequence[str] | None,
        storage_options: Mapping[str, str],
        overwrites: bool,
    ) -> None:
        self.name, self._row_id, self._overwrites = name, row_id, overwrites
        self._storage = Storage(path, storage_options, name)
        self._table: tuple[Log, RetentionHorizon] | None = None
        self._described: tuple[int, str] | None = None
        """The newest version when the table was described, and the table's id."""
        self._logged: int | None = None

    def describe(self, after: int | None = None) -> Description:
        """Describe the newest version of the table."""
        library("deltalake")
        self._table = None
        newest = self._log.newest()
        check_protocol(self._log.protocol(newest), self.name)
        metadata = self._log.metadata(newest)
        if metadata is None:
            raise FeedUnavailable(
                f"the log of the Delta table {self.name} has no metadata: restore its missing checkpoint",
                condition="FEED_UNAVAILABLE.BROKEN_LOG",
                table=self.name,
            )
        check_metadata(metadata, self.name)
        contract, only_changes = self._contract(metadata, newest)
        columns = data_schema(metadata.schema, self.name)
        known = {name.lower() for name in columns.names}
        unknown = [name for name in self._row_id or () if name.split(".")[0].strip("`").lower() not in known]
        check_columns_exist(columns, f"the Delta table {self.name}", unknown)
        self._described = newest, metadata.id
        planned = Planned(newest, len(columns), only_changes)
        return Description(
            f"delta:{metadata.id}", pa.schema([*columns, *METADATA_FIELDS]), contract, planned.to_json()
        )

    def _contract(self, metadata: Metadata, newest: int) -> tuple[ChangeContract | None, bool]:
        """Return the contract, and whether all rows are changes."""
        if self._row_id is None:
            if metadata.feed and not self._overwrites:
                return None, True
            why, instead = (
                ("is overwritten, so unchanged rows have to be found", "")
                if metadata.feed
                else (
                    "has no change data feed, so the rows of its files have to be compared",
                    " Or turn the feed on for later versions: delta.enableChangeDataFeed=true",
                )
            )
            raise InvalidChangelogSchema(
                f"the Delta table {self.name} {why}: give the columns that identify rows: "
                f"{row_id_forms('delta', 'path', 'DeltaFeed')}.{instead}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
            )
        rewritten = self._overwrites or not metadata.feed or self._rewrote_without_feed(newest)
        contract = ChangeContract(
            self._row_id,
            carryover_rows=rewritten,
            intermediate_changes=True,
            updates_as_delete_and_insert=rewritten,
            whole_commits=True,
        )
        return contract, not rewritten

    def _rewrote_without_feed(self, newest: int) -> bool:
        """Whether one of the remaining versions has unchanged rows."""
        return any(_has_unchanged_rows(*version) for version in self._log.states(self._log.first - 1, newest))

    def begin(self) -> int:
        """Return the table's beginning; refused if its first commits can no longer be read."""
        oldest = self.oldest()
        if oldest >= 0:
            raise begins_late(self.name, oldest + 1)
        return oldest

    def oldest(self) -> int:
        """Return the version after which all files exist, with the change data feed where it is needed."""
        refused = self._without_feed() if self._row_id is None else frozenset()
        return self._horizon.oldest(refused)

    def _without_feed(self) -> frozenset[int]:
        versions = self._log.states(self._log.first - 1, self._log.newest())
        return frozenset(commit.version for commit, state in versions if _has_unchanged_rows(commit, state))

    def newest(self, after: int) -> int:
        """Return the newest version; lists one or two files."""
        newest = self._log.newest()
        if newest < after == self._logged:
            raise history_shortened(self.name, after, newest)
        return max(after, newest)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """Yield the versions of a range, including those without changes."""
        estimate = Estimate(())
        for commit, _ in self._states(after, upto):
            actions = [action for _, action in commit.needed]
            count = (
                sum(estimate.rows(action) for action in actions)
                if rows is None
                else self._count(commit, rows)
            )
            yield Commit(commit.version, commit.timestamp, count)

    def _count(self, commit: CommitFile, enough: int) -> int:
        """Count the rows of a commit from the log or the footers of files; stop once there are enough."""
        count = sum(action.rows or 0 for _, action in commit.needed)
        unknown = [action.path for _, action in commit.needed if action.rows is None]
        while unknown and count <= enough:
            some, unknown = unknown[:16], unknown[16:]
            count += sum(self._storage.in_parallel(lambda path: self._rows_in(path, commit.version), some))
        return count

    def _rows_in(self, path: str, version: int) -> int:
        try:
            with self._readable(path), self._storage.open(path) as file:
                return count_rows(file)
        except FileNotFoundError:
            raise self._horizon.lost(version, path) from None

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        """Divide the files of a range: small ones together, large ones by their row groups."""
        commits: list[FileCommit] = []
        refused: list[int] = []
        for commit, state in self._states(after, upto):
            self._check(commit, state)
            rewritten = _has_unchanged_rows(commit, state)
            if rewritten and self._row_id is None:
                refused.append(commit.version)
            columns = self._columns(commit.version, state)
            commits.append(FileCommit(commit.version, commit.timestamp, commit.needed, rewritten, columns))
        if refused:
            raise no_feed(self.name, refused)
        needed = [(commit.version, file.path) for commit in commits for _, file in commit.files]
        missing = set(self._storage.missing([path for _, path in needed]))
        if missing:
            raise self._horizon.lost(*next((version, path) for version, path in needed if path in missing))
        return cut(commits, rows_per_task)

    def _check(self, commit: CommitFile, state: Metadata | None) -> None:
        """Refuse a version that cannot be read, or not by a query that was planned before it."""
        if commit.protocol is not None:
            check_protocol(commit.protocol, self.name)
        if state is not None:
            check_metadata(state, self.name, commit.version)
            version, table = self._described or (commit.version, state.id)
            if commit.version > version and state.id != table:
                raise replaced(self.name, commit.version)
        before = self._log.metadata(commit.version - 1) if commit.metadata is not None else state
        check_files(commit, before, state, self.name)

    def _columns(self, version: int, state: Metadata | None) -> tuple[Column, ...]:
        """Return the columns of a version, which a query that was planned earlier has to know."""
        if state is None:
            return ()
        try:
            return columns_of(data_schema(state.schema, self.name))
        except PenstockError:
            if self._described is not None and version > self._described[0]:
                raise
            # The table has other columns now.
            return ()

    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the rows of some files, a batch at a time."""
        planned = Planned.of(schema)
        read = columns_of(schema)
        for piece in task.slices:
            if planned is not None and piece.columns:
                planned.check(f"the Delta table {self.name}", piece.version, read, piece.columns)
            if planned is not None and planned.only_changes and piece.rewritten:
                raise FeedUnavailable(
                    f"version {piece.version} of the Delta table {self.name} was written without the change "
                    "data feed, which was on when this query was planned: create the query again, so that it "
                    "removes unchanged rows",
                    condition="FEED_UNAVAILABLE.FEED_NOT_ENABLED",
                    versions=[piece.version],
                )
            yield from self._slice(piece, schema)

    def _slice(self, piece: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        def refuse(reason: str) -> FeedUnavailable:
            return FeedUnavailable(
                f"version {piece.version} of the Delta table {self.name} has files of another schema: "
                f"{reason}. Begin with starting_version={piece.version + 1} and a new checkpoint, and load "
                f"the earlier rows separately (file {piece.path})",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                version=piece.version,
            )

        names = {name.lower(): name for name in schema.names}
        constants = {
            names[name.lower()]: partition_value(name, text, schema.field(names[name.lower()]).type)
            for name, text in piece.values
            if name.lower() in names
        }
        stored = [name for name in schema.names if name not in constants and name not in METADATA_NAMES]
        wanted = [*stored, CHANGE_TYPE] if piece.change_type is None else stored
        try:
            with self._readable(piece.path), self._storage.open(piece.path) as file:
                for batch in read_piece(file, piece.piece, wanted):
                    data = with_constants(fitted(batch, schema, refuse), constants)
                    yield change_rows(
                        data,
                        schema,
                        change_type=piece.change_type or data.column(CHANGE_TYPE),
                        version=piece.version,
                        timestamp=piece.timestamp,
                    )
        except FileNotFoundError:
            raise self._horizon.lost(piece.version, piece.path) from None

    def _readable(self, path: str) -> AbstractContextManager[None]:
        return readable(f"{path} of {self.name}", self._storage.message)

    def commit_name(self, version: int) -> str | None:
        """Return a digest of the commit file."""
        if not self._log.first <= version <= self._log.seen:
            return None
        try:
            return self._log.commit(version).digest
        except DataLost:
            return None

    def logged(self, upto: int) -> None:
        """Note that a log that ends before this version is another history."""
        self._logged = upto

    def _states(self, after: int, upto: int) -> Iterator[tuple[CommitFile, Metadata | None]]:
        after, upto = max(after, -1), min(upto, self._log.newest())
        if after < upto and after + 1 < self._log.first:
            raise self._log.lost(after + 1)
        return self._log.states(after, upto)

    @property
    def _log(self) -> Log:
        return self._opened()[0]

    @property
    def _horizon(self) -> RetentionHorizon:
        return self._opened()[1]

    def _opened(self) -> tuple[Log, RetentionHorizon]:
        if self._table is None:
            log = Log(self._storage, self.name)
            self._table = log, RetentionHorizon(self._storage, log, self.name)
        return self._table


def _has_unchanged_rows(commit: CommitFile, state: Metadata | None) -> bool:
    """Whether a commit's files have rows that did not change."""
    return commit.rewrites and not (state is not None and state.feed)
