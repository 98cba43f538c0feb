"""Listing of the snapshots in a folder, by the numbers in their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem, SubTreeFileSystem

from penstock.errors import DataLost, FeedUnavailable
from penstock.feeds.file_commits import DataFile
from penstock.lake.location import is_url
from penstock.lake.parquet import readable

_UNFINISHED = "_temporary"
_MOST_DIGITS = 18
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Snapshot:
    """One state of the table."""

    version: int
    timestamp: int
    """When the last of its files was written; microseconds since 1970."""
    files: tuple[DataFile, ...]


class Folder:
    """The snapshots of a folder; each is listed once, since it never changes."""

    def __init__(self, path: str, shown: str) -> None:
        self._path = path
        self._shown = shown
        self._listed: dict[int, Snapshot] = {}

    def names(self) -> dict[int, FileInfo]:
        """List what may be snapshots, by version, in order."""
        entries: dict[str, FileInfo] = {}
        for info in self._list(""):
            if info.base_name.startswith(("_", ".")):
                continue
            if info.type != FileType.Directory and not info.base_name.endswith(".parquet"):
                raise _ambiguous(
                    self._shown, f"{info.base_name!r} is neither a .parquet file nor a folder", info.base_name
                )
            entries[info.base_name] = info
        versions = versions_of(list(entries), self._shown)
        return {versions[name]: entries[name] for name in sorted(entries, key=versions.__getitem__)}

    def snapshots(self, names: dict[int, FileInfo], versions: Sequence[int]) -> Iterator[Snapshot]:
        """Yield the complete snapshots of some versions, listed lazily."""
        for version in versions:
            snapshot = self._listed.get(version) or self._snapshot(version, names[version])
            if snapshot is not None:
                self._listed[version] = snapshot
                yield snapshot

    def no_snapshots(self) -> FeedUnavailable:
        """Return the error for a folder without snapshots."""
        return FeedUnavailable(
            f"there are no snapshots in {self._shown}: write .parquet files, or folders of them, with a "
            "number in their names",
            condition="FEED_UNAVAILABLE.NO_SNAPSHOTS",
            path=self._shown,
        )

    def _snapshot(self, version: int, info: FileInfo) -> Snapshot | None:
        files = [info] if info.type != FileType.Directory else self._parquet_files(info.path)
        if not files:
            return None
        files.sort(key=lambda file: file.path)
        written = max(int(file.mtime_ns) for file in files) // 1000
        return Snapshot(version, written, tuple(DataFile(file.path, int(file.size)) for file in files))

    def _parquet_files(self, folder: str) -> list[FileInfo]:
        """List the Parquet files of a folder; none while Spark is writing it."""
        files = []
        for info in self._list(folder, recursive=True):
            parts = info.path.removeprefix(folder).strip("/").split("/")
            if parts[0] == _UNFINISHED:
                return []
            if any(part.startswith(("_", ".")) for part in parts):
                continue
            if info.type == FileType.Directory:
                _check_no_partition(info.path, parts, self._shown)
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
        with self.reading(path):
            status = os.stat(os.path.join(self._path, path))
        return status.st_dev, status.st_ino

    def open(self, path: str) -> Any:
        """Open a file for random access."""
        return self._files.open_input_file(path)

    @contextmanager
    def reading(self, path: str, version: int | None = None) -> Iterator[None]:
        """Translate errors: a missing file is lost data, an unreadable one an error of the feed."""
        what = f"{path} of {self._shown}"
        try:
            with readable(what):
                yield
        except FileNotFoundError:
            of = "" if version is None else f", which version {version} needs"
            raise DataLost(f"{what} is missing{of}: begin with a later version", version=version) from None

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

    def _not_listable(self, error: Exception) -> FeedUnavailable:
        # The library's message may contain the URL's password.
        return FeedUnavailable(
            f"the folder {self._shown} cannot be listed ({type(error).__name__}): check that it exists and "
            "is readable",
            condition="FEED_UNAVAILABLE.STORAGE",
            path=self._shown,
        )


def _check_no_partition(path: str, parts: Sequence[str], where: str) -> None:
    if any("=" in part for part in parts):
        raise FeedUnavailable(
            f"{path} in {where} is a partition, whose column is not in its files: write snapshots without "
            "partitions",
            condition="FEED_UNAVAILABLE.PARTITIONED_SNAPSHOT",
            path=path,
        )


def versions_of(names: Sequence[str], where: str) -> dict[str, int]:
    """Return the version of each name: its digits as one number."""
    versions: dict[str, int] = {}
    shape: tuple[str, tuple[object, ...]] | None = None
    taken: dict[int, str] = {}
    for name in sorted(names):
        numbers = _DIGITS.findall(name)
        texts = tuple(_DIGITS.split(name.removesuffix(".parquet")))
        # A single number may grow; several need fixed widths.
        widths = tuple(map(len, numbers)) if len(numbers) > 1 else len(numbers)
        if not numbers:
            raise _ambiguous(where, f"{name!r} has no number", name)
        if shape is None:
            shape = name, (texts, widths)
        if shape[1] != (texts, widths):
            raise _ambiguous(
                where,
                f"{shape[0]!r} and {name!r} are not alike except for the same number of digits",
                name,
            )
        version = int("".join(numbers))
        if len(str(version)) > _MOST_DIGITS:
            raise _ambiguous(where, f"{name!r} has more than {_MOST_DIGITS} digits", name)
        if version in taken:
            raise _ambiguous(where, f"{taken[version]!r} and {name!r} are both version {version}", name)
        taken[version] = name
        versions[name] = version
    return versions


def _ambiguous(where: str, what: str, name: str) -> FeedUnavailable:
    return FeedUnavailable(
        f"the snapshots in {where} have no clear order: {what}. Name them by number or by date, as in "
        "0007.parquet or 2026-01-31",
        condition="FEED_UNAVAILABLE.AMBIGUOUS_NAMES",
        name=name,
    )
