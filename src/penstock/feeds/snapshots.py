"""``SnapshotFeed``: the changes between the snapshots of a table in a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem, SubTreeFileSystem

from penstock.arrow.schema import canonical_schema
from penstock.errors import DataLostError, FeedUnavailableError, InvalidChangelogSchemaError
from penstock.feeds.contract import DELETE, INSERT, ChangeContract, convert_fields
from penstock.feeds.file_commits import DataFile, FileCommit, FileFeed, Planned, Slice, Task, columns_of, cut
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    Commit,
    Description,
    PlannedRead,
    check_columns_exist,
    check_reserved,
    has_no_key,
)
from penstock.feeds.urls import FeedUrl, pairs, row_id_forms
from penstock.lake.parquet import nullable, translating_read_errors
from penstock.lake.storage import absolute_path, is_url, path_for_messages

_UNFINISHED = "_temporary"
_MAX_DIGITS = 18
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class SnapshotFeed:
    """The changes from each snapshot of a table to the next one.

    Every Parquet file in the folder, and every subfolder with Parquet files, is a snapshot. Names that begin
    with ``_`` or ``.`` are ignored, and so are folders that Spark is still writing. The version of a snapshot
    is the number in its name: 7 for ``orders-0007.parquet``, 20260131 for ``2026-01-31``. Therefore versions
    do not change when older snapshots are removed. All names have to be equal except for their digits. If a
    name has several numbers, each needs the same number of digits in every name, so that versions have the
    order of the names.

    A version has the rows of the previous snapshot as deletes and its own rows as inserts; carry-over removal
    leaves the difference. The feed begins at the first snapshot, which has no changes itself unless its
    number is 1, because before number 1 the table was empty.

    A snapshot must not change: write it under another name (``_new``), then rename it. Remove the oldest
    snapshots first, and only those that no query still has to compare with the next one. A restarted query is
    refused if the snapshot that it read last was removed or has other files now.

    Parameters
    ----------
    path
        The folder, or its URL in an object store that ``pyarrow.fs`` supports.
    row_id
        The columns that identify rows; all columns if the table has no key.
    """

    path: str
    row_id: str | Sequence[str]

    def __repr__(self) -> str:
        return f"SnapshotFeed({self.name!r}, row_id={self.row_id!r})"

    def __post_init__(self) -> None:
        if not self.row_id:
            raise InvalidChangelogSchemaError(
                "changes between snapshots need the columns that identify rows: "
                f"{row_id_forms('snapshots', 'path', 'SnapshotFeed')}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
            )
        convert_fields(self, path=absolute_path(self.path), row_id=ChangeContract(self.row_id).row_id)

    @classmethod
    def from_url(cls, url: str) -> SnapshotFeed:
        """Return the feed of ``snapshots:PATH?row_id=NAME``.

        Raises
        ------
        InvalidUrlError
            For an unknown parameter.
        InvalidChangelogSchemaError
            When the row id is missing.
        """
        parts = FeedUrl.of(url)
        parts.require_known(("row_id",))
        return cls(parts.target, parts.all("row_id"))

    @property
    def url(self) -> str:
        """The feed's URL form."""
        return str(FeedUrl("snapshots", self.path, pairs(row_id=self.row_id)))

    @property
    def name(self) -> str:
        """The folder for messages, without secrets."""
        return path_for_messages(self.path)

    def open(self, planned: PlannedRead | None = None) -> OpenSnapshotFeed:
        """Open the feed in this process."""
        return OpenSnapshotFeed(self)


class OpenSnapshotFeed(FileFeed):
    """A folder of snapshots that is open in one process."""

    def __init__(self, feed: SnapshotFeed) -> None:
        self.name, self._feed = feed.name, feed
        self.table = f"the snapshots in {feed.name}"
        self._folder = Folder(feed.path, feed.name)

    def describe(self, after: int | None = None) -> Description:
        self._folder = Folder(self._feed.path, self.name)
        newest = self._first(newest=True)
        data = self._data_schema(newest.files[0], newest.version)
        check_reserved(data.names, "the newest snapshot")
        check_columns_exist(data, "the newest snapshot", self._feed.row_id)
        contract = ChangeContract(
            self._feed.row_id,
            carryover_rows=True,
            intermediate_changes=True,
            updates_as_delete_and_insert=True,
            whole_commits=True,
            nullable_row_id=has_no_key(self._feed.row_id, data),
        )
        schema = pa.schema([*data, *METADATA_FIELDS])
        plan = Planned(newest.version, len(data)).to_json()
        return Description(f"snapshots:{self.name}", schema, contract, plan)

    def _data_schema(self, file: DataFile, version: int) -> pa.Schema:
        """Return the columns of a snapshot's file; all are nullable."""
        with self._open_file(file, version) as opened:
            data = canonical_schema(pq.ParquetFile(opened).schema_arrow)
        return pa.schema([pa.field(field.name, nullable(field.type)) for field in data])

    def oldest(self) -> int:
        """Return the first snapshot's version; 0 if it is number 1."""
        first = self._first().version
        return 0 if first == 1 else first

    def newest(self, after: int) -> int:
        return max(after, self._first(newest=True).version)

    def _first(self, *, newest: bool = False) -> Snapshot:
        names = self._folder.names()
        snapshot = next(self._folder.snapshots(names, sorted(names, reverse=newest)), None)
        if snapshot is None:
            raise FeedUnavailableError(
                f"there are no snapshots in {self.name}: write .parquet files, or folders of them, with a "
                "number in their names",
                condition="FEED_UNAVAILABLE.NO_SNAPSHOTS",
                path=self.name,
            )
        return snapshot

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        """Yield the snapshots of a range, each with the number of rows to compare."""
        for commit in self._range(after, upto):
            count = self._count_rows(commit.version, [file for _, file in commit.files], rows)
            yield Commit(commit.version, commit.timestamp, count)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[Task]:
        return cut(map(self._with_columns, self._range(after, upto)), rows_per_task)

    def _with_columns(self, commit: FileCommit) -> FileCommit:
        added = next((file for kind, file in commit.files if kind == INSERT), None)
        if added is None:
            return commit
        return replace(commit, columns=columns_of(self._data_schema(added, commit.version)))

    def _open_file(self, file: DataFile, version: int) -> AbstractContextManager[pa.NativeFile]:
        return self._folder.open(file.path, version)

    def _refused(self, part: Slice, reason: str) -> FeedUnavailableError:
        return FeedUnavailableError(
            f"the schema of {part.file.path} of {self.name} differs from the newest snapshot: {reason}. "
            f"Begin after version {part.commit.version}, or rewrite the older snapshots",
            condition="FEED_UNAVAILABLE.SCHEMA_CHANGED",
            version=part.commit.version,
        )

    def commit_name(self, version: int) -> str | None:
        """Return a digest of a snapshot's files; an empty name if it was removed, but not the older ones.

        Without the snapshot that was read last, the next one would be compared with an older one.
        """
        names = self._folder.names()
        wanted = [version] if version in names else []
        snapshot = next(self._folder.snapshots(names, wanted), None)
        if snapshot is not None:
            return snapshot.digest
        return "" if any(other < version for other in names) else None

    def _range(self, after: int, upto: int) -> Iterator[FileCommit]:
        names = self._folder.names()
        versions = list(names)
        below = self._folder.snapshots(names, [version for version in reversed(versions) if version <= after])
        before = next(below, None)
        in_range = [version for version in versions if after < version <= upto]
        for snapshot in self._folder.snapshots(names, in_range):
            if before is None and snapshot.version != 1:
                raise self._lost(after)
            yield self._changes_between(before, snapshot)
            before = snapshot

    def _lost(self, after: int) -> DataLostError:
        first, last = self.oldest() + 1, self.newest(-1)
        left = f"versions {first} to {last} can be read" if first <= last else "no changes can be read"
        return DataLostError(
            f"the snapshot before version {after + 1}, from which its changes are computed, is missing from "
            f"{self.name}; {left}",
            condition="DATA_LOST.FILE_MISSING",
            after=after,
            first=first,
            last=last,
        )

    def _changes_between(self, before: Snapshot | None, snapshot: Snapshot) -> FileCommit:
        old = before.files if before is not None else ()
        shared = self._folder.shared(old, snapshot.files)
        files = [(DELETE, file) for file in old if file.path not in shared]
        files += [(INSERT, file) for file in snapshot.files if file.path not in shared]
        return FileCommit(snapshot.version, snapshot.timestamp, tuple(files))


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of the table."""

    version: int
    timestamp: int
    """When its newest file was written, in microseconds since 1970."""
    files: tuple[DataFile, ...]

    @property
    def digest(self) -> str:
        """A digest of the paths and sizes of the files."""
        files = repr([(file.path, file.size) for file in self.files])
        return blake2b(files.encode(), digest_size=16).hexdigest()


class Folder:
    """The snapshots of a folder; each is listed once, because it never changes."""

    def __init__(self, path: str, label: str) -> None:
        self._path = path
        self._label = label
        self._listed: dict[int, Snapshot] = {}

    def names(self) -> dict[int, FileInfo]:
        """List the entries of the folder that may be snapshots, ordered by version."""
        entries: dict[str, FileInfo] = {}
        for info in self._list(""):
            if info.base_name.startswith(("_", ".")):
                continue
            if info.type != FileType.Directory and not info.base_name.endswith(".parquet"):
                raise _ambiguous(
                    self._label,
                    f"{info.base_name!r} is neither a .parquet file nor a folder",
                    info.base_name,
                )
            entries[info.base_name] = info
        versions = versions_of(list(entries), self._label)
        return {versions[name]: entries[name] for name in sorted(entries, key=versions.__getitem__)}

    def snapshots(self, names: dict[int, FileInfo], versions: Sequence[int]) -> Iterator[Snapshot]:
        """Yield the complete snapshots among some versions, listed lazily."""
        for version in versions:
            snapshot = self._listed.get(version) or self._snapshot(version, names[version])
            if snapshot is not None:
                self._listed[version] = snapshot
                yield snapshot

    def _snapshot(self, version: int, info: FileInfo) -> Snapshot | None:
        files = [info] if info.type != FileType.Directory else self._parquet_files(info.path)
        if not files:
            return None
        files.sort(key=lambda file: file.path)
        written = max(int(file.mtime_ns) for file in files) // 1000
        return Snapshot(version, written, tuple(DataFile(file.path, int(file.size)) for file in files))

    def _parquet_files(self, folder: str) -> list[FileInfo]:
        """List the Parquet files of a folder; return none while Spark is writing it."""
        files = []
        for info in self._list(folder, recursive=True):
            parts = info.path.removeprefix(folder).strip("/").split("/")
            if parts[0] == _UNFINISHED:
                return []
            if any(part.startswith(("_", ".")) for part in parts):
                continue
            if info.type == FileType.Directory:
                if any("=" in part for part in parts):
                    raise FeedUnavailableError(
                        f"{info.path} in {self._label} is a partition, and its column is not stored in its "
                        "files: write snapshots without partitions",
                        condition="FEED_UNAVAILABLE.PARTITIONED_SNAPSHOT",
                        path=info.path,
                    )
            elif info.base_name.endswith(".parquet"):
                files.append(info)
        return files

    def shared(self, old: Sequence[DataFile], new: Sequence[DataFile]) -> frozenset[str]:
        """Return the files of two snapshots that are hard links to the same file."""
        if is_url(self._path):
            return frozenset()
        inodes = {self._inode(file.path): file.path for file in old}
        both = [(inodes[inode], file.path) for file in new if (inode := self._inode(file.path)) in inodes]
        return frozenset(path for pair in both for path in pair)

    def _inode(self, path: str) -> tuple[int, int]:
        with self._reading(path):
            status = os.stat(os.path.join(self._path, path))
        return status.st_dev, status.st_ino

    @contextmanager
    def open(self, path: str, version: int) -> Iterator[pa.NativeFile]:
        """Open a file for reading a version."""
        with self._reading(path, version), self._files.open_input_file(path) as file:
            yield file

    @contextmanager
    def _reading(self, path: str, version: int | None = None) -> Iterator[None]:
        """Translate errors: a missing file means lost data, an unreadable file a feed that is unavailable."""
        what = f"{path} of {self._label}"
        try:
            with translating_read_errors(what):
                yield
        except FileNotFoundError:
            of = "" if version is None else f", which version {version} needs"
            raise DataLostError(
                f"{what} is missing{of}: start from a later version",
                condition="DATA_LOST.FILE_MISSING",
                version=version,
            ) from None

    def _list(self, folder: str, *, recursive: bool = False) -> list[FileInfo]:
        try:
            return list(self._files.get_file_info(FileSelector(folder, recursive=recursive)))
        except (OSError, pa.ArrowException) as error:
            raise self._not_listable(error) from None

    @cached_property
    def _files(self) -> FileSystem:
        if not is_url(self._path):
            return SubTreeFileSystem(self._path, LocalFileSystem())
        try:
            files, below = FileSystem.from_uri(self._path)
        except (OSError, pa.ArrowException) as error:
            raise self._not_listable(error) from None
        return SubTreeFileSystem(below, files)

    def _not_listable(self, error: Exception) -> FeedUnavailableError:
        # The library's message may contain the URL's password.
        return FeedUnavailableError(
            f"the folder {self._label} cannot be listed ({type(error).__name__}): check that it exists and "
            "is readable",
            condition="FEED_UNAVAILABLE.STORAGE",
            path=self._label,
        )


def versions_of(names: Sequence[str], where: str) -> dict[str, int]:
    """Return the version for each name: all of its digits as one number."""
    by_version: dict[int, str] = {}
    first_pattern: tuple[str, tuple[object, ...]] | None = None
    for name in sorted(names):
        numbers = _DIGITS.findall(name)
        texts = tuple(_DIGITS.split(name.removesuffix(".parquet")))
        # A single number may have any width; several numbers need fixed widths.
        widths = tuple(map(len, numbers)) if len(numbers) > 1 else len(numbers)
        if not numbers:
            raise _ambiguous(where, f"{name!r} has no number", name)
        if first_pattern is None:
            first_pattern = name, (texts, widths)
        if first_pattern[1] != (texts, widths):
            raise _ambiguous(
                where, f"{first_pattern[0]!r} and {name!r} are not equal apart from their digits", name
            )
        version = int("".join(numbers))
        if len(str(version)) > _MAX_DIGITS:
            raise _ambiguous(where, f"{name!r} has more than {_MAX_DIGITS} digits", name)
        if version in by_version:
            raise _ambiguous(where, f"{by_version[version]!r} and {name!r} are both version {version}", name)
        by_version[version] = name
    return {name: version for version, name in by_version.items()}


def _ambiguous(where: str, what: str, name: str) -> FeedUnavailableError:
    return FeedUnavailableError(
        f"the snapshots in {where} have no clear order: {what}. Name them by number or by date, as in "
        "0007.parquet or 2026-01-31",
        condition="FEED_UNAVAILABLE.AMBIGUOUS_NAMES",
        name=name,
    )
