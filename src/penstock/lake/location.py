"""Locations of tables: local paths, object store URLs, and the Delta tables in a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pyarrow.fs import PyFileSystem

from penstock.arguments import in_quotes, path_text
from penstock.errors import (
    InvalidNameError,
    InvalidUrlError,
    PenstockError,
    StoreUnavailableError,
    TableRefusedError,
)
from penstock.extras import deltalake
from penstock.lake.errors import one_line

if TYPE_CHECKING:
    from deltalake import DeltaTable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SCHEME = "delta:"
_OPTION = "storage."
_NOT_IN_NAMES = re.compile(r"[/\\%\0]")


def is_url(path: str) -> bool:
    """Whether a location is a URL rather than a local path."""
    return _URL.match(path) is not None


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a location that is the same in every process: executors have other working directories."""
    location = path_text("path", path)
    return location if is_url(location) else os.path.abspath(os.path.expanduser(location))


def shown_path(path: str) -> str:
    """Return a location for messages, without a password or a signature."""
    if "://" not in path:
        return path
    parts = urlsplit(path)
    user, at, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{host}{parts.path}"


def library(name: str) -> Any:
    """Import a module of deltalake; raise :class:`MissingDependencyError` when it is not installed."""
    return deltalake(name, "a Delta table")


def is_delta(url: str | None) -> bool:
    """Whether a URL names a folder of Delta tables rather than a database."""
    return url is not None and url.lower().startswith(_SCHEME)


@dataclass(frozen=True)
class DeltaPlace:
    """A Delta table's folder or object store URL, with deltalake's storage options."""

    path: str = field(repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, url: str, name: str) -> DeltaPlace:
        """Return the table with a name in the folder of a URL.

        The URL is ``delta:///folder`` or ``delta:s3://bucket/folder?storage.KEY=VALUE``.
        """
        # No message shows the URL: it may hold a password.
        target, _, query = url[len(_SCHEME) :].partition("?")
        options = {}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if not key.startswith(_OPTION):
                raise InvalidUrlError(
                    f"a folder of Delta tables has no parameter {in_quotes(key)}: write deltalake's storage "
                    f"options as {_OPTION}KEY=VALUE",
                    parameter=key,
                )
            options[key.removeprefix(_OPTION)] = value
        if _NOT_IN_NAMES.search(name) or name.startswith((".", "_")):
            raise InvalidNameError(
                f"{in_quotes(name)} cannot be the folder of a Delta table: use a name without a slash or a "
                "percent sign that does not begin with a dot or an underscore",
                name=name,
            )
        if is_url(target):
            return cls(f"{target.rstrip('/')}/{quote(name)}", options)
        return cls(os.path.join(_local(target), name), options)

    @property
    def shown(self) -> str:
        """The path for messages, without a password."""
        return shown_path(self.path)

    def open(self) -> DeltaTable:
        """Load the current version."""
        with self.translating_errors():
            table: DeltaTable = library("deltalake").DeltaTable(
                self.path, storage_options=self.options or None
            )
        return table

    def find(self) -> DeltaTable | None:
        """Load the current version; None if the table does not exist."""
        with self.translating_errors():
            exists = library("deltalake").DeltaTable.is_deltatable(self.path, self.options or None)
        return self.open() if exists else None

    def files(self) -> PyFileSystem:
        """Return the file system of the table's folder."""
        with self.translating_errors():
            return PyFileSystem(library("deltalake.fs").DeltaStorageHandler(self.path, self.options or None))

    @contextmanager
    def translating_errors(self, *, beside: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Translate the errors of deltalake, without the values of storage options.

        Parameters
        ----------
        beside
            Errors that are raised unchanged.
        """
        try:
            yield
        except PenstockError:
            raise
        # Arrow's file systems raise them too: an object store's client raises the latter for unknown answers.
        except (OSError, NotImplementedError) as error:
            raise StoreUnavailableError(
                f"the storage of the Delta table {self.shown} failed: {self.message(error)}. Check the path, "
                "the storage options and the credentials",
                table=self.shown,
            ) from None
        except Exception as error:
            if isinstance(error, beside):
                raise
            raise TableRefusedError(
                f"the Delta table {self.shown} refused the operation: {self.message(error)}",
                condition="TABLE_REFUSED.DELTA",
                table=self.shown,
            ) from None

    def message(self, error: Exception) -> str:
        """Return the first cause in an error message of deltalake, on one line."""
        return one_line(re.split(r"\n\s*\d+: ", str(error))[0], self.options)


def _local(target: str) -> str:
    path = unquote(target)
    if path.startswith("//"):
        # An empty host, as in delta:///folder.
        path = path[2:]
    if not path.startswith("/") or path.startswith("//"):
        raise InvalidUrlError(
            "the folder of Delta tables is named from the root, as in delta:///data/tables, or by the URL of "
            "an object store, as in delta:s3://bucket/tables"
        )
    if "%" in path:
        raise InvalidUrlError(
            "deltalake cannot open a folder with a percent sign in its path: choose another one"
        )
    return os.path.normpath(path)
