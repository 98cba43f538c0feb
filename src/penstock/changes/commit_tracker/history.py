"""The commits of a feed that have been read, with checks of its contract."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ChangelogContractViolation
from penstock.instants import moment_of

GENERATION = 50_000
GENERATIONS = 20
"""A version from this many generations ago is forgotten: a million versions are kept."""


class Versions:
    """A bounded set of versions: the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._young: set[Any] = set()
        self._old: deque[Any] = deque(maxlen=GENERATIONS)

    def add(self, versions: Iterable[Any]) -> None:
        self._young.update(versions)
        if len(self._young) >= GENERATION:
            self._old.append(np.sort(_numbers(self._young)))
            self._young = set()

    def among(self, versions: Iterable[Any]) -> list[Any]:
        """Return the versions that are in the set."""
        candidates = list(versions)
        known = self._young.intersection(candidates)
        if self._old and candidates:
            numbers = _numbers(candidates)
            for generation in self._old:
                indexes = np.minimum(np.searchsorted(generation, numbers), len(generation) - 1)
                known.update(candidates[index] for index in np.flatnonzero(generation[indexes] == numbers))
        return list(known)


def _numbers(versions: Iterable[Any]) -> Any:
    """Return versions as integers: themselves, or the 64-bit hashes of strings."""
    return np.array(
        [version if isinstance(version, int) else hash(version) for version in versions], np.int64
    )


class Commits:
    """The commits of a batch query, or of the micro-batch in flight."""

    def __init__(self) -> None:
        self.times: dict[Any, int] = {}

    def add_commits(self, commits: pa.Table) -> None:
        """Add commits."""
        versions, times = commits.column(0).to_pylist(), commits.column(1).to_pylist()
        by_version = dict(zip(versions, times, strict=True))
        if len(by_version) < len(versions):
            version, time = next(
                pair for pair in zip(versions, times, strict=True) if by_version[pair[0]] != pair[1]
            )
            _refuse_timestamps(version, time, by_version[version])
        for version in by_version.keys() & self.times.keys():
            if by_version[version] != self.times[version]:
                _refuse_timestamps(version, self.times[version], by_version[version])
        self.times.update(by_version)


def _refuse_timestamps(version: Any, first: int, second: int) -> None:
    raise ChangelogContractViolation(
        f"commit {version!r} has two timestamps, {moment(first)} and {moment(second)}: give it one",
        condition="CHANGELOG_CONTRACT_VIOLATION.SEVERAL_TIMESTAMPS",
        version=version,
    )


class WholeCommits(Commits):
    """The commits of a stream in which each is whole in one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = -1
        self._earlier = Versions()

    def begin_batch(self, batch: int) -> None:
        """Begin a micro-batch: the commits so far belong to earlier ones."""
        self._earlier.add(self.times)
        self.times, self.batch = {}, batch

    def add_commits(self, commits: pa.Table) -> None:
        """Add commits of the micro-batch in flight."""
        again = self._earlier.among(commits.column(0).to_pylist())
        if again:
            raise ChangelogContractViolation(
                f"commit {again[0]!r} is in micro-batch {self.batch} and was in an earlier one, but the "
                "contract has whole_commits=True: let the source keep commits together (alignToAppends with "
                "a queue), or set whole_commits=False and use the watermark strategy",
                condition="CHANGELOG_CONTRACT_VIOLATION.COMMIT_IN_SEVERAL_MICRO_BATCHES",
                version=again[0],
                batch=self.batch,
            )
        super().add_commits(commits)


class LateCommits(Commits):
    """The commits of a stream that waits for late ones, by a watermark on their time."""

    def __init__(self, delay_ms: int) -> None:
        super().__init__()
        self.batch = -1
        self._delay_ms = delay_ms
        self._greatest: int | None = None

    def begin_batch(self, batch: int) -> None:
        """Begin a micro-batch: the commits so far belong to earlier ones."""
        self.batch = batch
        if self.times:
            greatest = max(self.times.values()) // 1000
            self._greatest = greatest if self._greatest is None else max(greatest, self._greatest)
            open_from = self._greatest - self._delay_ms
            self.times = {version: time for version, time in self.times.items() if time // 1000 > open_from}

    def add_commits(self, commits: pa.Table) -> None:
        """Add commits of the micro-batch in flight."""
        if self._greatest is not None:
            limit = self._greatest - self._delay_ms
            late = np.flatnonzero(commits.column(1).to_numpy() // 1000 <= limit)
            if len(late):
                self._refuse_late(*(column[int(late[0])].as_py() for column in commits.columns))
        early = np.flatnonzero(commits.column(1).to_numpy() // 1000 <= 0)
        if len(early):
            self._refuse_early(*(column[int(early[0])].as_py() for column in commits.columns))
        super().add_commits(commits)

    def _refuse_early(self, version: Any, time: int) -> None:
        raise ChangelogContractViolation(
            f"commit {version!r} has the time {moment(time)}, and Spark's watermark drops rows up to "
            "1970-01-01T00:00:00Z: give commits the times at which they happened, or use the micro_batch "
            "strategy",
            condition="CHANGELOG_CONTRACT_VIOLATION.COMMIT_BEFORE_1970",
            version=version,
            timestamp=moment(time),
        )

    def _refuse_late(self, version: Any, time: int) -> None:
        assert self._greatest is not None
        raise ChangelogContractViolation(
            f"commit {version!r} of {moment(time)} in micro-batch {self.batch} is too late: an earlier "
            f"micro-batch had one of {moment(self._greatest * 1000)}, and watermark_delay is "
            f"{self._delay_ms} ms. Raise watermark_delay to the longest time by which commits come out of "
            "order",
            condition="CHANGELOG_CONTRACT_VIOLATION.LATE_COMMIT",
            version=version,
            timestamp=moment(time),
            batch=self.batch,
        )


def moment(micros: int) -> str:
    """Format a time in UTC, for people."""
    return moment_of(micros).isoformat()
