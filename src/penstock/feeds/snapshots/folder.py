"""The snapshots that lie in a folder, by the numbers in their names."""

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
    """What is in a folder; a snapshot does not change once it is there, so that it is looked at once."""

    def __init__(self, path: str, shown: str) -> None:
        self._path = path
        self._shown = shown
        self._seen: dict[int, Snapshot] = {}

    def names(self) -> dict[int, FileInfo]:
        """What may be snapshots, by version, in their order.

        Raises
        ------
        FeedUnavailable
            STORAGE, AMBIGUOUS_NAMES.
        """
        found: dict[str, FileInfo] = {}
        for info in self._listed(""):
            if info.base_name.startswith(("_", ".")):
                continue
            if info.type != FileType.Directory and not info.base_name.endswith(".parquet"):
                raise _ambiguous(
                    self._shown, f"{info.base_name!r} is no file .parquet and no folder", info.base_name
                )
            found[info.base_name] = info
        versions = versions_of(list(found), self._shown)
        return {versions[name]: found[name] for name in sorted(found, key=versions.__getitem__)}

    def snapshots(self, names: dict[int, FileInfo], versions: Sequence[int]) -> Iterator[Snapshot]:
        """Those of some versions that are whole, looked at as they are asked for."""
        for version in versions:
            found = self._seen.get(version) or self._look(version, names[version])
            if found is not None:
                self._seen[version] = found
                yield found

    def some(self) -> FeedUnavailable:
        """The error for a folder without one."""
        return FeedUnavailable(
            f"there are no snapshots in {self._shown}: files .parquet, or folders of such, with a number in their names",
            condition="FEED_UNAVAILABLE.NO_SNAPSHOTS",
            path=self._shown,
        )

    def _look(self, version: int, info: FileInfo) -> Snapshot | None:
        files = [info] if info.type != FileType.Directory else self._inside(info.path)
        if not files:
            return None
        found = tuple(
            DataFile(each.path, int(each.size)) for each in sorted(files, key=lambda each: each.path)
        )
        return Snapshot(version, max(int(each.mtime_ns) for each in files) // 1000, found)

    def _inside(self, folder: str) -> list[FileInfo]:
        """The Parquet files of a folder; none while Spark is writing it."""
        found = []
        for info in self._listed(folder, recursive=True):
            parts = info.path.removeprefix(folder).strip("/").split("/")
            if parts[0] == _UNFINISHED:
                return []
            if any(part.startswith(("_", ".")) for part in parts):
                continue
            if info.type == FileType.Directory:
                _check_no_partition(info.path, parts, self._shown)
            elif info.base_name.endswith(".parquet"):
                found.append(info)
        return found

    def shared(self, old: Sequence[DataFile], new: Sequence[DataFile]) -> frozenset[str]:
        """Files that are one file under two names, as snapshots with hard links have them: all their rows are the same."""
        if is_url(self._path):
            return frozenset()
        inodes = {self._inode(file.path): file.path for file in old}
        both = [(inodes[inode], file.path) for file in new if (inode := self._inode(file.path)) in inodes]
        return frozenset(path for pair in both for path in pair)

    def _inode(self, path: str) -> tuple[int, int]:
        with self.reading(path):
            found = os.stat(os.path.join(self._path, path))
        return found.st_dev, found.st_ino

    def open(self, path: str) -> Any:
        """A file for reading here and there."""
        return self._files.open_input_file(path)

    @contextmanager
    def reading(self, path: str, version: int | None = None) -> Iterator[None]:
        """A file that is gone is lost data, one that cannot be read an error of the feed."""
        what = f"{path} of {self._shown}"
        try:
            with readable(what):
                yield
        except FileNotFoundError:
            of = "" if version is None else f", of which version {version} is made"
            raise DataLost(f"{what} is gone{of}: begin with a later version", version=version) from None

    def _listed(self, folder: str, *, recursive: bool = False) -> list[FileInfo]:
        try:
            return list(self._files.get_file_info(FileSelector(folder, recursive=recursive)))
        except (OSError, pa.ArrowException) as error:
            raise self._silent(error) from None

    @cached_property
    def _files(self) -> FileSystem:
        if not is_url(self._path):
            return SubTreeFileSystem(self._path, LocalFileSystem())
        try:
            files, below = FileSystem.from_uri(self._path)
        except (OSError, pa.ArrowException) as error:
            raise self._silent(error) from None
        return SubTreeFileSystem(below, files)

    def _silent(self, error: Exception) -> FeedUnavailable:
        # What the library says may have the URL's password in it.
        return FeedUnavailable(
            f"the folder {self._shown} cannot be listed ({type(error).__name__}): is it there, and may you read it?",
            condition="FEED_UNAVAILABLE.STORAGE",
            path=self._shown,
        )


def _check_no_partition(path: str, parts: Sequence[str], where: str) -> None:
    if any("=" in part for part in parts):
        raise FeedUnavailable(
            f"{path} in {where} is a partition, whose column is in no file: write snapshots without partitions",
            condition="FEED_UNAVAILABLE.PARTITIONED_SNAPSHOT",
            path=path,
        )


def versions_of(names: Sequence[str], where: str) -> dict[str, int]:
    """The version of each name: its digits, read as one number.

    Raises
    ------
    FeedUnavailable
        AMBIGUOUS_NAMES, when that would not be the order of the names, or two names had one version.
    """
    found: dict[str, int] = {}
    shape: tuple[str, tuple[object, ...]] | None = None
    taken: dict[int, str] = {}
    for name in sorted(names):
        numbers = _DIGITS.findall(name)
        texts = tuple(_DIGITS.split(name.removesuffix(".parquet")))
        # A single number may grow; several have to stay in their places.
        widths = tuple(map(len, numbers)) if len(numbers) > 1 else len(numbers)
        if not numbers:
            raise _ambiguous(where, f"{name!r} has no number in it", name)
        if shape is None:
            shape = name, (texts, widths)
        if shape[1] != (texts, widths):
            raise _ambiguous(
                where,
                f"{shape[0]!r} and {name!r} are not alike but for their digits, as many in each place",
                name,
            )
        version = int("".join(numbers))
        if len(str(version)) > _MOST_DIGITS:
            raise _ambiguous(where, f"{name!r} has more than {_MOST_DIGITS} digits", name)
        if version in taken:
            raise _ambiguous(where, f"{taken[version]!r} and {name!r} are both version {version}", name)
        taken[version] = name
        found[name] = version
    return found


def _ambiguous(where: str, what: str, name: str) -> FeedUnavailable:
    return FeedUnavailable(
        f"the snapshots in {where} have no clear order: {what}. Name them by number or by time, such as 0007.parquet or "
        "2026-01-31",
        condition="FEED_UNAVAILABLE.AMBIGUOUS_NAMES",
        name=name,
    )
