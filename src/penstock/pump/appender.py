"""Appending a pump's rows to its queues, in the transaction that stores the pump's position.

Versions of commits in a queue must ascend, but the log of another server may have lower positions. Therefore
the version of a commit is its log position plus an offset, which is 0 at first. A recovery raises the offset
if necessary. Only this module converts: the store has versions, and readers of the log have positions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.feeds.contract import COMMIT_VERSION
from penstock.feeds.feed_writer import append_commits
from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.following import PlaceInLog, SlotFollower, Step
from penstock.feeds.postgres.table_readers import TableReaders
from penstock.json_text import Json
from penstock.pump.reports import Reports
from penstock.pump.targets import CommitTimes, PartialCommit, Targets
from penstock.store.database import Database, Transaction
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpPosition

_RESERVED_BYTES = 16
"""During backfills, a stored position without rows stays this many bytes before the end of the log.

The next commit may begin at the end, and chunks of tables use the positions in between. A commit record is
always longer than this.
"""
_CONFIRM_INTERVAL_SECONDS = 1.0
"""How often a position without rows is stored and confirmed to the server."""


@dataclass
class Appender:
    """Writer of a pump's rows and position, for the process that owns the pump."""

    database: Database
    name: str
    """The pump's name."""
    owner: str
    position: PumpPosition
    targets: Targets
    readers: TableReaders
    reports: Reports
    offset: int
    """The version of a commit minus its position in the log."""

    def __post_init__(self) -> None:
        self._confirmed_at = 0.0
        self._state_changes: list[Callable[[Json], None]] = []
        self._tables = self.readers.tables
        """The table definitions in the store."""

    @property
    def place(self) -> PlaceInLog:
        """The place in the log from which to continue."""
        return _with_offset(
            PlaceInLog(self.position.version, self.position.part_version, self.position.part_rows),
            -self.offset,
        )

    def last_commit_position(self) -> int:
        """Return the log position of the last commit with rows in a queue; below 1 if there is none."""
        return self.database.run(self.targets.last_commit, write=False) - self.offset

    def rewind(self, place: PlaceInLog) -> None:
        """Move the pump back to an earlier place in the log, if no rows after it have been appended."""
        place = _with_offset(place, self.offset)
        if place.version >= self.position.version:
            return
        before, after = self.position, replace(self.position, version=place.version)
        self.database.run(lambda tx: self._move(tx, before, after), idempotent=True)
        self.position = after

    def add_state_change(self, change: Callable[[Json], None]) -> None:
        """Change the pump's state in the next transaction that moves its position."""
        self._state_changes.append(change)

    def append(self, step: Step, *, store_position: bool = False) -> None:
        """Append the rows of a step and move the pump's position, in one transaction.

        The position of a step without rows is stored only if ``store_position`` is set. Otherwise it is
        stored with the next rows, or before it is confirmed.
        """
        before, place = self.position, _with_offset(step.place, self.offset)
        if before.part_rows and 0 < place.version < before.part_version:
            # These are commits without rows that were read before.
            return
        has_complete_commit = place.version > 0
        is_continued = has_complete_commit and before.part_rows > 0
        partial = PartialCommit(before.part_version, before.timestamp) if is_continued else None
        batches = self._with_commit_versions(step)
        commit_times = CommitTimes(batches, before.timestamp)
        version = place.version if has_complete_commit else before.version
        after = PumpPosition(version, commit_times.last, place.part_version, place.part_rows)
        rows = self.targets.rows(batches, after.version, commit_times, partial)
        if not rows and not (store_position and has_complete_commit):
            return
        append_commits(self.database, rows, lambda tx: self._move(tx, before, after))
        self._state_changes = []
        self.position, self._tables = after, self._tables_at(after)
        commits = {
            commit
            for queue_rows in rows
            for commit in zip(queue_rows.versions, queue_rows.timestamps, strict=True)
        }
        times_of_commits = np.array([time for _, time in commits], np.int64)
        self.reports.appended(times_of_commits, sum(queue_rows.rows.num_rows for queue_rows in rows))

    def _with_commit_versions(self, step: Step) -> dict[str, list[pa.RecordBatch]]:
        """Return the rows of a step with commit versions instead of log positions."""
        if not self.offset:
            return step.rows
        return {
            table: [_add_offset(batch, self.offset) for batch in batches]
            for table, batches in step.rows.items()
        }

    def _move(self, tx: Transaction, before: PumpPosition, after: PumpPosition) -> bool:
        if not pumps.move_pump(tx, self.name, self.owner, before, after):
            return False
        tables = self._tables_at(after)
        if tables is not self._tables:
            self._update_state(tx, lambda state: state.update(tables=tables.to_json()))
        for state_change in self._state_changes:
            self._update_state(tx, state_change)
        return True

    def _tables_at(self, position: PumpPosition) -> Tables:
        """Return the table definitions with which to resume at a position.

        After an interruption, an incomplete commit is read again from its start, where a table may have a
        different definition than at its end.
        """
        if not position.part_rows:
            return self.readers.tables
        return self.readers.tables_before(position.part_version - self.offset)

    def confirm(self, follower: SlotFollower, step: Step, *, reserve_positions: bool) -> None:
        """Confirm appended positions to the server, which may then remove its WAL.

        If the log continues without rows of the tables, the pump's position is stored first: a store that is
        behind the slot counts as restored from a backup. The time up to which everything has been appended is
        stored with it; later commits get no earlier time.
        """
        follower.confirm(self.place.version + 1)
        finalized = follower.finalized_until or 0
        if finalized and not reserve_positions:
            self.reports.finalized(finalized)
        current, now = self.position, time.monotonic()
        reserved = _RESERVED_BYTES if reserve_positions else 1
        upto = max((step.complete or 0) - reserved, step.place.version) + self.offset
        after = replace(
            current, version=max(upto, current.version), timestamp=max(current.timestamp, finalized)
        )
        if after == current or current.part_rows or now - self._confirmed_at < _CONFIRM_INTERVAL_SECONDS:
            return
        self._confirmed_at = now
        self.database.run(lambda tx: self._move(tx, current, after), idempotent=True)
        self.position, self._state_changes = after, []
        follower.confirm(self.place.version + 1)

    def store_publication_state(self) -> None:
        """Store the last known state of the publication."""
        publication = self.readers.state.to_json()
        self.database.run(
            lambda tx: self._update_state(tx, lambda state: state.update(publication=publication)),
            idempotent=True,
        )

    def _update_state(self, tx: Transaction, change: Callable[[Json], None]) -> None:
        state = pumps.require_owned(tx, self.name, self.owner).state
        change(state)
        pumps.set_pump_state(tx, self.name, self.owner, json.dumps(state))


def _with_offset(place: PlaceInLog, offset: int) -> PlaceInLog:
    """Add an offset to the versions of a place; 0 stands for no commit and stays 0."""
    version, part_version, part_rows = place
    return PlaceInLog(version and version + offset, part_version and part_version + offset, part_rows)


def _add_offset(batch: pa.RecordBatch, offset: int) -> pa.RecordBatch:
    index = batch.schema.get_field_index(COMMIT_VERSION)
    return batch.set_column(index, batch.schema.field(index), pc.add(batch[COMMIT_VERSION], offset))
