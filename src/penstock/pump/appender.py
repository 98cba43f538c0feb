"""Appends of a pump's rows to its queues, each in one transaction with the pump's position.

Versions of commits in a queue must ascend, but another server's log may have lower positions. So the version
of a commit is its position plus an offset, which is 0 at first and which a recovery raises if necessary.
Only this module adds and subtracts the offset: the store has versions, and readers of the log have positions.
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
from penstock.pump.targets import Continued, Stamps, Targets
from penstock.store.database import Database, Transaction
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpPosition

_ROOM = 16
"""During backfills, a position without rows stays this many bytes before the end of the log. The next commit
may begin at the end, and chunks of tables take positions in between. The record of a commit is always longer.
"""
_CONFIRM_SECONDS = 1.0
"""How often a position without rows is stored, and confirmed to the server."""


@dataclass
class Appender:
    """Appends rows for the process that owns a pump."""

    database: Database
    name: str
    """The pump's name."""
    owner: str
    position: PumpPosition
    targets: Targets
    readers: TableReaders
    reports: Reports
    offset: int
    """The difference between versions and positions in the log."""

    def __post_init__(self) -> None:
        self._confirmed_at = 0.0
        self._changes: list[Callable[[Json], None]] = []
        self._tables = self.readers.tables
        """The definitions of the tables that the store has."""

    @property
    def place(self) -> PlaceInLog:
        """Where in the log what comes next begins."""
        return _moved(
            PlaceInLog(self.position.version, self.position.part_version, self.position.part_rows),
            -self.offset,
        )

    def last_row(self) -> int:
        """Return the position of the last commit that has rows in a queue; none is below 1."""
        return self.database.run(self.targets.last_commit, write=False) - self.offset

    def go_back(self, place: PlaceInLog) -> None:
        """Move the pump to an earlier place in the log, from which on there are no rows yet."""
        place = _moved(place, self.offset)
        if place.version >= self.position.version:
            return
        before, after = self.position, replace(self.position, version=place.version)
        self.database.run(lambda tx: self._move(tx, before, after), idempotent=True)
        self.position = after

    def change_state(self, change: Callable[[Json], None]) -> None:
        """Have the pump's state changed in the transaction that moves it next."""
        self._changes.append(change)

    def append(self, step: Step, *, note: bool = False) -> None:
        """Append the rows of a step and move the pump, in one transaction.

        Without rows it is moved only if ``note`` is set: else with the next rows, or before it is confirmed.
        """
        before, place = self.position, _moved(step.place, self.offset)
        if before.part_rows and 0 < place.version < before.part_version:
            # Commits without rows that are read once more.
            return
        ended = place.version > 0
        continues = ended and before.part_rows > 0
        continued = Continued(before.part_version, before.timestamp) if continues else None
        batches = self._with_versions(step)
        stamps = Stamps(batches, before.timestamp)
        version = place.version if ended else before.version
        after = PumpPosition(version, stamps.last, place.part_version, place.part_rows)
        rows = self.targets.rows(batches, after.version, stamps, continued)
        if not rows and not (note and ended):
            return
        append_commits(self.database, rows, lambda tx: self._move(tx, before, after))
        self._changes = []
        self.position, self._tables = after, self._tables_at(after)
        times = {moment for each in rows for moment in zip(each.versions, each.timestamps, strict=True)}
        commits = np.array([time for _, time in times], np.int64)
        self.reports.appended(commits, sum(each.rows.num_rows for each in rows))

    def _with_versions(self, step: Step) -> dict[str, list[pa.RecordBatch]]:
        """Return the rows of a step with versions in the place of positions."""
        if not self.offset:
            return step.rows
        return {
            table: [_with_version(batch, self.offset) for batch in batches]
            for table, batches in step.rows.items()
        }

    def _move(self, tx: Transaction, before: PumpPosition, after: PumpPosition) -> bool:
        if not pumps.move_pump(tx, self.name, self.owner, before, after):
            return False
        tables = self._tables_at(after)
        if tables is not self._tables:
            self._keep(tx, lambda state: state.update(tables=tables.to_json()))
        for change in self._changes:
            self._keep(tx, change)
        return True

    def _tables_at(self, position: PumpPosition) -> Tables:
        """Return how the tables are read from a position on.

        After an interruption a commit that is not complete is read from its start, where a table may have
        another form than at its end.
        """
        if not position.part_rows:
            return self.readers.tables
        return self.readers.tables_before(position.part_version - self.offset)

    def confirm(self, follower: SlotFollower, step: Step, *, leaves_room: bool) -> None:
        """Let the server remove what is appended.

        Where the log goes on without rows of the tables, the pump is moved first: a store that is restored
        must never be behind the slot. Then the time is noted, too, up to which everything is appended; later
        commits get no earlier one.
        """
        follower.confirm(self.place.version + 1)
        finalized = follower.finalized_until or 0
        if finalized and not leaves_room:
            self.reports.finalized(finalized)
        before, now = self.position, time.monotonic()
        room = _ROOM if leaves_room else 1
        upto = max((step.complete or 0) - room, step.place.version) + self.offset
        after = replace(before, version=max(upto, before.version), timestamp=max(before.timestamp, finalized))
        if after == before or before.part_rows or now - self._confirmed_at < _CONFIRM_SECONDS:
            return
        self._confirmed_at = now
        self.database.run(lambda tx: self._move(tx, before, after), idempotent=True)
        self.position, self._changes = after, []
        follower.confirm(self.place.version + 1)

    def keep_state(self) -> None:
        """Keep the last known state of the publication."""
        publication = self.readers.state.to_json()
        self.database.run(
            lambda tx: self._keep(tx, lambda state: state.update(publication=publication)), idempotent=True
        )

    def _keep(self, tx: Transaction, change: Callable[[Json], None]) -> None:
        state = pumps.require_owned(tx, self.name, self.owner).state
        change(state)
        pumps.set_pump_state(tx, self.name, self.owner, json.dumps(state))


def _moved(place: PlaceInLog, offset: int) -> PlaceInLog:
    """Return a place with another offset; 0 stands for no commit."""
    version, part_version, part_rows = place
    return PlaceInLog(version and version + offset, part_version and part_version + offset, part_rows)


def _with_version(batch: pa.RecordBatch, offset: int) -> pa.RecordBatch:
    place = batch.schema.get_field_index(COMMIT_VERSION)
    return batch.set_column(place, batch.schema.field(place), pc.add(batch[COMMIT_VERSION], offset))
