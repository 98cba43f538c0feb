"""Storage of Delta tables and other lake files: locations, file access, and errors without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileType, PyFileSystem

from penstock.arguments import in_quotes, path_text
from penstock.errors import (
    FeedUnavailableError,
    InvalidNameError,
    InvalidUrlError,
    PenstockError,
    StoreUnavailableError,
    TableRefusedError,
)
from penstock.extras import deltalake
from penstock.parallel import in_parallel
from penstock.redaction import SHORTEST_SECRET, redact

if TYPE_CHECKING:
    from deltalake import DeltaTable

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SCHEME = "delta:"
_FORBIDDEN_IN_NAMES = re.compile(r"[/\\%\0]")
_PATHS_PER_CALL = 64
_MAX_CHARACTERS = 500
_DENIED = re.compile(
    r"access.?denied|forbidden|unauthori[sz]ed|permission.?denied|necessary privileges|invalid.?access.?key"
    r"|signature.?does.?not.?match|(expired|invalid).?token|authorization.?expired|oauth.?error"
    r"|unrecognized.?client|invalid.?signature",
    re.IGNORECASE,
)
_USER_CHOSEN_TEXT = re.compile(
    # Paths and URLs; elements of an XML reply.
    r"""[^\s<>"'(),;=]*/[^\s<>"']*|<(?:Bucket|BucketName|Container|Endpoint|Key|Prefix|Resource)>[^<]*"""
    # Quoted text, except the reason in a JSON reply.
    r"""|(["'](?:__type|code|error|error_description|message|reason|status|title|type)["']\s*:\s*"[^"]*")"""
    r"""|(?<!\w)"[^"]*"(?!\w)|(?<!\w)'[^']*'(?!\w)"""
)
"""Parts of a message with names that users choose, such as a bucket's, which are no evidence of its cause."""
_FAILED_REQUEST = re.compile(r"Error performing [A-Z]+ ")
"""The start of the message with which an object store's client reports a failed request."""


def is_url(path: str) -> bool:
    """Whether a location is a URL rather than a local path."""
    return _URL.match(path) is not None


def prefixed_parameters(query: str, prefix: str, owner: str, meaning: str) -> dict[str, str]:
    """Return the parameters in a URL's query string, without their required prefix.

    Raises
    ------
    InvalidUrlError
        When a parameter lacks the prefix. The message does not show the URL, which may contain a password.
    """
    parameters = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if not key.startswith(prefix):
            raise InvalidUrlError(
                f"{owner} has no parameter {in_quotes(key)}: write {meaning} as {prefix}KEY=VALUE",
                condition="INVALID_URL.UNKNOWN_PARAMETER",
                parameter=key,
            )
        parameters[key.removeprefix(prefix)] = value
    return parameters


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return a path or URL that is valid in every process, since executors have other working directories."""
    location = path_text("path", path)
    return location if is_url(location) else os.path.abspath(os.path.expanduser(location))


def path_for_messages(path: str) -> str:
    """Return a path or URL for messages, without a password or a signature."""
    if "://" not in path:
        return path
    parts = urlsplit(path)
    user, at, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{host}{parts.path}"


def import_deltalake(name: str) -> Any:
    """Import a module of deltalake; raise :class:`MissingDependencyError` when it is not installed."""
    return deltalake(name, "a Delta table")


def is_delta(url: str | None) -> bool:
    """Whether a URL names a folder of Delta tables rather than a database."""
    return url is not None and url.lower().startswith(_SCHEME)


@dataclass(frozen=True)
class DeltaLocation:
    """A Delta table's folder or object store URL, with deltalake's storage options."""

    path: str = field(repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, url: str, name: str) -> DeltaLocation:
        """Return the table with the given name in the folder of the URL.

        The URL is ``delta:///folder`` or ``delta:s3://bucket/folder?storage.KEY=VALUE``.
        """
        target, _, query = url[len(_SCHEME) :].partition("?")
        options = prefixed_parameters(
            query, "storage.", "a folder of Delta tables", "deltalake's storage options"
        )
        if _FORBIDDEN_IN_NAMES.search(name) or name.startswith((".", "_")):
            raise InvalidNameError(
                f"{in_quotes(name)} cannot be the folder of a Delta table: use a name without a slash or a "
                "percent sign that does not begin with a dot or an underscore",
                name=name,
            )
        if is_url(target):
            return cls(f"{target.rstrip('/')}/{quote(name)}", options)
        return cls(os.path.join(_local_path(target), name), options)

    @property
    def label(self) -> str:
        """The path for messages, without a password."""
        return path_for_messages(self.path)

    def open(self, version: int | None = None) -> DeltaTable:
        """Load a version, by default the current one."""
        with self.translating_errors():
            table: DeltaTable = import_deltalake("deltalake").DeltaTable(
                self.path, version=version, storage_options=self.options or None
            )
        return table

    def create(self, schema: pa.Schema, properties: Mapping[str, str] | None = None) -> DeltaTable:
        """Create the table, unless another process creates it at the same time, and load it."""
        deltalake = import_deltalake("deltalake")
        conflict = import_deltalake("deltalake.exceptions").CommitFailedError
        with self.translating_errors():
            delta_schema = deltalake.Schema.from_arrow(schema)
            try:
                deltalake.DeltaTable.create(
                    self.path,
                    delta_schema,
                    mode="ignore",
                    configuration=properties,
                    storage_options=self.options or None,
                    # A retry would replace the table that another process has created.
                    commit_properties=deltalake.CommitProperties(max_commit_retries=0),
                )
            except conflict:
                # If the storage's reply was lost, this process has created it.
                if not self._exists():
                    raise
        return self.open()

    def find(self) -> DeltaTable | None:
        """Load the current version; None if the table does not exist."""
        if not self._exists():
            return None
        try:
            return self.open()
        except PenstockError:
            if self._exists():
                raise
            # The table was deleted in the meantime.
            return None

    def _exists(self) -> bool:
        with self.translating_errors():
            exists: bool = import_deltalake("deltalake").DeltaTable.is_deltatable(
                self.path, self.options or None
            )
        return exists

    def app_version(self, table: DeltaTable, app: str) -> int | None:
        """Return the version of an app transaction in a loaded table; None if there is none.

        deltalake reads the log in this call, not when it loads the table, so the call may fail if the table
        was deleted or its log was cleaned up in the meantime.
        """
        with self.translating_errors():
            version: int | None = table.transaction_version(app)
        return version

    def files(self) -> PyFileSystem:
        """Return a file system with the table's folder as its root."""
        with self.translating_errors():
            return PyFileSystem(
                import_deltalake("deltalake.fs").DeltaStorageHandler(self.path, self.options or None)
            )

    @contextmanager
    def translating_errors(self, *, untranslated: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Translate deltalake errors, without the values of storage options, except ``untranslated`` ones."""
        try:
            yield
        except PenstockError:
            raise
        except untranslated:
            raise
        except Exception as error:
            if _is_storage_error(error):
                raise self._storage_failed(error) from None
            raise TableRefusedError(
                f"the Delta table {self.label} refused the operation: {self.message(error)}",
                condition="TABLE_REFUSED.DELTA",
                table=self.label,
            ) from None

    def _storage_failed(self, error: Exception) -> StoreUnavailableError:
        storage, reason = f"the storage of the Delta table {self.label}", self.message(error)
        if is_denied(error):
            remedy = "credentials are wrong, expired or lack permission: set others in the storage options"
            if not is_url(self.path):
                remedy = "user of this process lacks permission: grant it access to the folder and its files"
            return StoreUnavailableError(
                f"{storage} refuses access: {reason}. The {remedy}",
                condition="STORE_UNAVAILABLE.ACCESS_DENIED",
                table=self.label,
            )
        return StoreUnavailableError(
            f"{storage} failed: {reason}. Check the path and the storage options, and that the storage is up",
            condition="STORE_UNAVAILABLE.TABLE_STORAGE",
            table=self.label,
        )

    def message(self, error: Exception) -> str:
        """Return the first cause in an error message of deltalake, on one line and without secrets."""
        return one_line(re.split(r"\n\s*\d+: ", str(error))[0], self.options)


def _is_storage_error(error: Exception) -> bool:
    """Whether an error is about the storage of a table, rather than about its rows."""
    # Arrow's file systems also raise these; an object store's client raises the latter for unknown replies.
    # deltalake reports some failed requests as its own errors.
    return isinstance(error, OSError | NotImplementedError) or _FAILED_REQUEST.search(str(error)) is not None


def _local_path(target: str) -> str:
    path = unquote(target)
    if path.startswith("//"):
        # The host is empty, as in delta:///folder.
        path = path[2:]
    if not path.startswith("/") or path.startswith("//"):
        raise InvalidUrlError(
            "the folder of Delta tables must be an absolute path, as in delta:///data/tables, or the URL of "
            "an object store, as in delta:s3://bucket/tables",
            condition="INVALID_URL.VALUE",
        )
    if "%" in path:
        raise InvalidUrlError(
            "deltalake cannot open a folder with a percent sign in its path: choose another one",
            condition="INVALID_URL.VALUE",
        )
    return os.path.normpath(path)


def not_a_table(label: str) -> FeedUnavailableError:
    """Return the error for a location without a Delta log."""
    return FeedUnavailableError(
        f"{label} is not a Delta table: it has no commits in a folder _delta_log. Give the table's own "
        "folder",
        condition="FEED_UNAVAILABLE.NOT_A_TABLE",
        table=label,
    )


class Storage:
    """Files of a Delta table, by their path in its folder; a missing file raises FileNotFoundError."""

    def __init__(self, path: str, options: Mapping[str, str], label: str) -> None:
        self._path = path
        self._options = dict(options)
        self.label = label
        """The table's path for messages."""

    @cached_property
    def _files(self) -> PyFileSystem:
        handler = import_deltalake("deltalake.fs").DeltaStorageHandler
        missing = import_deltalake("deltalake.exceptions").TableNotFoundError
        with self._translating((Exception,)):
            try:
                return PyFileSystem(handler(self._path, self._options or None))
            except missing:
                # deltalake also raises it for an unknown kind of object store.
                if is_url(self._path):
                    raise
                raise not_a_table(self.label) from None

    def open(self, path: str) -> pa.NativeFile:
        """Open a file for random access."""
        with self._translating():
            return self._files.open_input_file(path)

    def read(self, path: str) -> bytes:
        """Read a whole file."""
        with self._translating(), self._files.open_input_file(path) as file:
            return bytes(file.readall())

    def file_infos(self, *paths: str) -> list[FileInfo]:
        """Return the metadata of files; the type of a missing one is FileType.NotFound."""
        with self._translating():
            return list(self._files.get_file_info(list(paths)))

    def list_files(self, folder: str) -> list[FileInfo]:
        """List the files of a folder."""
        with self._translating():
            return list(self._files.get_file_info(FileSelector(folder, allow_not_found=True)))

    def missing_files(self, paths: Sequence[str]) -> list[str]:
        """Return those of the paths that have no file."""
        chunks = [paths[start : start + _PATHS_PER_CALL] for start in range(0, len(paths), _PATHS_PER_CALL)]
        infos = chain.from_iterable(in_parallel(lambda chunk: self.file_infos(*chunk), chunks))
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
                where = f"the storage of the Delta table {self.label}"
                raise access_denied(where, self.message(error), "the feed's storage_options") from None
            raise FeedUnavailableError(
                f"the storage of the Delta table {self.label} failed: {self.message(error)}. Check the "
                "path, the storage options and the credentials",
                condition="FEED_UNAVAILABLE.STORAGE",
                table=self.label,
            ) from None

    def message(self, error: Exception) -> str:
        """Return an error message on one line, without the values of storage options."""
        return one_line(str(error), self._options)


def is_denied(error: BaseException) -> bool:
    """Whether an error reports denied access, which libraries only say in their message."""
    reason = _USER_CHOSEN_TEXT.sub(lambda name: name[1] or " ", str(error))
    return _DENIED.search(f"{type(error).__name__} {reason}") is not None


def access_denied(what: str, reason: str, where: str) -> FeedUnavailableError:
    """Return the error for denied access; ``where`` says where the credentials are configured.

    The reason is the library's message, without secrets.
    """
    return FeedUnavailableError(
        f"{what} refuses access: {reason.rstrip('.')}. The credentials are wrong, have expired, or lack "
        f"permission to read: set valid ones in {where}",
        condition="FEED_UNAVAILABLE.ACCESS_DENIED",
    )


def without_secrets(error: BaseException, *properties: Mapping[str, object]) -> str:
    """Return the first line of an error message without the values of a catalog's properties."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
    secrets = [secret for values in properties for secret in _secret_values(values)]
    # Truncate last: a truncated secret would not be masked.
    return redact(_mask(text, secrets))[:_MAX_CHARACTERS]


def _secret_values(properties: Mapping[str, object]) -> Iterator[str]:
    """Yield the values of properties, including nested ones."""
    for name, value in properties.items():
        if isinstance(value, Mapping):
            yield from _secret_values(value)
        elif name not in ("type", "warehouse"):
            yield str(value)
            # A credential is the client's id and its secret.
            yield str(value).partition(":")[2] if name == "credential" else ""


def one_line(text: str, options: Mapping[str, str]) -> str:
    """Return an error message of deltalake on one line, without the values of storage options."""
    # An XML body repeats what the text before it says.
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m|↳", " ", text.partition("<?xml")[0]).split())
    return _mask(line, options.values())[:_MAX_CHARACTERS].rstrip(".")


def _mask(text: str, secrets: Iterable[str]) -> str:
    # Longest first, since a secret may contain another one.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "…")
    return text
