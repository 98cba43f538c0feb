"""Actions of a Delta commit file, as far as change feeds need them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from penstock.feeds.file_commits import DataFile

_ROWS = re.compile(r'"numRecords"\s*:\s*(\d+)')
FEED = "delta.enableChangeDataFeed"
MAPPING = "delta.columnMapping.mode"


def data_file(action: Mapping[str, Any]) -> DataFile:
    """Return the file of an action."""
    rows = _ROWS.search(action.get("stats") or "")
    return DataFile(
        path=unquote(action["path"]),
        size=action.get("size") or 0,
        rows=int(rows[1]) if rows else None,
        values=tuple(sorted((action.get("partitionValues") or {}).items())),
        deletion_vector=action.get("deletionVector") is not None,
    )


@dataclass(frozen=True)
class Metadata:
    """The metadata of a table from a version on."""

    id: str
    schema: str
    """The schema as Delta's JSON."""
    configuration: Mapping[str, str]
    partition_columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> Metadata:
        # A checkpoint has pairs, a commit file an object.
        configuration = dict(action.get("configuration") or {})
        return cls(
            action["id"], action["schemaString"], configuration, tuple(action.get("partitionColumns") or ())
        )

    @cached_property
    def feed(self) -> bool:
        """Whether commits record the rows that they change."""
        return self.configuration.get(FEED, "").lower() == "true"

    @property
    def column_mapping(self) -> str:
        return self.configuration.get(MAPPING) or "none"


@dataclass(frozen=True)
class Protocol:
    """The reader version and features that a table needs."""

    reader: int
    features: tuple[str, ...] = ()

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> Protocol:
        return cls(action.get("minReaderVersion") or 1, tuple(action.get("readerFeatures") or ()))


@dataclass(frozen=True)
class CommitFile:
    """One commit, without files that it only rearranges (``dataChange`` is false)."""

    version: int
    timestamp: int
    """Microseconds since 1970, UTC."""
    metadata: Metadata | None = None
    protocol: Protocol | None = None
    added: tuple[DataFile, ...] = ()
    removed: tuple[DataFile, ...] = ()
    changed: tuple[DataFile, ...] = field(default=())
    """Change data files; they hold all changes of the commit."""
    digest: str = ""
    """A digest of the commit file."""

    @property
    def files(self) -> int:
        return len(self.added) + len(self.removed) + len(self.changed)

    @property
    def needed(self) -> tuple[tuple[str | None, DataFile], ...]:
        """The files with its changes, each with the change type of its rows; None if each row has its own."""
        if self.changed:
            return tuple((None, file) for file in self.changed)
        return (
            *(("delete", file) for file in self.removed),
            *(("insert", file) for file in self.added),
        )

    @property
    def rewrites(self) -> bool:
        """Whether its files may have rows that did not change."""
        return bool(not self.changed and self.added and self.removed)


def parse_commit(version: int, lines: Iterable[bytes], written: Callable[[], int]) -> CommitFile:
    """Parse a commit file (Delta protocol, "Change Data Files" and "Commit Provenance Information").

    Parameters
    ----------
    written
        Returns when the file was last modified, for commits without a timestamp; microseconds since 1970.
    """
    files: dict[str, list[DataFile]] = {"add": [], "remove": [], "cdc": []}
    metadata: Metadata | None = None
    protocol: Protocol | None = None
    timestamp_ms: int | None = None
    for line in lines:
        if not line.strip():
            continue
        for kind, action in json.loads(line).items():
            if kind in files:
                if kind == "cdc" or action.get("dataChange", True):
                    files[kind].append(data_file(action))
            elif kind == "metaData":
                metadata = Metadata.of(action)
            elif kind == "protocol":
                protocol = Protocol.of(action)
            elif kind == "commitInfo":
                timestamp_ms = action.get("inCommitTimestamp") or action.get("timestamp")
    timestamp = written() if timestamp_ms is None else int(timestamp_ms) * 1000
    return CommitFile(
        version,
        timestamp,
        metadata,
        protocol,
        tuple(files["add"]),
        tuple(files["remove"]),
        tuple(files["cdc"]),
    )
