"""A table's Delta log, as far as it has been asked for."""

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
    """The commits of a table; they never change, so what was read is kept as long as there is room.

    Raises
    ------
    FeedUnavailable
        NOT_A_TABLE, STORAGE.
    """

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
            if found := _COMMIT.fullmatch(name):
                versions.append(int(found[1]))
                newest = info if versions[-1] == max(versions) else newest
            elif (found := _CHECKPOINT.fullmatch(name)) and info.size:
                self._checkpoints.setdefault(int(found[1]), []).append(f"_delta_log/{name}")
        if newest is None:
            raise not_a_table(self._shown)
        self._newest = max(versions)
        self._mark = newest.size, newest.mtime_ns
        # A gap is a log that somebody else has cleaned by hand: what is before it cannot be read to the end.
        there = set(versions)
        self.first = self._newest
        while self.first - 1 in there:
            self.first -= 1

    @property
    def seen(self) -> int:
        """The newest version that has been seen."""
        return self._newest

    def newest(self) -> int:
        """The newest version now.

        Raises
        ------
        FeedUnavailable
            TABLE_REPLACED, when what was the newest commit is another one now.
        """
        for _ in range(_PROBES):
            here, following = self._storage.info(_file(self._newest), _file(self._newest + 1))
            if here.type != FileType.File or (here.size, here.mtime_ns) != self._mark:
                raise FeedUnavailable(
                    f"version {self._newest} of the Delta table {self._shown} is not what it was: the table was removed or made "
                    "anew. Start the query again, with a new checkpoint",
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
        """One commit.

        Raises
        ------
        DataLost
            When it is not there any more.
        """
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
                f"{name} of the Delta table {self._shown} is not a commit file as the Delta protocol has them ({error!r})",
                condition="FEED_UNAVAILABLE.BROKEN_LOG",
                version=version,
            ) from None

    def lost(self, version: int) -> DataLost:
        """The error for a commit that is not in the log any more."""
        self._list()
        return DataLost(
            f"version {version} of the Delta table {self._shown} is no longer in its log; versions {self.first} to "
            f"{self._newest} are left",
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
        """The commits of a range."""
        return self._read(range(after + 1, upto + 1))

    def backwards(self, version: int) -> Iterator[CommitFile]:
        """A commit and those before it, down to the first one that is left."""
        return self._read(range(version, self.first - 1, -1))

    def _read(self, versions: range) -> Iterator[CommitFile]:
        # A few more than were asked for, since most of the time passes in waiting for the storage.
        place, ahead = 0, 1
        while place < len(versions):
            some = versions[place : place + ahead]
            unread = [version for version in some if version not in self._commits]
            for commit in self._storage.side_by_side(self._parsed, unread):
                self._keep(commit)
            for version in some:
                yield self.commit(version)
            place, ahead = place + ahead, min(ahead * 2, 32)

    def states(self, after: int, upto: int) -> Iterator[tuple[CommitFile, Metadata | None]]:
        """The commits of a range, each with what the table was then; None where the log does not tell any more."""
        metadata = self.metadata(after)
        for commit in self.commits(after, upto):
            metadata = commit.metadata or metadata or self._checkpoint(commit.version)[0]
            self._note(commit.version, metadata)
            yield commit, metadata

    def metadata(self, version: int) -> Metadata | None:
        """What the table was at a version; None where the log does not tell any more."""
        for commit in self.backwards(version):
            known = self._states.get(commit.version)
            found = commit.metadata or known or self._checkpoint(commit.version)[0]
            if found is not None:
                self._note(version, found)
                return found
        return self._checkpoint(self.first - 1)[0]

    def protocol(self, version: int) -> Protocol:
        """What a reader of a version has to understand."""
        for commit in self.backwards(version):
            found = commit.protocol or self._checkpoint(commit.version)[1]
            if found is not None:
                return found
        return self._checkpoint(self.first - 1)[1] or Protocol(1)

    def _note(self, version: int, metadata: Metadata | None) -> None:
        if metadata is not None:
            self._states[version] = metadata
        while len(self._states) > 1000:
            self._states.popitem(last=False)

    def _checkpoint(self, version: int) -> tuple[Metadata | None, Protocol | None]:
        """What a checkpoint says of the table; nothing where there is none."""
        metadata: Metadata | None = None
        protocol: Protocol | None = None
        for name in self._checkpoints.get(version, ()):
            for action in self._described(name):
                if (action.get("metaData") or {}).get("id"):
                    metadata = Metadata.of(action["metaData"])
                if (action.get("protocol") or {}).get("minReaderVersion"):
                    protocol = Protocol.of(action["protocol"])
            if metadata and protocol:
                break
        return metadata, protocol

    def _described(self, name: str) -> Iterator[dict[str, Any]]:
        """A checkpoint's actions that are not about files."""
        if name.endswith(".json"):
            yield from map(json.loads, self._storage.read(name).splitlines())
            return
        with readable(name, self._storage.told), self._storage.open(name) as file:
            found = pq.ParquetFile(file)
            wanted = [each for each in ("metaData", "protocol") if each in found.schema_arrow.names]
            for batch in found.iter_batches(columns=wanted):
                for kind, column in zip(batch.schema.names, batch.columns, strict=True):
                    yield from ({kind: value} for value in column.drop_null().to_pylist())


def _file(version: int) -> str:
    return f"_delta_log/{version:020}.json"
