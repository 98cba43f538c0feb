"""``DeltaFeed``: the changes of a Delta table, with or without its change data feed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from penstock.arguments import column_names, require
from penstock.errors import DataLost, FeedUnavailable, InvalidChangelogSchema, PenstockError
from penstock.feeds.contract import CHANGE_TYPE, ChangeContract
from penstock.feeds.delta.actions import CommitFile, Metadata
from penstock.feeds.delta.checks import (
    Reach,
    check_files,
    check_metadata,
    check_protocol,
    no_feed,
    replaced,
    went_back,
)
from penstock.feeds.delta.log import Log
from penstock.feeds.delta.values import data_schema, partition_value
from penstock.feeds.file_commits import Estimate, FileCommit, Slice, Task, cut
from penstock.feeds.planned_schema import Column, Planned, columns_of
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    METADATA_NAMES,
    Commit,
    Description,
    begins_late,
    change_rows,
    check_there,
)
from penstock.feeds.urls import FeedUrl, pairs, prefixed, row_id_forms
from penstock.lake.location import absolute, shown_path
from penstock.lake.parquet import count_rows, fitted, read_piece, readable, with_constants
from penstock.lake.storage import Storage, library


@dataclass(frozen=True)
class DeltaFeed:
    """The changes of a Delta table; a version of the table is a commit.

    A version that was written with the change data feed on gives the rows which the writer noted down, or else, as Delta has
    it, the rows of the files that it added and removed. One that was written without gives the rows of all files that it added
    and removed; the rows that did not change are among them, as with every copy-on-write table, and carry-over removal takes
    them out. ``OPTIMIZE`` and ``VACUUM`` give nothing.

    Parameters
    ----------
    path
        The table's folder, or its URL in an object store.
    row_id
        The columns that tell rows apart. A table whose change data feed is off needs them. With them a table whose feed was
        turned on or off is read from any version on; without them from the one where it was turned on.
    storage_options
        deltalake's options for the place, such as credentials.
    overwrites
        Whether commits overwrite the table, or files of it, beside the change data feed. Delta then gives all rows as deletes
        and inserts; those that did not change are dropped as carry-overs, and the others found to be updates. That needs
        ``row_id``, and a shuffle.
    """

    path: str
    row_id: str | Sequence[str] | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    overwrites: bool = False

    def __post_init__(self) -> None:
        columns = column_names("row_id", self.row_id or ())
        require("storage_options", self.storage_options, Mapping, "a mapping, as deltalake takes it")
        given = {str(name): str(value) for name, value in self.storage_options.items()}
        object.__setattr__(self, "path", absolute(self.path))
        object.__setattr__(self, "row_id", columns or None)
        object.__setattr__(self, "storage_options", {name: value for name, value in given.items() if value})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.row_id, self.storage_options, self.overwrites)

    @classmethod
    def from_url(cls, url: str) -> DeltaFeed:
        """The feed of ``delta:PATH?row_id=NAME&overwrites=true&storage.KEY=VALUE``.

        Raises
        ------
        InvalidUrl
            For another parameter.
        """
        parts = FeedUrl.of(url)
        parts.require_known(("row_id", "overwrites"), ("storage.",))
        overwrites = parts.flag("overwrites")
        return cls(parts.target, parts.given("row_id") or None, parts.prefixed("storage."), overwrites)

    @property
    def url(self) -> str:
        """The feed's URL form."""
        options = prefixed("storage.", self.storage_options)
        overwrites = pairs(overwrites="true") if self.overwrites else ()
        return str(FeedUrl("delta", self.path, (*pairs(row_id=self.row_id), *overwrites, *options)))

    @property
    def name(self) -> str:
        """The table's path without a secret in it."""
        return shown_path(self.path)

    def describe(self) -> Description:
        """The table's newest schema, and what its log says of the change data feed.

        Raises
        ------
        FeedUnavailable
            NOT_A_TABLE, STORAGE, READER_FEATURE, COLUMN_MAPPING or SCHEMA.
        InvalidChangelogSchema
            MISSING_ROW_ID, for a table without the change data feed; MISSING_COLUMN, for a row id that is not there.
        MissingDependency
        """
        library("deltalake")
        for looked_up in ("_log", "_reach"):
            self.__dict__.pop(looked_up, None)
        newest = self._log.newest()
        check_protocol(self._log.protocol(newest), self.name)
        metadata = self._log.metadata(newest)
        if metadata is None:
            raise FeedUnavailable(
                f"the log of the Delta table {self.name} does not say what the table is: a checkpoint is missing",
                condition="FEED_UNAVAILABLE.BROKEN_LOG",
                table=self.name,
            )
        check_metadata(metadata, self.name)
        contract, only_changes = self._contract(metadata, newest)
        columns = data_schema(metadata.schema, self.name)
        known = {name.lower() for name in columns.names}
        unknown = [each for each in self.row_id or () if each.split(".")[0].strip("`").lower() not in known]
        check_there(columns, f"the Delta table {self.name}", unknown)
        self.__dict__["_described"] = newest, metadata.id
        planned = Planned(newest, len(columns), only_changes)
        return Description(
            f"delta:{metadata.id}", pa.schema([*columns, *METADATA_FIELDS]), contract, planned.to_json()
        )

    def _contract(self, metadata: Metadata, newest: int) -> tuple[ChangeContract | None, bool]:
        """The contract, and whether all rows are changes."""
        if self.row_id is None:
            if metadata.feed and not self.overwrites:
                return None, True
            why, instead = (
                ("is overwritten, so that rows which did not change have to be found", "")
                if metadata.feed
                else (
                    "has no change data feed, so that its versions are told apart by the rows of their files",
                    " Or turn the feed on for later versions: delta.enableChangeDataFeed=true",
                )
            )
            raise InvalidChangelogSchema(
                f"the Delta table {self.name} {why}: give the columns that tell rows apart: "
                f"{row_id_forms('delta', 'path', 'DeltaFeed')}.{instead}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
            )
        rewritten = self.overwrites or not metadata.feed or self._rewrote_without_feed(newest)
        contract = ChangeContract(
            self.row_id,
            carryover_rows=rewritten,
            intermediate_changes=True,
            updates_as_delete_and_insert=rewritten,
            whole_commits=True,
        )
        return contract, not rewritten

    def _rewrote_without_feed(self, newest: int) -> bool:
        """Whether there are versions among those left that rows' twins come from."""
        return any(_has_twins(*each) for each in self._log.states(self._log.first - 1, newest))

    def begin(self) -> int:
        """The table's first commit; refused where that cannot be read any more, since a new query would miss its rows."""
        oldest = self.oldest()
        if oldest >= 0:
            raise begins_late(self.name, oldest + 1)
        return oldest

    def oldest(self) -> int:
        """The version after which everything is there, and no change data feed is missing that is needed."""
        refused = self._without_feed() if self.row_id is None else frozenset()
        return self._reach.oldest(refused)

    def _without_feed(self) -> frozenset[int]:
        found = self._log.states(self._log.first - 1, self._log.newest())
        return frozenset(commit.version for commit, state in found if _has_twins(commit, state))

    def newest(self, after: int) -> int:
        """The newest version; one or two looks at the log's folder.

        Raises
        ------
        DataLost
            HISTORY_CHANGED, when the table no longer has a version that has been read.
        """
        newest = self._log.newest()
        if newest < after == self.__dict__.get("_logged"):
            raise went_back(self.name, after, newest)
        return max(after, newest)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """The versions of a range, those without changes included."""
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
        """The rows of a commit, by the footers of its files where the log does not say; beyond enough it does not matter."""
        found = sum(action.rows or 0 for _, action in commit.needed)
        unknown = [action.path for _, action in commit.needed if action.rows is None]
        while unknown and found <= enough:
            some, unknown = unknown[:16], unknown[16:]
            found += sum(self._storage.side_by_side(lambda path: self._footer(path, commit.version), some))
        return found

    def _footer(self, path: str, version: int) -> int:
        try:
            with self._readable(path), self._storage.open(path) as file:
                return count_rows(file)
        except FileNotFoundError:
            raise self._reach.lost(version, path) from None

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        """The files of a range, small ones together, large ones by their row groups.

        Raises
        ------
        FeedUnavailable
            FEED_NOT_ENABLED, for versions without the change data feed that rewrote files, where no row id is given;
            DELETION_VECTORS, READER_FEATURE, COLUMN_MAPPING, FILES_ELSEWHERE; TABLE_REPLACED, for versions of another table.
        DataLost
        """
        found: list[FileCommit] = []
        refused: list[int] = []
        for commit, state in self._states(after, upto):
            self._check(commit, state)
            rewritten = _has_twins(commit, state)
            if rewritten and self.row_id is None:
                refused.append(commit.version)
            columns = self._columns(commit.version, state)
            found.append(FileCommit(commit.version, commit.timestamp, commit.needed, rewritten, columns))
        if refused:
            raise no_feed(self.name, refused)
        needed = [(commit.version, file.path) for commit in found for _, file in commit.files]
        gone = set(self._storage.missing([path for _, path in needed]))
        if gone:
            raise self._reach.lost(*next((version, path) for version, path in needed if path in gone))
        return cut(found, rows_per_task)

    def _check(self, commit: CommitFile, state: Metadata | None) -> None:
        """Refuse a version that cannot be read, or not by a query that was planned before it."""
        if commit.protocol is not None:
            check_protocol(commit.protocol, self.name)
        if state is not None:
            check_metadata(state, self.name, commit.version)
            version, table = self.__dict__.get("_described", (commit.version, state.id))
            if commit.version > version and state.id != table:
                raise replaced(self.name, commit.version)
        before = self._log.metadata(commit.version - 1) if commit.metadata is not None else state
        check_files(commit, before, state, self.name)

    def _columns(self, version: int, state: Metadata | None) -> tuple[Column, ...]:
        """The columns of a version, which a query that was planned before has to know."""
        if state is None:
            return ()
        try:
            return columns_of(data_schema(state.schema, self.name))
        except PenstockError:
            if version > self.__dict__.get("_described", (version,))[0]:
                raise
            # The table has other columns by now.
            return ()

    def read(self, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of some files, a batch at a time.

        Raises
        ------
        DataLost
            When a file is gone.
        FeedUnavailable
            UNREADABLE_FILE, SCHEMA_CHANGED; FEED_NOT_ENABLED, when the feed was turned off after the query was planned.
        """
        planned = Planned.of(schema)
        read = columns_of(schema)
        for each in task.slices:
            if planned is not None and each.columns:
                planned.check(f"the Delta table {self.name}", each.version, read, each.columns)
            if planned is not None and planned.only_changes and each.rewritten:
                raise FeedUnavailable(
                    f"version {each.version} of the Delta table {self.name} was written without the change data feed, which was "
                    "on when this query was made: make the query anew, which then removes the rows that did not change",
                    condition="FEED_UNAVAILABLE.FEED_NOT_ENABLED",
                    versions=[each.version],
                )
            yield from self._slice(each, schema)

    def _slice(self, each: Slice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        def refuse(what: str) -> FeedUnavailable:
            return FeedUnavailable(
                f"version {each.version} of the Delta table {self.name} has files of another schema: {what}. Begin after it "
                f"(starting_version={each.version + 1}, with a new checkpoint), and bring in the table as it was at that version in "
                f"another way (file {each.path})",
                condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
                version=each.version,
            )

        names = {name.lower(): name for name in schema.names}
        constants = {
            names[name.lower()]: partition_value(name, text, schema.field(names[name.lower()]).type)
            for name, text in each.values
            if name.lower() in names
        }
        stored = [name for name in schema.names if name not in constants and name not in METADATA_NAMES]
        wanted = [*stored, CHANGE_TYPE] if each.change_type is None else stored
        try:
            with self._readable(each.path), self._storage.open(each.path) as file:
                for batch in read_piece(file, each.piece, wanted):
                    data = with_constants(fitted(batch, schema, refuse), constants)
                    yield change_rows(
                        data,
                        schema,
                        change_type=each.change_type or data.column(CHANGE_TYPE),
                        version=each.version,
                        timestamp=each.timestamp,
                    )
        except FileNotFoundError:
            raise self._reach.lost(each.version, each.path) from None

    def _readable(self, path: str) -> AbstractContextManager[None]:
        return readable(f"{path} of {self.name}", self._storage.told)

    def commit_name(self, version: int) -> str | None:
        """A digest of the commit file."""
        if not self._log.first <= version <= self._log.seen:
            return None
        try:
            return self._log.commit(version).digest
        except DataLost:
            return None

    def logged(self, upto: int) -> None:
        """The table keeps its versions as it is set up to; but from here on a log that does not reach so far is another one."""
        self.__dict__["_logged"] = upto

    def _states(self, after: int, upto: int) -> Iterator[tuple[CommitFile, Metadata | None]]:
        after, upto = max(after, -1), min(upto, self._log.newest())
        if after < upto and after + 1 < self._log.first:
            raise self._log.lost(after + 1)
        return self._log.states(after, upto)

    @cached_property
    def _storage(self) -> Storage:
        return Storage(self.path, self.storage_options, self.name)

    @cached_property
    def _log(self) -> Log:
        return Log(self._storage, self.name)

    @cached_property
    def _reach(self) -> Reach:
        return Reach(self._storage, self._log, self.name)


def _has_twins(commit: CommitFile, state: Metadata | None) -> bool:
    """Whether rows that did not change are among those of a commit's files."""
    return commit.rewrites and not (state is not None and state.feed)
