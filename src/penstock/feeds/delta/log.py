"""Reader for Delta transaction logs."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pyarrow.parquet as pq
from pyarrow.fs import FileType

from penstock.errors import DataLost, FeedUnavailable
from penstock.feeds.delta.actions import CommitFile, Metadata, Protocol, parse_commit
from penstock.lake.parquet import readable
from penstock.lake.storage import Storage, not_a_table

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.(?:.*\.)?(parquet|json)")
_KEPT_FILES = 500_000
_KEPT_COMMITS = 10_000
_PROBES = 20


class Log:
    """The commits of a table. They never change, so a limited number of them is cached."""

    def __init__(self, storage: Storage, shown: str) -> None:
        self._storage = storage
        self._shown = shown
        self._commits: OrderedDict[int, CommitFile] = OrderedDict()
        self._kept_files = 0
        self._states: OrderedDict[int, Metadata] = OrderedDict()
        self._list()

    def _list(self) -> None:
        self._checkpoints: dict[int, list[str]] = {}
        versions, newest = [], None
        for info in self._storage.listed("_delta_log"):
            name = info.base_name
            if match := _COMMIT.fullmatch(name):
                versions.append(int(match[1]))
                newest = info if versions[-1] == max(versions) else newest
            elif (match := _CHECKPOINT.fullmatch(name)) and info.size:
                self._checkpoints.setdefault(int(match[1]), []).append(f"_delta_log/{name}")
        if newest is None:
            raise not_a_table(self._shown)
        self._newest = max(versions)
        self._mark = newest.size, newest.mtime_ns
        # A gap means a log that was cleaned up by hand: versions before it cannot be read to the end.
        existing = set(versions)
        self.first = self._newest
        while self.first - 1 in existing:
            self.first -= 1

    @property
    def seen(self) -> int:
        """The newest version that has been seen."""
        return self._newest

    def newest(self) -> int:
        """Look up the newest version."""
        for _ in range(_PROBES):
            current, following = self._storage.info(_file(self._newest), _file(self._newest + 1))
            if current.type != FileType.File or (current.size, current.mtime_ns) != self._mark:
                raise FeedUnavailable(
                    f"version {self._newest} of the Delta table {self._shown} has changed: the table was "
                    "removed or recreated. Start the query again, with a new checkpoint",
                    condition="FEED_UNAVAILABLE.TABLE_REPLACED",
                    table=self._shown,
                )
            if following.type != FileType.File:
                return self._newest
            self._newest += 1
            self._mark = following.size, following.mtime_ns
        self._list()
        return self._newest

    def commit(self, version: int) -> CommitFile:
        """Return one commit."""
        if version not in self._commits:
            self._keep(self._parsed(version))
        self._commits.move_to_end(version)
        return self._commits[version]

    def _parsed(self, version: int) -> CommitFile:
        name = _file(version)
        try:
            content = self._storage.read(name)
            commit = parse_commit(
                version, content.splitlines(), lambda: int(self._storage.info(name)[0].mtime_ns // 1000)
            )
            return replace(commit, digest=blake2b(content, digest_size=16).hexdigest())
        except FileNotFoundError:
            raise self.lost(version) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FeedUnavailable(
                f"{name} of the Delta table {self._shown} is not a valid commit file ({error!r}): restore it "
                "from a backup",
                condition="FEED_UNAVAILABLE.BROKEN_LOG",
                version=version,
            ) from None

    def lost(self, version: int) -> DataLost:
        """Return the error for a commit that is no longer in the log."""
        self._list()
        return DataLost(
            f"version {version} of the Delta table {self._shown} is no longer in its log; versions "
            f"{self.first} to {self._newest} are left",
            version=version,
            first=self.first,
            last=self._newest,
        )

    def _keep(self, commit: CommitFile) -> None:
        if commit.version not in self._commits:
            self._kept_files += commit.files
        self._commits[commit.version] = commit
        while len(self._commits) > 1 and (
            self._kept_files > _KEPT_FILES or len(self._commits) > _KEPT_COMMITS
        ):
            self._kept_files -= self._commits.popitem(last=False)[1].files

    def commits(self, after: int, upto: int) -> Iterator[CommitFile]:
        """Yield the commits of a range."""
        return self._read(range(after + 1, upto + 1))

    def backwards(self, version: int) -> Iterator[CommitFile]:
        """Yield a commit and those before it, down to the first one."""
        return self._read(range(version, self.first - 1, -1))

    def _read(self, versions: range) -> Iterator[CommitFile]:
        # Reads ahead, since most of the time is spent waiting for the storage.
        position, ahead = 0, 1
        while position < len(versions):
            some = versions[position : position + ahead]
            unread = [version for version in some if version not in self._commits]
            for commit in self._storage.in_parallel(self._parsed, unread):
                self._keep(commit)
            for version in some:
                yield self.commit(version)
            position, ahead = position + ahead, min(ahead * 2, 32)

    def states(self, after: int, upto: int) -> Iterator[tuple[CommitFile, Metadata | None]]:
        """Yield the commits of a range, each with the table's metadata; None if the log no longer has it."""
        metadata = self.metadata(after)
        for commit in self.commits(after, upto):
            metadata = commit.metadata or metadata or self._checkpoint(commit.version)[0]
            self._note(commit.version, metadata)
            yield commit, metadata

    def metadata(self, version: int) -> Metadata | None:
        """Return the table's metadata at a version; None if the log no longer has it."""
        for commit in self.backwards(version):
            known = self._states.get(commit.version)
            metadata = commit.metadata or known or self._checkpoint(commit.version)[0]
            if metadata is not None:
                self._note(version, metadata)
                return metadata
        return self._checkpoint(self.first - 1)[0]

    def protocol(self, version: int) -> Protocol:
        """Return the protocol that a reader of a version needs."""
        for commit in self.backwards(version):
            protocol = commit.protocol or self._checkpoint(commit.version)[1]
            if protocol is not None:
                return protocol
        return self._checkpoint(self.first - 1)[1] or Protocol(1)

    def _note(self, version: int, metadata: Metadata | None) -> None:
        if metadata is not None:
            self._states[version] = metadata
        while len(self._states) > 1000:
            self._states.popitem(last=False)

    def _checkpoint(self, version: int) -> tuple[Metadata | None, Protocol | None]:
        """Return the metadata and protocol in a checkpoint; None if there is no checkpoint."""
        metadata: Metadata | None = None
        protocol: Protocol | None = None
        for name in self._checkpoints.get(version, ()):
            for action in self._table_actions(name):
                if (action.get("metaData") or {}).get("id"):
                    metadata = Metadata.of(action["metaData"])
                if (action.get("protocol") or {}).get("minReaderVersion"):
                    protocol = Protocol.of(action["protocol"])
            if metadata and protocol:
                break
        return metadata, protocol

    def _table_actions(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the metadata and protocol actions of a checkpoint."""
        if name.endswith(".json"):
            yield from map(json.loads, self._storage.read(name).splitlines())
            return
        with readable(name, self._storage.message), self._storage.open(name) as file:
            parquet = pq.ParquetFile(file)
            wanted = [kind for kind in ("metaData", "protocol") if kind in parquet.schema_arrow.names]
            for batch in parquet.iter_batches(columns=wanted):
                for kind, column in zip(batch.schema.names, batch.columns, strict=True):
                    yield from ({kind: value} for value in column.drop_null().to_pylist())


def _file(version: int) -> str:
    return f"_delta_log/{version:020}.json"
