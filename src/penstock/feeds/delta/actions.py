"""What a commit file of a Delta log says: the Delta protocol's actions, as far as changes go by them."""

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
    """The file of an action."""
    found = _ROWS.search(action.get("stats") or "")
    return DataFile(
        path=unquote(action["path"]),
        size=action.get("size") or 0,
        rows=int(found[1]) if found else None,
        values=tuple(sorted((action.get("partitionValues") or {}).items())),
        deletion_vector=action.get("deletionVector") is not None,
    )


@dataclass(frozen=True)
class Metadata:
    """The table's description from some version on."""

    id: str
    schema: str
    """Delta's JSON."""
    configuration: Mapping[str, str]
    partition_columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> Metadata:
        # A checkpoint has pairs where a commit file has an object.
        configuration = dict(action.get("configuration") or {})
        return cls(
            action["id"], action["schemaString"], configuration, tuple(action.get("partitionColumns") or ())
        )

    @cached_property
    def feed(self) -> bool:
        """Whether commits write down the rows that they change."""
        return self.configuration.get(FEED, "").lower() == "true"

    @property
    def column_mapping(self) -> str:
        return self.configuration.get(MAPPING) or "none"


@dataclass(frozen=True)
class Protocol:
    """What a reader has to understand."""

    reader: int
    features: tuple[str, ...] = ()

    @classmethod
    def of(cls, action: Mapping[str, Any]) -> Protocol:
        return cls(action.get("minReaderVersion") or 1, tuple(action.get("readerFeatures") or ()))


@dataclass(frozen=True)
class CommitFile:
    """One commit; files that it only rearranges (``dataChange`` is false) are left out."""

    version: int
    timestamp: int
    """Microseconds since 1970, UTC."""
    metadata: Metadata | None = None
    protocol: Protocol | None = None
    added: tuple[DataFile, ...] = ()
    removed: tuple[DataFile, ...] = ()
    changed: tuple[DataFile, ...] = field(default=())
    """Files of changed rows, which say all that there is to say."""
    digest: str = ""
    """Of what the commit file says."""

    @property
    def files(self) -> int:
        return len(self.added) + len(self.removed) + len(self.changed)

    @property
    def needed(self) -> tuple[tuple[str | None, DataFile], ...]:
        """The files that its changes are in, each with its rows' change type, or None where they have one each."""
        if self.changed:
            return tuple((None, each) for each in self.changed)
        return (
            *(("delete", each) for each in self.removed),
            *(("insert", each) for each in self.added),
        )

    @property
    def rewrites(self) -> bool:
        """Whether rows that did not change may be among those of its files."""
        return bool(not self.changed and self.added and self.removed)


def parse_commit(version: int, lines: Iterable[bytes], written: Callable[[], int]) -> CommitFile:
    """Read a commit file.

    Parameters
    ----------
    written
        Tells when the file was last modified, for commits that do not say when they were made; microseconds since 1970.

    The rules are those of the Delta protocol, "Change Data Files" and "Commit Provenance Information".
    """
    found: dict[str, list[DataFile]] = {"add": [], "remove": [], "cdc": []}
    metadata: Metadata | None = None
    protocol: Protocol | None = None
    made: int | None = None
    for line in lines:
        if not line.strip():
            continue
        for kind, action in json.loads(line).items():
            if kind in found:
                if kind == "cdc" or action.get("dataChange", True):
                    found[kind].append(data_file(action))
            elif kind == "metaData":
                metadata = Metadata.of(action)
            elif kind == "protocol":
                protocol = Protocol.of(action)
            elif kind == "commitInfo":
                made = action.get("inCommitTimestamp") or action.get("timestamp")
    timestamp = written() if made is None else int(made) * 1000
    return CommitFile(
        version,
        timestamp,
        metadata,
        protocol,
        tuple(found["add"]),
        tuple(found["remove"]),
        tuple(found["cdc"]),
    )
