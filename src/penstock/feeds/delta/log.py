"""Reader for Delta transaction logs."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyarrow.fs import FileInfo, FileType

from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.file_commits import DataFile
from penstock.json_text import Json, parse_json, parse_json_object
from penstock.lake.parquet import translating_read_errors
from penstock.lake.storage import Storage, not_a_table
from penstock.parallel import in_parallel

_ROWS = re.compile(r'"numRecords"\s*:\s*(\d+)')
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.(?:.*\.)?(parquet|json)")
_INVALID = (ValueError, KeyError, TypeError, AttributeError)
_KEPT_FILES = 500_000
_KEPT_COMMITS = 10_000
_KEPT_STATES = 1_000
_PROBES = 20


def data_file(action: Json) -> DataFile:
    rows = _ROWS.search(action.get("stats") or "")
    return DataFile(
        path=unquote(action["path"]),
        size=action.get("size") or 0,
        rows=int(rows[1]) if rows else None,
        values=tuple(sorted((action.get("partitionValues") or {}).items())),
        deletion_vector=action.get("deletionVector") is not None,
    )


@dataclass(frozen=True)
class Metadata:
    """The metadata of a table, as a version has set it."""

    id: str
    schema: str
    """The schema as Delta's JSON."""
    configuration: Mapping[str, str]
    partition_columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, action: Json) -> Metadata:
        # In a checkpoint this is a list of pairs, in a commit file an object.
        configuration = dict(action.get("configuration") or {})
        return cls(
            action["id"], action["schemaString"], configuration, tuple(action.get("partitionColumns") or ())
        )

    @cached_property
    def feed(self) -> bool:
        """Whether the change data feed is on: commits record the rows that they change."""
        return self.configuration.get("delta.enableChangeDataFeed", "").lower() == "true"

    @property
    def column_mapping(self) -> str:
        return self.configuration.get("delta.columnMapping.mode") or "none"


@dataclass(frozen=True)
class Protocol:
    """The reader version and features that a table requires."""

    reader: int
    features: tuple[str, ...] = ()

    @classmethod
    def of(cls, action: Json) -> Protocol:
        return cls(action.get("minReaderVersion") or 1, tuple(action.get("readerFeatures") or ()))


@dataclass(frozen=True)
class TableState:
    """The metadata and protocol of a table in a version."""

    metadata: Metadata
    protocol: Protocol


@dataclass(frozen=True)
class CommitFile:
    """A commit, without the files that only rearrange rows (``dataChange`` is false)."""

    version: int
    timestamp: int
    """Microseconds since 1970, UTC."""
    metadata: Metadata | None
    protocol: Protocol | None
    added: tuple[DataFile, ...]
    removed: tuple[DataFile, ...]
    changed: tuple[DataFile, ...]
    """Change data files; if there are any, they have all changes of the commit."""
    digest: str
    """A digest of the commit file."""

    @property
    def files(self) -> int:
        return len(self.added) + len(self.removed) + len(self.changed)

    @property
    def needed(self) -> tuple[tuple[str | None, DataFile], ...]:
        """The files with its changes, each with the change type of its rows; None if each row has its own."""
        if self.changed:
            return tuple((None, file) for file in self.changed)
        return (*(("delete", file) for file in self.removed), *(("insert", file) for file in self.added))

    @property
    def rewrites(self) -> bool:
        """Whether its files may have rows that did not change."""
        return bool(not self.changed and self.added and self.removed)


class Log:
    """The commits of a table, which never change; a limited number of them is cached.

    ``first`` is the oldest version in the log when it was last listed, ``seen`` the newest known version.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._commits: OrderedDict[int, CommitFile] = OrderedDict()
        self._kept_files = 0
        self._states: OrderedDict[int, TableState] = OrderedDict()
        self._list()

    def _list(self) -> None:
        self._checkpoints: dict[int, list[str]] = {}
        commits: dict[int, FileInfo] = {}
        for info in self._storage.list_files("_delta_log"):
            name = info.base_name
            if match := _COMMIT.fullmatch(name):
                commits[int(match[1])] = info
            elif (match := _CHECKPOINT.fullmatch(name)) and info.size:
                self._checkpoints.setdefault(int(match[1]), []).append(f"_delta_log/{name}")
        if not commits:
            raise not_a_table(self._storage.label)
        self.seen = self.first = max(commits)
        self._newest_file = commits[self.seen].size, commits[self.seen].mtime_ns
        # A version is missing if files of the log were deleted manually; a read cannot continue across the
        # gap.
        while self.first - 1 in commits:
            self.first -= 1
        self._readable: int | None = None

    @cached_property
    def horizon(self) -> RetentionHorizon:
        return RetentionHorizon(self._storage, self)

    @property
    def readable(self) -> int:
        """The first version that can be read: from it on, the log has the table's metadata and protocol.

        Delta deletes commits by age and not up to a checkpoint, so the oldest remaining commits may depend on
        a deleted one.
        """
        if self._readable is None:
            commits = self.states(self.first - 1, self.seen)
            known = (commit.version for commit, state in commits if self._is_readable(commit, state))
            self._readable = next(known, self.seen + 1)
        return self._readable

    def _is_readable(self, commit: CommitFile, state: TableState | None) -> bool:
        # Removed files belong to the version before.
        before = not commit.changed and commit.removed and self.state(commit.version - 1) is None
        return state is not None and not before

    def newest(self) -> int:
        for _ in range(_PROBES):
            current, following = self._storage.file_infos(_file(self.seen), _file(self.seen + 1))
            if current.type != FileType.File or (current.size, current.mtime_ns) != self._newest_file:
                raise FeedUnavailableError(
                    f"version {self.seen} of the Delta table {self._storage.label} has changed: the table "
                    "was removed or recreated. Start the query again with a new checkpoint",
                    condition="FEED_UNAVAILABLE.TABLE_REPLACED",
                    table=self._storage.label,
                )
            if following.type != FileType.File:
                return self.seen
            self.seen += 1
            self._newest_file = following.size, following.mtime_ns
        self._list()
        return self.seen

    def commit(self, version: int) -> CommitFile:
        if version not in self._commits:
            self._cache_commit(self._load(version))
        self._commits.move_to_end(version)
        return self._commits[version]

    def _load(self, version: int) -> CommitFile:
        name = _file(version)
        try:
            return self._parse(version, self._storage.read(name))
        except FileNotFoundError:
            raise self.lost(version) from None
        except _INVALID as error:
            raise self._broken_log_error(name, "commit file", version, error) from None

    def _parse(self, version: int, content: bytes) -> CommitFile:
        """Parse a commit file (Delta protocol, "Change Data Files" and "Commit Provenance Information")."""
        files: dict[str, list[DataFile]] = {"add": [], "remove": [], "cdc": []}
        metadata: Metadata | None = None
        protocol: Protocol | None = None
        timestamp_ms: int | None = None
        for line in filter(bytes.strip, content.splitlines()):
            for kind, action in parse_json(line).items():
                if kind in files:
                    if kind == "cdc" or action.get("dataChange", True):
                        files[kind].append(data_file(action))
                elif kind == "metaData":
                    metadata = Metadata.of(action)
                elif kind == "protocol":
                    protocol = Protocol.of(action)
                elif kind == "commitInfo":
                    timestamp_ms = action.get("inCommitTimestamp") or action.get("timestamp")
        if timestamp_ms is None:
            timestamp = self._storage.file_infos(_file(version))[0].mtime_ns // 1000
        else:
            timestamp = int(timestamp_ms) * 1000
        return CommitFile(
            version,
            timestamp,
            metadata,
            protocol,
            added=tuple(files["add"]),
            removed=tuple(files["remove"]),
            changed=tuple(files["cdc"]),
            digest=blake2b(content, digest_size=16).hexdigest(),
        )

    def _broken_log_error(self, name: str, what: str, version: int, error: Exception) -> FeedUnavailableError:
        return FeedUnavailableError(
            f"{name} of the Delta table {self._storage.label} is not a valid {what} ({error!r}): restore it "
            "from a backup",
            condition="FEED_UNAVAILABLE.BROKEN_LOG",
            version=version,
        )

    def lost(self, version: int) -> DataLostError:
        """Return the error for a commit that is no longer in the log."""
        self._list()
        missing = "is no longer in its log"
        what = missing if version < self.first else f"depends on a commit that {missing}"
        return DataLostError(
            f"version {version} of the Delta table {self._storage.label} {what}; versions "
            f"{self.readable} to {self.seen} can be read",
            condition="DATA_LOST.DELTA",
            version=version,
            first=self.readable,
            last=self.seen,
        )

    def _cache_commit(self, commit: CommitFile) -> None:
        self._kept_files += commit.files
        self._commits[commit.version] = commit
        while len(self._commits) > 1 and (
            self._kept_files > _KEPT_FILES or len(self._commits) > _KEPT_COMMITS
        ):
            self._kept_files -= self._commits.popitem(last=False)[1].files

    def commits(self, after: int, upto: int) -> Iterator[CommitFile]:
        return self._read(range(after + 1, upto + 1))

    def backwards(self, version: int) -> Iterator[CommitFile]:
        """Yield the commits from a version down to the first one."""
        return self._read(range(version, self.first - 1, -1))

    def _read(self, versions: range) -> Iterator[CommitFile]:
        # Read ahead, because most of the time is spent waiting for storage.
        position, ahead = 0, 1
        while position < len(versions):
            page = versions[position : position + ahead]
            unread = [version for version in page if version not in self._commits]
            for commit in in_parallel(self._load, unread):
                self._cache_commit(commit)
            for version in page:
                yield self.commit(version)
            position, ahead = position + ahead, min(ahead * 2, 32)

    def states(self, after: int, upto: int) -> Iterator[tuple[CommitFile, TableState | None]]:
        """Yield the commits of a range with the state of the table; None if the log no longer has it."""
        state = self.state(after)
        for commit in self.commits(after, upto):
            if state is None or commit.metadata is not None or commit.protocol is not None:
                state = self.state(commit.version)
            else:
                self._cache_state(commit.version, state)
            yield commit, state

    def state(self, version: int) -> TableState | None:
        """Return the state of the table in a version; None if the log no longer has it."""
        metadata: Metadata | None = None
        protocol: Protocol | None = None
        for latest_metadata, latest_protocol in self._definitions(version):
            metadata, protocol = metadata or latest_metadata, protocol or latest_protocol
            if metadata is not None and protocol is not None:
                state = TableState(metadata, protocol)
                self._cache_state(version, state)
                return state
        return None

    def _cache_state(self, version: int, state: TableState) -> None:
        self._states[version] = state
        if len(self._states) > _KEPT_STATES:
            self._states.popitem(last=False)

    def _definitions(self, version: int) -> Iterator[tuple[Metadata | None, Protocol | None]]:
        """Yield metadata and protocols in the log that apply to a version, latest first."""
        for commit in self.backwards(version):
            yield commit.metadata, commit.protocol
            known = self._states.get(commit.version)
            yield self._checkpoint(commit.version) if known is None else (known.metadata, known.protocol)
        yield self._checkpoint(self.first - 1)
        later = min((checkpoint for checkpoint in self._checkpoints if checkpoint > version), default=None)
        if later is None:
            return
        # What a later checkpoint has also applies to this version, unless a commit in between changed it.
        new_metadata = new_protocol = False
        for commit in self.commits(version, later):
            new_metadata |= commit.metadata is not None
            new_protocol |= commit.protocol is not None
            if new_metadata and new_protocol:
                return
        metadata, protocol = self._checkpoint(later)
        yield None if new_metadata else metadata, None if new_protocol else protocol

    def _checkpoint(self, version: int) -> tuple[Metadata | None, Protocol | None]:
        """Return the metadata and protocol in a checkpoint; None if there is no checkpoint."""
        metadata: Metadata | None = None
        protocol: Protocol | None = None
        for name in self._checkpoints.get(version, ()):
            try:
                for action in self._table_actions(name):
                    if (action.get("metaData") or {}).get("id"):
                        metadata = Metadata.of(action["metaData"])
                    if (action.get("protocol") or {}).get("minReaderVersion"):
                        protocol = Protocol.of(action["protocol"])
            except _INVALID as error:
                raise self._broken_log_error(name, "checkpoint", version, error) from None
            if metadata and protocol:
                break
        return metadata, protocol

    def _table_actions(self, name: str) -> Iterator[Json]:
        """Yield the metadata and protocol actions of a checkpoint."""
        if name.endswith(".json"):
            yield from map(parse_json_object, self._storage.read(name).splitlines())
            return
        with translating_read_errors(name, self._storage.message), self._storage.open(name) as file:
            parquet = pq.ParquetFile(file)
            wanted = [kind for kind in ("metaData", "protocol") if kind in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(columns=wanted):
                for kind, column in zip(batch.schema.names, batch.columns, strict=True):
                    yield from ({kind: value} for value in column.drop_null().to_pylist())


def _file(version: int) -> str:
    return f"_delta_log/{version:020}.json"


class RetentionHorizon:
    """Finder of the oldest version from which on all commits still have their files."""

    def __init__(self, storage: Storage, log: Log) -> None:
        self._storage, self._log = storage, log
        self._oldest: int | None = None
        self._probe: tuple[str, ...] = ()

    def oldest(self, refused: Collection[int] = ()) -> int:
        """Return the version after which all commits have their files, and none is in ``refused``."""
        # VACUUM removes files in the order in which they became obsolete, so it is enough to check the oldest
        # ones.
        if (
            self._oldest is None
            or self._oldest < self._log.readable - 1
            or self._storage.missing_files(self._probe)
        ):
            self._search(refused)
        assert self._oldest is not None
        return self._oldest

    def _search(self, refused: Collection[int]) -> None:
        removed: set[str] = set()
        self._probe = ()
        for commit in self._log.backwards(self._log.newest()):
            removed.update(action.path for action in commit.removed)
            # VACUUM keeps files that the current version uses.
            obsolete = [
                action.path
                for kind, action in commit.needed
                if (kind != "insert" or action.path in removed) and not action.is_outside_table
            ]
            unreadable = commit.version in refused or commit.version < self._log.readable
            if unreadable or self._storage.missing_files(obsolete):
                self._oldest = commit.version
                return
            self._probe = tuple(obsolete) or self._probe
        self._oldest = self._log.first - 1

    def lost(self, version: int, path: str) -> DataLostError:
        """Return the error for a missing file, with the versions that can still be read."""
        self._oldest = None
        try:
            first, last = self.oldest() + 1, self._log.newest()
            left = f"versions {first} to {last} can be read" if first <= last else "no version can be read"
        except (DataLostError, FeedUnavailableError) as error:
            return DataLostError(
                f"{path} of {self._storage.label} is missing, and its table cannot be read: {error.message}",
                condition="DATA_LOST.DELTA",
                version=version,
            )
        return DataLostError(
            f"version {version} of the Delta table {self._storage.label} can no longer be read, because its "
            f"file {path} was vacuumed; {left}",
            condition="DATA_LOST.DELTA",
            version=version,
            first=first,
            last=last,
        )
