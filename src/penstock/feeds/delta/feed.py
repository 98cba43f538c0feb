"""``DeltaFeed``: the changes of a Delta table, with or without its change data feed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.arguments import column_names, require
from penstock.errors import DataLostError, FeedUnavailableError, InvalidChangelogSchemaError, PenstockError
from penstock.feeds.contract import ChangeContract, convert_fields
from penstock.feeds.delta import checks
from penstock.feeds.delta.log import CommitFile, Log, Metadata, TableState
from penstock.feeds.file_commits import (
    Column,
    DataFile,
    FileCommit,
    FileFeed,
    Planned,
    Slice,
    Task,
    columns_of,
    cut,
)
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    Commit,
    Description,
    PlannedRead,
    check_columns_exist,
    has_no_key,
    history_changed,
)
from penstock.feeds.urls import FeedUrl, pairs, prefixed, row_id_forms
from penstock.lake.parquet import translating_read_errors
from penstock.lake.storage import Storage, absolute_path, import_deltalake, path_for_messages

log = logging.getLogger("penstock.feeds")


@dataclass(frozen=True)
class DeltaFeed:
    """The changes of a Delta table; a version of the table is a commit.

    A version that was written with the change data feed on has the rows that the writer recorded. Without
    recorded rows (the feed was off, or the version is an overwrite or a ``RESTORE``), all rows of the files
    that it removed are deletes, and all rows of the files that it added are inserts; with ``row_id``,
    unchanged rows are dropped from these. ``OPTIMIZE`` and ``VACUUM`` have no change rows.

    Parameters
    ----------
    path
        The table's folder, or its URL in an object store.
    row_id
        The columns that identify rows, required if the table's change data feed is off; all columns if the
        table has no key. With them, a read can start at any version, even before the feed was turned on, and
        unchanged rows are dropped. Without them, a read cannot start before the version that turned the feed
        on, and an overwrite has all rows as changes (logged as ``rows_overwritten``).
    storage_options
        deltalake's storage options, such as credentials.
    overwrites
        Whether a query always shuffles rows to drop unchanged ones; requires ``row_id``. By default a query
        does this if the table's log has a version that needs it when the query starts. If the first such
        version is committed later, the query stops and has to be started again.
    """

    path: str
    row_id: str | Sequence[str] | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    overwrites: bool = False

    def __repr__(self) -> str:
        return f"DeltaFeed({self.name!r}, row_id={self.row_id!r}, overwrites={self.overwrites!r})"

    def __post_init__(self) -> None:
        require("storage_options", self.storage_options, Mapping, "a mapping, as deltalake takes it")
        require("overwrites", self.overwrites, bool, "True or False")
        options = {str(name): str(value) for name, value in self.storage_options.items()}
        convert_fields(
            self,
            path=absolute_path(self.path),
            row_id=column_names("row_id", self.row_id or ()) or None,
            storage_options={name: value for name, value in options.items() if value},
        )

    @classmethod
    def from_url(cls, url: str) -> DeltaFeed:
        """Return the feed of ``delta:PATH?row_id=NAME&overwrites=true&storage.KEY=VALUE``.

        Raises
        ------
        InvalidUrlError
            For an unknown parameter.
        """
        parts = FeedUrl.of(url)
        parts.require_known(("row_id", "overwrites"), ("storage.",))
        overwrites = parts.flag("overwrites")
        return cls(parts.target, parts.all("row_id") or None, parts.prefixed("storage."), overwrites)

    @property
    def url(self) -> str:
        """The feed's URL form."""
        options = prefixed("storage.", self.storage_options)
        overwrites = pairs(overwrites="true") if self.overwrites else ()
        return str(FeedUrl("delta", self.path, (*pairs(row_id=self.row_id), *overwrites, *options)))

    @property
    def name(self) -> str:
        """The table's path for messages, without secrets."""
        return path_for_messages(self.path)

    def open(self, planned: PlannedRead | None = None) -> OpenDeltaFeed:
        """Open the feed in this process."""
        return OpenDeltaFeed(self)


class OpenDeltaFeed(FileFeed):
    """A Delta table that is open in one process; its log is read on first use."""

    beginning = -1

    def __init__(self, feed: DeltaFeed) -> None:
        self.name, self.table, self._feed = feed.name, f"the Delta table {feed.name}", feed
        self._storage = Storage(feed.path, feed.storage_options, feed.name)
        self._opened: Log | None = None
        self._described: tuple[int, str] | None = None
        """The newest version at the last ``describe()``, and the table's id."""
        self._logged_version: int | None = None

    def describe(self, after: int | None = None) -> Description:
        import_deltalake("deltalake")
        self._opened = None
        newest = self._log.newest()
        state = self._log.state(newest)
        if state is None:
            raise FeedUnavailableError(
                f"the log of {self.table} has no metadata: restore its missing checkpoint",
                condition="FEED_UNAVAILABLE.BROKEN_LOG",
                table=self.name,
            )
        checks.check_state(state, self.name)
        metadata = state.metadata
        columns = checks.data_schema(metadata.schema, self.name)
        contract, only_changes = self._contract(metadata, newest, columns)
        known = {name.lower() for name in columns.names}
        unknown = [
            name for name in self._feed.row_id or () if name.split(".")[0].strip("`").lower() not in known
        ]
        check_columns_exist(columns, self.table, unknown)
        self._described = newest, metadata.id
        planned = Planned(newest, len(columns), only_changes)
        return Description(
            f"delta:{metadata.id}", pa.schema([*columns, *METADATA_FIELDS]), contract, planned.to_json()
        )

    def _contract(
        self, metadata: Metadata, newest: int, columns: pa.Schema
    ) -> tuple[ChangeContract | None, bool]:
        """Return the contract, and whether every row is a change, so that no pass drops carry-over rows."""
        if self._feed.row_id is None:
            if metadata.feed and not self._feed.overwrites:
                return None, True
            why, alternative = (
                ("has overwrites, so unchanged rows have to be dropped", "")
                if metadata.feed
                else (
                    "has no change data feed, so rows of its files have to be compared",
                    " Or turn the feed on for later versions: delta.enableChangeDataFeed=true",
                )
            )
            raise InvalidChangelogSchemaError(
                f"{self.table} {why}: name the columns that identify rows: "
                f"{row_id_forms('delta', 'path', 'DeltaFeed')}.{alternative}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
            )
        rewritten = (
            self._feed.overwrites
            or not metadata.feed
            or any(commit.rewrites for commit, _ in self._remaining(newest))
        )
        contract = ChangeContract(
            self._feed.row_id,
            carryover_rows=rewritten,
            intermediate_changes=True,
            updates_as_delete_and_insert=rewritten,
            whole_commits=True,
            nullable_row_id=has_no_key(self._feed.row_id, columns),
        )
        return contract, not rewritten

    def _remaining(self, newest: int) -> Iterator[tuple[CommitFile, TableState]]:
        """Yield the versions that can still be read from the log."""
        return self._states(self._log.readable - 1, newest)

    def oldest(self) -> int:
        """Return the version after which all files exist, and the feed was on if it is required."""
        newest = self._log.newest()
        refused = (
            {
                commit.version
                for commit, state in self._remaining(newest)
                if commit.rewrites and not state.metadata.feed
            }
            if self._feed.row_id is None
            else ()
        )
        return self._log.horizon.oldest(refused)

    def newest(self, after: int) -> int:
        newest = self._log.newest()
        if newest < after == self._logged_version:
            raise history_changed(self.table, after, newest)
        return max(after, newest)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        for commit, _ in self._states(after, upto):
            count = self._count_rows(commit.version, [file for _, file in commit.needed], rows)
            yield Commit(commit.version, commit.timestamp, count)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        commits: list[FileCommit] = []
        refused: list[int] = []
        overwritten: list[int] = []
        for commit, state in self._states(after, upto):
            self._check_commit(commit, state)
            if self._feed.row_id is None and commit.rewrites:
                (overwritten if state.metadata.feed else refused).append(commit.version)
            columns = self._columns(commit.version, state)
            commits.append(
                FileCommit(commit.version, commit.timestamp, commit.needed, commit.rewrites, columns)
            )
        if refused:
            raise checks.no_feed(self.name, refused)
        if overwritten:
            log.warning(
                "%s of %s overwrote rows, and all of these count as changes, even unchanged rows: set "
                "row_id to read only the rows that differ",
                checks.ranges(overwritten),
                self.table,
                extra={"action": "rows_overwritten", "table": self.name, "versions": overwritten},
            )
        needed = [(commit.version, file.path) for commit in commits for _, file in commit.files]
        missing = set(self._storage.missing_files([path for _, path in needed]))
        if missing:
            raise self._log.horizon.lost(
                *next((version, path) for version, path in needed if path in missing)
            )
        return cut(commits, rows_per_task)

    def _check_commit(self, commit: CommitFile, state: TableState) -> None:
        """Refuse a version that cannot be read, or that belongs to another table than the planned one."""
        checks.check_state(state, self.name, commit.version)
        version, table = self._described or (commit.version, state.metadata.id)
        if commit.version > version and state.metadata.id != table:
            raise checks.replaced(self.name, commit.version)
        before = self._log.state(commit.version - 1)
        if before is not None and any(kind == "delete" for kind, _ in commit.needed):
            # The removed files were written in earlier versions.
            checks.check_state(before, self.name, commit.version)
        checks.check_files(commit, before, state, self.name)

    def _columns(self, version: int, state: TableState) -> tuple[Column, ...]:
        """Return the columns of a version; raise for an unreadable schema only after the planned version."""
        try:
            return columns_of(checks.data_schema(state.metadata.schema, self.name))
        except PenstockError:
            if self._described is not None and version > self._described[0]:
                raise
            # The columns have changed since that version.
            return ()

    def _check(self, part: Slice, planned: Planned, columns: tuple[Column, ...]) -> None:
        super()._check(part, planned, columns)
        version = part.commit.version
        if planned.only_changes and part.commit.rewritten and self._feed.row_id is not None:
            raise FeedUnavailableError(
                f"version {version} of {self.table} rewrites rows without recording which ones changed. "
                "Start the query again with the same checkpoint (and call read_stream again, if it uses it): "
                "it then removes unchanged rows",
                condition="FEED_UNAVAILABLE.ROWS_OVERWRITTEN",
                table=self.name,
                version=version,
            )

    def _refused(self, part: Slice, reason: str) -> FeedUnavailableError:
        version = part.commit.version
        return FeedUnavailableError(
            f"version {version} of {self.table} has files with another schema: {reason}. Begin with "
            f"starting_version={version + 1} and a new checkpoint, and load the earlier rows separately "
            f"(file {part.file.path})",
            condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
            version=version,
        )

    def _constants(self, part: Slice, schema: pa.Schema) -> dict[str, pa.Scalar]:
        names = {name.lower(): name for name in schema.names}
        values = {names[name.lower()]: text for name, text in part.file.values if name.lower() in names}
        return {
            name: checks.partition_value(name, text, schema.field(name).type) for name, text in values.items()
        }

    @contextmanager
    def _open_file(self, file: DataFile, version: int) -> Iterator[pa.NativeFile]:
        path = file.path
        try:
            with (
                translating_read_errors(f"{path} of {self.name}", self._storage.message),
                self._storage.open(path) as opened,
            ):
                yield opened
        except FileNotFoundError:
            raise self._log.horizon.lost(version, path) from None

    def commit_name(self, version: int) -> str | None:
        if not self._log.first <= version <= self._log.seen:
            return None
        try:
            return self._log.commit(version).digest
        except DataLostError:
            return None

    def logged(self, upto: int) -> None:
        """Record the logged version: a log that ends before it has another history."""
        self._logged_version = upto

    def _states(self, after: int, upto: int) -> Iterator[tuple[CommitFile, TableState]]:
        after, upto = max(after, -1), min(upto, self._log.newest())
        if after < upto and after + 1 < self._log.readable:
            raise self._log.lost(after + 1)
        for commit, state in self._log.states(after, upto):
            if state is None:
                raise self._log.lost(commit.version)
            yield commit, state

    @property
    def _log(self) -> Log:
        if self._opened is None:
            self._opened = Log(self._storage)
        return self._opened
