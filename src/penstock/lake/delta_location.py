"""Where a Delta table lies, and how deltalake reaches it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from penstock.arguments import in_quotes
from penstock.errors import (
    InvalidName,
    InvalidUrl,
    PenstockError,
    StoreUnavailable,
    TableRefused,
)
from penstock.extras import deltalake

_SCHEME = "delta:"
_OPTION = "storage."
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_BAD = re.compile(r"[/\\%\0]")


def is_delta(url: str | None) -> bool:
    """Whether a URL leads to a folder of Delta tables rather than to a store."""
    return url is not None and url.lower().startswith(_SCHEME)


@dataclass(frozen=True)
class DeltaPlace:
    """A table's folder, or its URL in an object store, with deltalake's options for it."""

    path: str = field(repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, url: str, name: str) -> DeltaPlace:
        """The table of a name in the folder of a URL, ``delta:///folder`` or ``delta:s3://bucket/folder?storage.KEY=VALUE``.

        Raises
        ------
        InvalidUrl
            It is not shown, since it may hold a password.
        InvalidName
            When the name cannot be a folder's.
        """
        target, _, query = url[len(_SCHEME) :].partition("?")
        options = {}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if not key.startswith(_OPTION):
                raise InvalidUrl(
                    f"a folder of Delta tables has no parameter {in_quotes(key)}: deltalake's options for the place are given as "
                    f"{_OPTION}KEY=VALUE",
                    parameter=key,
                )
            options[key.removeprefix(_OPTION)] = value
        if _BAD.search(name) or name.startswith((".", "_")):
            raise InvalidName(
                f"a Delta table's name is its folder's: without slash and percent sign, and not beginning with a dot or an underscore, "
                f"not {in_quotes(name)}",
                name=name,
            )
        if _REMOTE.match(target):
            return cls(f"{target.rstrip('/')}/{quote(name)}", options)
        return cls(os.path.join(_local(target), name), options)

    @property
    def shown(self) -> str:
        """Its path without a password in it."""
        if not _REMOTE.match(self.path):
            return self.path
        parts = urlsplit(self.path)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def open(self) -> Any:
        """The table as it is now, a ``deltalake.DeltaTable``."""
        with self.plainly():
            return library("deltalake").DeltaTable(self.path, storage_options=self.options or None)

    def find(self) -> Any | None:
        """The table as it is now; None where there is none."""
        with self.plainly():
            kind = library("deltalake").DeltaTable
            there = kind.is_deltatable(self.path, self.options or None)
        return self.open() if there else None

    def files(self) -> Any:
        """The files in the table's folder, a ``pyarrow.fs.FileSystem``."""
        from pyarrow.fs import PyFileSystem

        with self.plainly():
            return PyFileSystem(library("deltalake.fs").DeltaStorageHandler(self.path, self.options or None))

    @contextmanager
    def plainly(self, *, beside: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """What deltalake raises becomes an error of ours, without anything that was given as an option.

        Parameters
        ----------
        beside
            Errors that stay as they are.
        """
        try:
            yield
        except PenstockError:
            raise
        # Of Arrow's file systems too: an object store's client has the latter for answers that it does not know.
        except (OSError, NotImplementedError) as error:
            raise StoreUnavailable(
                f"the storage of the Delta table {self.shown} does not answer as it should: {self.told(error)}. Check the path, and "
                "the options for the place and its credentials",
                table=self.shown,
            ) from None
        except Exception as error:
            if isinstance(error, beside):
                raise
            raise TableRefused(
                f"the Delta table {self.shown} does not take it: {self.told(error)}",
                condition="TABLE_REFUSED.DELTA",
                table=self.shown,
            ) from None

    def told(self, error: Exception) -> str:
        """The library's words on one line."""
        first = re.split(r"\n\s*\d+: |<\?xml", str(error))[0]
        words = " ".join(re.sub(r"\x1b\[[0-9;]*m|↳", " ", first).split())
        for value in sorted(self.options.values(), key=len, reverse=True):
            if len(value) > 3:
                words = words.replace(value, "…")
        return words[:500].rstrip(".")


def _local(target: str) -> str:
    path = unquote(target)
    if path.startswith("//"):
        # An empty host, as in delta:///folder.
        path = path[2:]
    if not path.startswith("/") or path.startswith("//"):
        raise InvalidUrl(
            "the folder of Delta tables is named from the root, as in delta:///data/tables, or by the URL of an object store, as in "
            "delta:s3://bucket/tables"
        )
    if "%" in path:
        raise InvalidUrl(
            "deltalake cannot reach a folder with a percent sign in its path: choose another one"
        )
    return os.path.normpath(path)


def library(name: str) -> Any:
    """A module of deltalake; :class:`MissingDependency` when it is not installed."""
    return deltalake(name, "a Delta table")
