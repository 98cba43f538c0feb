"""Access to the files of a Delta table through deltalake's storage clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import TypeVar

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileType, PyFileSystem

from penstock.errors import FeedUnavailableError, PenstockError
from penstock.lake.errors import access_denied, is_denied, one_line
from penstock.lake.location import is_url, library

_THREADS = 16
_PATHS_PER_CALL = 64
T = TypeVar("T")
R = TypeVar("R")


def not_a_table(shown: str) -> FeedUnavailableError:
    """Return the error for a location without a Delta log."""
    return FeedUnavailableError(
        f"{shown} is not a Delta table: it has no commits in a folder _delta_log. Give the table's own "
        "folder",
        condition="FEED_UNAVAILABLE.NOT_A_TABLE",
        table=shown,
    )


class Storage:
    """Files of a table by their path in its folder; a missing file raises FileNotFoundError."""

    def __init__(self, path: str, options: Mapping[str, str], shown: str) -> None:
        self._path = path
        self._options = dict(options)
        self._shown = shown

    @cached_property
    def _files(self) -> PyFileSystem:
        handler = library("deltalake.fs").DeltaStorageHandler
        missing = library("deltalake.exceptions").TableNotFoundError
        with self._translating((Exception,)):
            try:
                return PyFileSystem(handler(self._path, self._options or None))
            except missing:
                # deltalake raises it for an unknown kind of object store too.
                if is_url(self._path):
                    raise
                raise not_a_table(self._shown) from None

    def open(self, path: str) -> pa.NativeFile:
        """Open a file for random access."""
        with self._translating():
            return self._files.open_input_file(path)

    def read(self, path: str) -> bytes:
        """Read a whole file."""
        with self._translating(), self._files.open_input_file(path) as file:
            return bytes(file.readall())

    def info(self, *paths: str) -> list[FileInfo]:
        """Return the metadata of files; the type of a missing one is FileType.NotFound."""
        with self._translating():
            return list(self._files.get_file_info(list(paths)))

    def listed(self, folder: str) -> list[FileInfo]:
        """List the files of a folder."""
        with self._translating():
            return list(self._files.get_file_info(FileSelector(folder, allow_not_found=True)))

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Return the paths at which there is no file."""
        parts = [paths[first : first + _PATHS_PER_CALL] for first in range(0, len(paths), _PATHS_PER_CALL)]
        infos = chain.from_iterable(in_parallel(lambda part: self.info(*part), parts))
        return [path for path, info in zip(paths, infos, strict=True) if info.type != FileType.File]

    @contextmanager
    def _translating(
        self, kinds: tuple[type[Exception], ...] = (OSError, NotImplementedError)
    ) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, PenstockError):
            raise
        except kinds as error:
            if is_denied(error):
                where = f"the storage of the Delta table {self._shown}"
                raise access_denied(where, self.message(error), "the feed's storage_options") from None
            raise FeedUnavailableError(
                f"the storage of the Delta table {self._shown} failed: {self.message(error)}. Check the "
                "path, the storage options and the credentials",
                condition="FEED_UNAVAILABLE.STORAGE",
                table=self._shown,
            ) from None

    def message(self, error: Exception) -> str:
        """Return an error message on one line, without the values of storage options."""
        return one_line(str(error), self._options)


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Map a function over items in threads, since most of the time is spent waiting for the storage."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_THREADS, len(items))) as pool:
        return list(pool.map(work, items))
