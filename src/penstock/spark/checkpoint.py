"""Reader for checkpoints of streaming queries on any file system; it also builds commits from them.

The layout is Spark's (4.3.0). ``metadata`` has the query's id. ``offsets/N`` is written before micro-batch N
runs: a version line, a line of metadata, and for each source a line of JSON (format 1) or ``name:json``
(format 2). ``commits/N`` is written after the sink's commit. ``state`` exists for stateful queries only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl, quote, unquote

from pyarrow import fs

from penstock.commit.micro_batch import BatchCommit, Target
from penstock.commit.offsets import QueueOffset, batch_ranges, other_offsets
from penstock.errors import CheckpointMismatchError, CommitRefusedError
from penstock.json_text import JsonValue, parse_json
from penstock.redaction import SHORTEST_SECRET, redact
from penstock.store.log.written import TaskSegments

T = TypeVar("T")

_LOCATION = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(//[^/]*)?(.*)", re.DOTALL)
_USER = re.compile(r"//[^/:@]*:")

LIMIT_PASSED_SETTING = "penstock.limit.passed"
"""The setting, logged with each epoch, for how many rows a limit has let through up to the epoch."""
LIMIT_RECORD = "penstock/limit.json"
"""The file with a limit on all rows that micro-batches count."""
MAX_FILE_BYTES = 64 << 20
"""The maximum size of a checkpoint file; Spark's own files have a few kilobytes."""
RUNS_KEY = "penstock runs"
"""The key in the offsets of the empty source that counts the runs of a query."""


class Checkpoint:
    """The files of one checkpoint."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.files, self.root = _open(location)
        self._query_id: str | None = None

    @property
    def label(self) -> str:
        """The checkpoint's location without passwords, for messages."""
        return redact_location(self.location)

    def query_id(self) -> str:
        """Return the id that Spark gave the query when it created the checkpoint."""
        if self._query_id is None:
            try:
                self._query_id = str(parse_json(self._read("metadata"))["id"])
            except (ValueError, KeyError, TypeError) as error:
                raise self.malformed("metadata", error) from error
        return self._query_id

    def require_query(self, writers: Iterable[str]) -> None:
        """Refuse a checkpoint of another query; ``writers`` are the query ids that tasks have reported."""
        queries, expected = set(writers), self.query_id()
        if queries != {expected}:
            raise CheckpointMismatchError(
                f"the running query is {', '.join(sorted(queries))}, but the sink's checkpoint belongs to "
                f"{expected}: pass checkpointLocation as a full URL if paths without a scheme are not local",
                condition="CHECKPOINT_MISMATCH.OTHER_LOCATION",
                query=sorted(queries),
                checkpoint=expected,
            )

    def require_readable(self, guarantee: str) -> None:
        """Refuse a checkpoint whose files this process cannot reach."""
        try:
            self.files.get_file_info(f"{self.root}/metadata")
        except Exception as error:
            raise CommitRefusedError(
                f"guarantee={guarantee} reads the checkpoint's offset log, and {self.label!r} cannot be "
                f"reached from this Python ({redacted_cause(error, self.location)}): check the address and "
                "the credentials, or use guarantee=at_least_once",
                condition="COMMIT_REFUSED.CHECKPOINT_UNREACHABLE",
                checkpoint=self.label,
            ) from None

    def offsets(self, batch_id: int) -> list[JsonValue]:
        """Return the offsets of all sources for a micro-batch; empty before the first one."""
        if batch_id < 0:
            return []
        name = f"offsets/{batch_id}"
        try:
            return parse_offsets(self._read(name))
        except ValueError as error:
            raise self.malformed(name, error) from error

    def ranges(self, batch_id: int | None) -> list[QueueOffset]:
        """Return the ranges of queues in a micro-batch; empty if ``batch_id`` is None."""
        return [] if batch_id is None else batch_ranges(self.offsets(batch_id), ())

    def input_digest(self, batch_id: int) -> str:
        """Return a hash of a micro-batch's offsets, which identifies its input."""
        offsets = json.dumps(self.offsets(batch_id), sort_keys=True)
        return hashlib.sha256(offsets.encode()).hexdigest()

    def batch_commit(
        self,
        target: Target[T],
        batch_id: int,
        *,
        rows: int,
        app_id: str | None = None,
        attempts: Mapping[str, int] | None = None,
        written: Sequence[TaskSegments] | None = None,
        tasks: Mapping[int, int] | None = None,
        rebind: bool = False,
        new_sink: bool = False,
    ) -> BatchCommit[T]:
        """Return the commit of a micro-batch whose tasks have ended; the app is the query's id by default."""
        offsets = self.offsets(batch_id)
        query_id, stateful = self.query_id(), self.stateful()
        return BatchCommit(
            sink=target,
            app_id=app_id or query_id,
            batch_id=batch_id,
            rows=rows,
            origin=query_id,
            sources=batch_ranges(offsets, self.offsets(batch_id - 1)),
            others=other_offsets(offsets),
            attempts=attempts or {},
            written=written,
            tasks=tasks,
            stateful=stateful,
            rebind=rebind,
            new_sink=new_sink,
            logged=None if stateful else _restorable_offset(offsets),
        )

    def limit_passed(self, batch_id: int) -> int | None:
        """Return how many rows the limit of a continuous query has let through; None without a limit."""
        name = f"offsets/{batch_id}"
        text = self._read(name)
        try:
            metadata = text.split("\n")[1]
            passed = parse_json(metadata).get("conf", {}).get(LIMIT_PASSED_SETTING) if metadata else None
            return None if passed is None else int(passed)
        except (IndexError, ValueError, AttributeError, TypeError, OverflowError) as error:
            raise self.malformed(name, error) from error

    def malformed(self, name: str, error: Exception) -> CommitRefusedError:
        """Return the error for a malformed file of the checkpoint."""
        return CommitRefusedError(
            f"the checkpoint's file {name} at {self.label} is malformed or truncated "
            f"({type(error).__name__}): restore it from a copy, or start with a new checkpoint",
            condition="COMMIT_REFUSED.CHECKPOINT_DAMAGED",
            checkpoint=self.label,
        )

    def stateful(self) -> bool:
        return bool(self.files.get_file_info(f"{self.root}/state").type == fs.FileType.Directory)

    def last_commit(self) -> int | None:
        """Return the last micro-batch in the commit log; None if there is none."""
        return self._last_number("commits")

    def last_planned(self) -> int | None:
        """Return the last micro-batch in the offset log, which may be uncommitted; None if there is none."""
        return self._last_number("offsets")

    def tree(self) -> dict[str, fs.FileInfo]:
        """Return all files and folders by path, without those that a running query deletes meanwhile."""
        infos = self.files.get_file_info(fs.FileSelector(self.root, allow_not_found=True, recursive=True))
        # Some file systems put their own address before a path.
        return {info.path.partition(f"{self.root}/")[2]: info for info in infos}

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if it does not exist."""
        try:
            with self.files.open_input_stream(f"{self.root}/{name}") as stream:
                content = bytes(stream.read(MAX_FILE_BYTES + 1))
        except FileNotFoundError:
            return None
        if len(content) > MAX_FILE_BYTES:
            raise OSError(f"the file {name} has more than {MAX_FILE_BYTES} bytes")
        return content

    def _last_number(self, name: str) -> int | None:
        selector = fs.FileSelector(f"{self.root}/{name}", allow_not_found=True)
        names = [info.base_name for info in self.files.get_file_info(selector)]
        return max(map(int, filter(is_batch_number, names)), default=None)

    def _read(self, name: str) -> str:
        try:
            content = self.read(name)
            if content is None:
                raise FileNotFoundError(name)
            return content.decode()
        except Exception as error:
            raise CommitRefusedError(
                f"the checkpoint's file {name} cannot be read at {self.label}: {type(error).__name__}; it "
                "was deleted, or the checkpoint belongs to another query",
                condition="COMMIT_REFUSED.CHECKPOINT_DAMAGED",
                checkpoint=self.label,
            ) from error


def is_batch_number(name: str) -> bool:
    """Return whether the name of a log file is the number of a micro-batch, in ASCII digits."""
    return name.isascii() and name.isdigit()


def _restorable_offset(offsets: Sequence[JsonValue]) -> str | None:
    """Return the offset with which a checkpoint that lost this micro-batch can be restored.

    This is only possible for a query with a single source.
    """
    return json.dumps(offsets[0]) if len(offsets) == 1 and isinstance(offsets[0], dict) else None


def parse_offsets(text: str) -> list[JsonValue]:
    """Parse an offset log file; return each source's offset: JSON, other text, or None for none yet."""
    version, _, *lines = text.split("\n")
    if version not in ("v1", "v2"):
        raise CommitRefusedError(
            f"the offset log has the unknown format {version[:20]!r} (v1 and v2 are supported): upgrade "
            "Penstock",
            condition="COMMIT_REFUSED.CHECKPOINT_TOO_NEW",
        )
    has_names = version == "v2"
    return [_parse_offset(line.partition(":")[2] if has_names else line) for line in lines if line]


def _parse_offset(text: str) -> JsonValue:
    if text == "-":
        return None
    try:
        offset: JsonValue = parse_json(text)
    except ValueError:
        return text
    return offset


def _open(location: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a location, and the path in it; like Hadoop, do not decode the path."""
    match = _LOCATION.fullmatch(location)
    assert match is not None, "it matches any text"
    scheme, authority, path = match.groups()
    if scheme in (None, "file"):
        return fs.LocalFileSystem(), path.rstrip("/")
    try:
        arrow_scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
        files, path = fs.FileSystem.from_uri(f"{arrow_scheme}:{authority or ''}{path}")
    except (OSError, ValueError, NotImplementedError):
        files, path = _open_with_fsspec(location)
    return files, path.rstrip("/")


def _open_with_fsspec(location: str) -> tuple[fs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs

        # Nothing may be cached, because Spark writes these files at the same time.
        files, path = url_to_fs(location, use_listings_cache=False, skip_instance_cache=True)
    except Exception as error:
        reason = redacted_cause(error, location)
        raise CommitRefusedError(
            f"the checkpoint at {redact_location(location)} cannot be read from Python ({reason}), but the "
            "sink must read its offset log for this guarantee: install an fsspec driver for the scheme, put "
            "the checkpoint where pyarrow can read it, or use guarantee=at_least_once",
            condition="COMMIT_REFUSED.CHECKPOINT_UNREACHABLE",
            checkpoint=redact_location(location),
            reason=reason,
        ) from None
    return fs.PyFileSystem(fs.FSSpecHandler(files)), path


def redacted_cause(error: Exception, location: str) -> str:
    """Return the text of an error without the secrets of a location."""
    text = f"{type(error).__name__}: {error}"
    password, query = location[_password_slice(location)], location.partition("?")[2]
    # Libraries may sort and encode the parameters differently.
    values = [value for _, value in parse_qsl(query) if len(value) >= SHORTEST_SECRET]
    secrets = [query, password, unquote(password), *values, *map(quote, values)]
    return redact(text, [secret for secret in secrets if secret])


def redact_location(location: str) -> str:
    """Return a location without its password and query string."""
    shown, separator, _ = location.partition("?")
    password = _password_slice(shown)
    if shown[password]:
        shown = f"{shown[: password.start]}***{shown[password.stop :]}"
    return f"{shown}?***" if separator else shown


def _password_slice(location: str) -> slice:
    """Return the slice with the password, which ends at the last @, since passwords may contain an @."""
    host_start = max(location.rfind("@"), 0)
    user_match = _USER.search(location, 0, host_start)
    return slice(host_start, host_start) if user_match is None else slice(user_match.end(), host_start)
