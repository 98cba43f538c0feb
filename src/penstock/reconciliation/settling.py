"""Decision whether a row differs, or the copy only lags.

Source and copy are read one after the other, again and again. A row that is equal once is done with. A row
really differs if both sides have been the same at two reads, between which the copy has caught up with the
first read of the source: by the position of the query that fills it, or else, without that, by a time that
has passed. The number of the transaction that wrote a row shows whether the source has changed and changed
back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.reconciliation.copies import Copy
from penstock.reconciliation.report import BY_CHECKPOINT, BY_SETTLING
from penstock.reconciliation.rows import ABSENT, Key, Print, prints, without_nan
from penstock.reconciliation.source import SourceTable

MOST_ROWS = 100_000
"""The most rows that may be undecided at a time."""
_LONGEST_PAUSE = 5.0


class Progress(Protocol):
    """The progress of the copy."""

    def passed(self, position: int) -> bool:
        """Whether the copy has everything that was committed before a position of the source's log."""


@dataclass(frozen=True)
class Sighting:
    """What a read found for a key: a row of each side, or none."""

    source: Print
    version: str | None
    """The transaction that wrote the row of the source."""
    copy: Print
    position: int
    since: float
    """When both sides were first as they are."""

    def is_same(self, other: Sighting) -> bool:
        mine = self.source, self.version, self.copy
        return mine == (other.source, other.version, other.copy)


class Candidates:
    """Rows that differ or only lag.

    Parameters
    ----------
    settle
        For how many seconds a difference has to stay the same, if no ``progress`` is known.
    timeout
        After how many seconds a row that keeps changing is given up.
    found
        Called with the rows that really differ: what the source and the copy have for each key.
    given_up
        Called with the keys that stay undecided.
    """

    def __init__(
        self,
        source: SourceTable,
        copy: Copy,
        *,
        settle: float,
        timeout: float,
        progress: Progress | None,
        found: Callable[[dict[Key, Sighting]], None],
        given_up: Callable[[Sequence[Key]], None],
    ) -> None:
        self._source, self._copy = source, copy
        self._settle, self._timeout, self._progress = settle, timeout, progress
        self._found, self._given_up = found, given_up
        self._sightings: dict[Key, Sighting] = {}
        self._first_seen: dict[Key, float] = {}

    @property
    def evidence(self) -> str:
        """How rows that only lag are left out."""
        return BY_SETTLING if self._progress is None else BY_CHECKPOINT

    def __len__(self) -> int:
        return len(self._sightings)

    def add(self, keys: Sequence[Key]) -> None:
        """Add rows that seem to differ; first wait for earlier ones if there are too many."""
        for first in range(0, len(keys), MOST_ROWS):
            part = keys[first : first + MOST_ROWS]
            if len(self) + len(part) > MOST_ROWS:
                self.settle()
            self._look(part)

    def settle(self) -> None:
        """Wait until all rows are decided."""
        pause = min(max(self._settle / 4, 0.05), _LONGEST_PAUSE)
        while self._sightings:
            self._look(list(self._sightings))
            if self._sightings:
                time.sleep(min(pause, self._due_in()))

    def _due_in(self) -> float:
        """Return the number of seconds until the first row may be decided."""
        if self._progress is not None:
            return _LONGEST_PAUSE
        first = min(each.since for each in self._sightings.values())
        return max(first + self._settle - time.monotonic(), 0.01)

    def _look(self, keys: Sequence[Key]) -> None:
        began = time.monotonic()
        passed = self._has_passed(keys)
        now = self._read(keys)
        differing: dict[Key, Sighting] = {}
        undecided = []
        for key, sighting in now.items():
            before = self._sightings.pop(key, None)
            seen = self._first_seen.pop(key, began)
            if sighting.source == sighting.copy:
                continue
            is_same = before is not None and before.is_same(sighting)
            if before is not None and is_same and self._is_sure(before, began, passed):
                differing[key] = sighting
            elif began - seen > self._timeout:
                undecided.append(key)
            else:
                self._sightings[key] = before if before is not None and is_same else sighting
                self._first_seen[key] = seen
        if differing:
            self._found(differing)
        if undecided:
            self._given_up(undecided)

    def _has_passed(self, keys: Iterable[Key]) -> int:
        """Return the highest position of earlier reads that the copy is known to have passed."""
        if self._progress is None:
            return 0
        known = {self._sightings[key].position for key in keys if key in self._sightings}
        return max(filter(self._progress.passed, known), default=0)

    def _is_sure(self, before: Sighting, began: float, passed: int) -> bool:
        if self._progress is not None:
            return before.position <= passed
        return began - before.since >= self._settle

    def _read(self, keys: Sequence[Key]) -> dict[Key, Sighting]:
        source: dict[Key, Print] = {}
        versions: dict[Key, str] = {}
        position = 0
        for part in self._source.find(keys):
            rows = without_nan(part.rows) if self._copy.nan_as_null else part.rows
            source.update(prints([rows], self._source.key))
            versions.update(part.versions)
            position = part.position
        copy = prints(self._copy.find(keys), self._source.key)
        since = time.monotonic()
        return {
            key: Sighting(source.get(key, ABSENT), versions.get(key), copy.get(key, ABSENT), position, since)
            for key in keys
        }
