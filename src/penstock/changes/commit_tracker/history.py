"""What is known of a feed's commits, and what they may not do."""

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
"""A version that was seen this many generations ago is forgotten: a million versions are remembered."""


class Versions:
    """A set of versions with a bound on its size: the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._young: set[Any] = set()
        self._old: deque[Any] = deque(maxlen=GENERATIONS)

    def add(self, versions: Iterable[Any]) -> None:
        self._young.update(versions)
        if len(self._young) >= GENERATION:
            self._old.append(np.sort(_numbers(self._young)))
            self._young = set()

    def among(self, versions: Iterable[Any]) -> list[Any]:
        """Those of the versions that are in the set."""
        asked = list(versions)
        found = self._young.intersection(asked)
        if self._old and asked:
            numbers = _numbers(asked)
            for generation in self._old:
                places = np.minimum(np.searchsorted(generation, numbers), len(generation) - 1)
                found.update(asked[place] for place in np.flatnonzero(generation[places] == numbers))
        return list(found)


def _numbers(versions: Iterable[Any]) -> Any:
    """Versions themselves, or the 64-bit hashes of textual ones."""
    return np.array(
        [version if isinstance(version, int) else hash(version) for version in versions], np.int64
    )


class Commits:
    """The commits of one batch query, or of the micro-batch in hand."""

    def __init__(self) -> None:
        self.times: dict[Any, int] = {}

    def note(self, commits: pa.Table) -> None:
        """Take note of commits.

        Raises
        ------
        ChangelogContractViolation
            SEVERAL_TIMESTAMPS: one version has two of them.
        """
        versions, times = commits.column(0).to_pylist(), commits.column(1).to_pylist()
        told = dict(zip(versions, times, strict=True))
        if len(told) < len(versions):
            version, time = next(
                pair for pair in zip(versions, times, strict=True) if told[pair[0]] != pair[1]
            )
            _refuse_timestamps(version, time, told[version])
        for version in told.keys() & self.times.keys():
            if told[version] != self.times[version]:
                _refuse_timestamps(version, self.times[version], told[version])
        self.times.update(told)


def _refuse_timestamps(version: Any, first: int, second: int) -> None:
    raise ChangelogContractViolation(
        f"commit {version!r} has two timestamps, {moment(first)} and {moment(second)}: a commit happens at one time",
        condition="CHANGELOG_CONTRACT_VIOLATION.SEVERAL_TIMESTAMPS",
        version=version,
    )


class WholeCommits(Commits):
    """The commits of a stream in which each is inside one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = -1
        self._earlier = Versions()

    def turn_to(self, batch: int) -> None:
        """What is known so far is of micro-batches before this one."""
        self._earlier.add(self.times)
        self.times, self.batch = {}, batch

    def note(self, commits: pa.Table) -> None:
        """Take note of commits of the micro-batch in hand.

        Raises
        ------
        ChangelogContractViolation
            COMMIT_IN_SEVERAL_MICRO_BATCHES: one was in an earlier micro-batch. SEVERAL_TIMESTAMPS.
        """
        again = self._earlier.among(commits.column(0).to_pylist())
        if again:
            raise ChangelogContractViolation(
                f"commit {again[0]!r} is in micro-batch {self.batch} and was in an earlier one, and the contract says "
                "whole_commits=True: let the source keep a commit together (alignToAppends with a queue), or say "
                "whole_commits=False and use the watermark strategy",
                condition="CHANGELOG_CONTRACT_VIOLATION.COMMIT_IN_SEVERAL_MICRO_BATCHES",
                version=again[0],
                batch=self.batch,
            )
        super().note(commits)


class LateCommits(Commits):
    """The commits of a stream that waits for those that may still come, by a watermark on their time."""

    def __init__(self, delay_ms: int) -> None:
        super().__init__()
        self.batch = -1
        self._delay_ms = delay_ms
        self._greatest: int | None = None

    def turn_to(self, batch: int) -> None:
        """What is known so far is of micro-batches before this one."""
        self.batch = batch
        if self.times:
            greatest = max(self.times.values()) // 1000
            self._greatest = greatest if self._greatest is None else max(greatest, self._greatest)
            open_from = self._greatest - self._delay_ms
            self.times = {version: time for version, time in self.times.items() if time // 1000 > open_from}

    def note(self, commits: pa.Table) -> None:
        """Take note of commits of the micro-batch in hand.

        Raises
        ------
        ChangelogContractViolation
            LATE_COMMIT: its time has passed, to the millisecond. COMMIT_BEFORE_1970: Spark's watermark begins there, and
            drops what is not after it. SEVERAL_TIMESTAMPS.
        """
        if self._greatest is not None:
            limit = self._greatest - self._delay_ms
            late = np.flatnonzero(commits.column(1).to_numpy() // 1000 <= limit)
            if len(late):
                self._refuse_late(*(column[int(late[0])].as_py() for column in commits.columns))
        early = np.flatnonzero(commits.column(1).to_numpy() // 1000 <= 0)
        if len(early):
            self._refuse_early(*(column[int(early[0])].as_py() for column in commits.columns))
        super().note(commits)

    def _refuse_early(self, version: Any, time: int) -> None:
        raise ChangelogContractViolation(
            f"commit {version!r} is of {moment(time)}, and Spark's watermark drops what is not after 1970-01-01T00:00:00Z: give "
            "commits the times at which they happened, or use the micro_batch strategy",
            condition="CHANGELOG_CONTRACT_VIOLATION.COMMIT_BEFORE_1970",
            version=version,
            timestamp=moment(time),
        )

    def _refuse_late(self, version: Any, time: int) -> None:
        assert self._greatest is not None
        raise ChangelogContractViolation(
            f"commit {version!r} of {moment(time)} came in micro-batch {self.batch}, too late: an earlier micro-batch had one "
            f"of {moment(self._greatest * 1000)}, and watermark_delay is {self._delay_ms} ms. Make watermark_delay as long as "
            "commits may be apart in time and come out of order, to the millisecond",
            condition="CHANGELOG_CONTRACT_VIOLATION.LATE_COMMIT",
            version=version,
            timestamp=moment(time),
            batch=self.batch,
        )


def moment(micros: int) -> str:
    """A time for people, in UTC."""
    return moment_of(micros).isoformat()
