"""A streaming query's checkpoint, read from plain Python wherever it lies.

The layout is Spark's: ``metadata`` holds the query's id; ``offsets/N`` (written before micro-batch N runs) a version line,
a line of metadata and a line of JSON for each source (format 1), or ``name:json`` lines (format 2); ``commits/N`` follows
the sink's commit; ``state`` exists for stateful queries only (Spark 4.3.0).
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from pyarrow import fs

from penstock.errors import CommitRefused
from penstock.json_text import parse_json

_LOCATION = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(//[^/]*)?(.*)", re.DOTALL)
_USER = re.compile(r"//[^/:@]*:")

LIMIT_PASSED_SETTING = "penstock.limit.passed"
"""Among the settings that an epoch is logged with: how many rows a limit has let through, with it."""
MOST_BYTES = 64 << 20
"""Of a file of a checkpoint that is read as a whole; Spark's own have some kilobytes."""
RUNS_KEY = "penstock runs"
"""The key of the offsets of a source without rows, which count the runs of a query."""


class Checkpoint:
    """The files of one checkpoint."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.files, self.root = _open(location)
        self._query_id: str | None = None

    def query_id(self) -> str:
        """The id that Spark gave the query when the checkpoint was made."""
        if self._query_id is None:
            try:
                self._query_id = str(parse_json(self._read("metadata"))["id"])
            except (ValueError, KeyError, TypeError) as error:
                raise self._not_sparks("metadata", error) from error
        return self._query_id

    def require_readable(self, guarantee: str) -> None:
        """Refuse a checkpoint whose files cannot be reached from here.

        Raises
        ------
        CommitRefused
        """
        try:
            self.files.get_file_info(self._path("metadata"))
        except Exception as error:
            where = redact_location(self.location)
            raise CommitRefused(
                f"guarantee={guarantee} reads the checkpoint's offset log, and {where!r} cannot be reached from this Python "
                f"({redacted_cause(error, self.location)}): check the address and the credentials, or use guarantee=at_least_once",
                checkpoint=where,
            ) from error

    def offsets(self, batch_id: int) -> list[Any]:
        """The sources' offsets of a micro-batch; empty before the first one.

        Raises
        ------
        CommitRefused
            When the file is missing or not one of Spark's.
        """
        return parse_offsets(self._read(f"offsets/{batch_id}")) if batch_id >= 0 else []

    def limit_passed(self, batch_id: int) -> int | None:
        """How many rows a limit of a continuous query had let through at the end of an epoch; None where none was counted so.

        Raises
        ------
        CommitRefused
            When the file is missing or not one of Spark's.
        """
        name = f"offsets/{batch_id}"
        text = self._read(name)
        try:
            about = text.split("\n")[1]
            found = parse_json(about).get("conf", {}).get(LIMIT_PASSED_SETTING) if about else None
            return None if found is None else int(found)
        except (IndexError, ValueError, AttributeError, TypeError) as error:
            raise self._not_sparks(name, error) from error

    def _not_sparks(self, name: str, error: Exception) -> CommitRefused:
        where = redact_location(self.location)
        return CommitRefused(
            f"the checkpoint's file {name} at {where} is not as Spark writes it, or ends too soon ({type(error).__name__}): bring it "
            "back from a copy, or start with a new checkpoint",
            checkpoint=where,
        )

    def stateful(self) -> bool:
        return bool(self.files.get_file_info(self._path("state")).type == fs.FileType.Directory)

    def last_commit(self) -> int | None:
        """The last micro-batch in the commit log."""
        return self._last("commits")

    def last_planned(self) -> int | None:
        """The last micro-batch in the offset log, which may not be committed."""
        return self._last("offsets")

    def tree(self) -> dict[str, fs.FileInfo]:
        """All files and folders, by their path in the checkpoint; without those that a running query deletes meanwhile."""
        found = self.files.get_file_info(fs.FileSelector(self.root, allow_not_found=True, recursive=True))
        # A file system may put its own address in front of a path.
        return {info.path.partition(f"{self.root}/")[2]: info for info in found}

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is none.

        Raises
        ------
        OSError
            When it cannot be read.
        """
        try:
            with self.files.open_input_stream(self._path(name)) as stream:
                found = bytes(stream.read(MOST_BYTES + 1))
        except FileNotFoundError:
            return None
        if len(found) > MOST_BYTES:
            raise OSError(f"the file {name} has more than {MOST_BYTES} bytes")
        return found

    def _last(self, name: str) -> int | None:
        selector = fs.FileSelector(self._path(name), allow_not_found=True)
        found = [info.base_name for info in self.files.get_file_info(selector)]
        return max(map(int, filter(is_batch_number, found)), default=None)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _read(self, name: str) -> str:
        try:
            found = self.read(name)
            if found is None:
                raise FileNotFoundError(name)
            return found.decode()
        except Exception as error:
            raise CommitRefused(
                f"the checkpoint's file {name} cannot be read at {redact_location(self.location)}: {type(error).__name__}; "
                "is it another query's, or was it deleted?",
                checkpoint=redact_location(self.location),
            ) from error


def is_batch_number(name: str) -> bool:
    """Whether a file of a log has a batch's number for its name; other digits than ours are no number of Spark's."""
    return name.isascii() and name.isdigit()


def parse_offsets(text: str) -> list[Any]:
    """Each source's offset in an offset log file: its JSON, or the text that another source wrote; None for no offset yet."""
    version, _, *lines = text.split("\n")
    if version not in ("v1", "v2"):
        raise CommitRefused(
            f"the offset log has format {version[:20]!r}, known are v1 and v2: upgrade Penstock"
        )
    named = version == "v2"
    return [_offset(line.partition(":")[2] if named else line) for line in lines if line]


def _offset(text: str) -> Any:
    if text == "-":
        return None
    try:
        return parse_json(text)
    except ValueError:
        return text


def _open(location: str) -> tuple[fs.FileSystem, str]:
    """The file system of a location and the path there, taken literally as Hadoop does: no escapes, no query."""
    scheme, authority, path = _LOCATION.fullmatch(location).groups()  # type: ignore[union-attr]  # it matches any text
    if scheme in (None, "file"):
        return fs.LocalFileSystem(), path.rstrip("/")
    try:
        known = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
        files, path = fs.FileSystem.from_uri(f"{known}:{authority or ''}{path}")
    except (OSError, ValueError, NotImplementedError):
        files, path = _by_fsspec(location)
    return files, path.rstrip("/")


def _by_fsspec(location: str) -> tuple[fs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs

        # Spark writes these files at the same time: nothing of them may be cached.
        found, path = url_to_fs(location, use_listings_cache=False, skip_instance_cache=True)
    except Exception as error:
        raise CommitRefused(
            f"the checkpoint at {redact_location(location)} cannot be read from Python ({redacted_cause(error, location)}), and the sink "
            "must read its offset log for this guarantee: install an fsspec driver for the scheme (pip install fsspec), "
            "or put the checkpoint where pyarrow or fsspec reach it, or use guarantee=at_least_once",
            checkpoint=redact_location(location),
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(found)), path


def redacted_cause(error: Exception, location: str) -> str:
    """What an error says, without the secrets of a location."""
    text = f"{type(error).__name__}: {error}"
    password, query = location[_password(location)], location.partition("?")[2]
    for secret in filter(None, [password, unquote(password), query]):
        text = text.replace(secret, "***")
    return text


def redact_location(location: str) -> str:
    """The location without a password, and without what some addresses have behind a question mark."""
    shown, mark, _ = location.partition("?")
    place = _password(shown)
    if shown[place]:
        shown = f"{shown[: place.start]}***{shown[place.stop :]}"
    return f"{shown}?***" if mark else shown


def _password(location: str) -> slice:
    """Where the password is: up to the last @, in case it has one itself."""
    last = max(location.rfind("@"), 0)
    user = _USER.search(location, 0, last)
    return slice(last, last) if user is None else slice(user.end(), last)
