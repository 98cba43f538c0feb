"""Second pass of a comparison: deciding whether a row differs, or the copy only lags.

Source and copy are read repeatedly, one after the other. A row that is equal once is not a difference. A row
is a difference if neither side has changed between two reads, and the copy has caught up with the first read
of the source in between. This is known from the position of the query that fills the copy; without it, a
certain time must have passed. The id of the transaction that wrote a row shows whether the source was changed
and changed back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.reconciliation.copies import Copy
from penstock.reconciliation.report import BY_CHECKPOINT, BY_SETTLING
from penstock.reconciliation.rows import ABSENT, Key, RowDigest, digests_by_key, without_nan
from penstock.reconciliation.source import SourceTable

MAX_CANDIDATES = 100_000
"""The maximum number of rows that are undecided at the same time."""
_MAX_PAUSE = 5.0


class Progress(Protocol):
    """The progress of the copy."""

    def includes(self, position: int) -> bool:
        """Return whether the copy has everything that was committed before a position of the source's log."""


@dataclass(frozen=True)
class Observation:
    """The state of a key at one read: the row of each side, or that there is none."""

    source: RowDigest
    version: str | None
    """The id of the transaction that wrote the row of the source."""
    copy: RowDigest
    position: int
    since: float
    """When this state was first observed."""

    def is_same(self, other: Observation) -> bool:
        own_values = self.source, self.version, self.copy
        return own_values == (other.source, other.version, other.copy)


class Candidates:
    """Rows that may differ or only lag.

    Parameters
    ----------
    settle
        How many seconds a difference must persist if there is no ``progress``.
    timeout
        After how many seconds a row that keeps changing counts as undecided.
    on_differing
        Called with the rows that differ: the observation of each key.
    on_undecided
        Called with the keys that remain undecided.
    """

    def __init__(
        self,
        source: SourceTable,
        copy: Copy,
        *,
        settle: float,
        timeout: float,
        progress: Progress | None,
        on_differing: Callable[[dict[Key, Observation]], None],
        on_undecided: Callable[[Sequence[Key]], None],
    ) -> None:
        self._source, self._copy = source, copy
        self._settle, self._timeout, self._progress = settle, timeout, progress
        self._on_differing, self._on_undecided = on_differing, on_undecided
        self._observations: dict[Key, Observation] = {}
        self._first_seen: dict[Key, float] = {}

    @property
    def evidence(self) -> str:
        """How rows that only lag are excluded."""
        return BY_SETTLING if self._progress is None else BY_CHECKPOINT

    def __len__(self) -> int:
        return len(self._observations)

    def add(self, keys: Sequence[Key]) -> None:
        """Add rows that seem to differ; if there are too many, first wait until earlier rows are decided."""
        for first in range(0, len(keys), MAX_CANDIDATES):
            part = keys[first : first + MAX_CANDIDATES]
            if len(self) + len(part) > MAX_CANDIDATES:
                self.settle()
            self._compare_rows(part)

    def settle(self) -> None:
        """Wait until all rows are decided."""
        pause = min(max(self._settle / 4, 0.05), _MAX_PAUSE)
        while self._observations:
            self._compare_rows(list(self._observations))
            if self._observations:
                time.sleep(min(pause, self._seconds_until_decision()))

    def _seconds_until_decision(self) -> float:
        """Return the number of seconds until the next row may be decided."""
        if self._progress is not None:
            return _MAX_PAUSE
        oldest = min(observation.since for observation in self._observations.values())
        return max(oldest + self._settle - time.monotonic(), 0.01)

    def _compare_rows(self, keys: Sequence[Key]) -> None:
        started = time.monotonic()
        included = self._included_position(keys)
        observations = self._read(keys)
        differing: dict[Key, Observation] = {}
        undecided = []
        for key, observation in observations.items():
            previous = self._observations.pop(key, None)
            first_seen = self._first_seen.pop(key, started)
            if observation.source == observation.copy:
                continue
            is_same = previous is not None and previous.is_same(observation)
            if previous is not None and is_same and self._is_certain(previous, started, included):
                differing[key] = observation
            elif started - first_seen > self._timeout:
                undecided.append(key)
            else:
                self._observations[key] = previous if previous is not None and is_same else observation
                self._first_seen[key] = first_seen
        if differing:
            self._on_differing(differing)
        if undecided:
            self._on_undecided(undecided)

    def _included_position(self, keys: Iterable[Key]) -> int:
        """Return the highest position of earlier reads up to which the copy has everything; 0 if unknown."""
        if self._progress is None:
            return 0
        positions = {self._observations[key].position for key in keys if key in self._observations}
        return max(filter(self._progress.includes, positions), default=0)

    def _is_certain(self, previous: Observation, started: float, included: int) -> bool:
        if self._progress is not None:
            return previous.position <= included
        return started - previous.since >= self._settle

    def _read(self, keys: Sequence[Key]) -> dict[Key, Observation]:
        source: dict[Key, RowDigest] = {}
        versions: dict[Key, str] = {}
        position = 0
        for part in self._source.find(keys):
            rows = without_nan(part.rows) if self._copy.nan_as_null else part.rows
            source.update(digests_by_key([rows], self._source.key))
            versions.update(part.versions)
            position = part.position
        copy = digests_by_key(self._copy.find(keys), self._source.key)
        since = time.monotonic()
        return {
            key: Observation(
                source.get(key, ABSENT), versions.get(key), copy.get(key, ABSENT), position, since
            )
            for key in keys
        }
