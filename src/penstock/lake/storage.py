"""The files of a table, wherever they are, by deltalake's own storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from penstock.errors import FeedUnavailable, PenstockError
from penstock.extras import deltalake
from penstock.lake.errors import access_denied, is_denied
from penstock.lake.location import is_url

_AT_ONCE = 16
T = TypeVar("T")
R = TypeVar("R")


def library(name: str) -> Any:
    """A module of deltalake; :class:`MissingDependency` when it is not installed."""
    return deltalake(name, "a Delta feed")


def not_a_table(shown: str) -> FeedUnavailable:
    """The error for a place where there is none."""
    return FeedUnavailable(
        f"{shown} is not a Delta table: it has no commits in a folder _delta_log. Give the table's own folder",
        condition="FEED_UNAVAILABLE.NOT_A_TABLE",
        table=shown,
    )


class Storage:
    """Files by their names below the table's folder; a file that is not there is a FileNotFoundError."""

    def __init__(self, path: str, options: Mapping[str, str], shown: str) -> None:
        self._path = path
        self._options = dict(options)
        self._shown = shown

    @cached_property
    def _files(self) -> Any:
        from pyarrow.fs import PyFileSystem

        handler = library("deltalake.fs").DeltaStorageHandler
        missing = library("deltalake.exceptions").TableNotFoundError
        with self._plainly((Exception,)):
            try:
                return PyFileSystem(handler(self._path, self._options or None))
            except missing:
                # It says so of an object store that it does not know, too.
                if is_url(self._path):
                    raise
                raise not_a_table(self._shown) from None

    def open(self, path: str) -> Any:
        """A file for reading here and there."""
        with self._plainly():
            return self._files.open_input_file(path)

    def read(self, path: str) -> bytes:
        """A whole file."""
        with self._plainly(), self._files.open_input_file(path) as file:
            return bytes(file.readall())

    def info(self, *paths: str) -> list[Any]:
        """What is known of files, FileType.NotFound of those that are not there."""
        with self._plainly():
            return list(self._files.get_file_info(list(paths)))

    def listed(self, folder: str) -> list[Any]:
        """The files of a folder."""
        from pyarrow.fs import FileSelector

        with self._plainly():
            return list(self._files.get_file_info(FileSelector(folder, allow_not_found=True)))

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Those of some files that are not there."""
        from pyarrow.fs import FileType

        parts = [paths[place : place + 64] for place in range(0, len(paths), 64)]
        found = self.side_by_side(lambda part: self.info(*part), parts)
        return [
            path
            for part, infos in zip(parts, found, strict=True)
            for path, info in zip(part, infos, strict=True)
            if info.type != FileType.File
        ]

    def side_by_side(self, work: Callable[[T], R], things: Iterable[T]) -> list[R]:
        """The results for several things, some at a time: most of the time passes in waiting for the storage."""
        several = list(things)
        if len(several) < 2:
            return [work(each) for each in several]
        with ThreadPoolExecutor(min(_AT_ONCE, len(several))) as pool:
            return list(pool.map(work, several))

    @contextmanager
    def _plainly(self, kinds: tuple[type[Exception], ...] = (OSError, NotImplementedError)) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, PenstockError):
            raise
        except kinds as error:
            if is_denied(error):
                where = f"the storage of the Delta table {self._shown}"
                raise access_denied(where, self.told(error), "the feed's storage_options") from None
            raise FeedUnavailable(
                f"the storage of the Delta table {self._shown} does not answer as it should: {self.told(error)}. Check the "
                "path, and the storage options for the place and its credentials",
                condition="FEED_UNAVAILABLE.STORAGE",
                table=self._shown,
            ) from None

    def told(self, error: Exception) -> str:
        """The library's words on one line, without anything that was given as an option."""
        # Behind it the server's answer as XML, which says the same again.
        words = " ".join(re.sub(r"\x1b\[[0-9;]*m|↳|<\?xml.*", " ", str(error), flags=re.DOTALL).split())
        for value in sorted(self._options.values(), key=len, reverse=True):
            if len(value) > 3:
                words = words.replace(value, "…")
        return words[:500].rstrip(".")
