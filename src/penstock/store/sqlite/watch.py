"""Watch a queue of a SQLite store by its bell, or by writes to the files."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from penstock.store.records.catalog import QueueRecord
from penstock.store.sqlite import wakeups
from penstock.store.sqlite.wakeups import WRITTEN, FileEvents
from penstock.store.statements import statements
from penstock.store.watching import Watch

if TYPE_CHECKING:
    from penstock.store.sqlite.database import SqliteDatabase

REST, RESTING = 0.02, 1.0
DEAF = 0.02
SLEEP = 0.1
# A commit becomes visible a moment after it was written, or later on a slow disk.
QUICK, QUICKLY = 0.001, 0.03
_BUSY_MS = 100


class SqliteWatch(Watch):
    """Looks at the queue when its bell is rung, as Penstock's writers do after a commit.

    Other writers do not ring. So a watch also looks after writes to the files: soon, and after ever longer
    pauses while they append nothing to this queue, since a busy file is written all the time. Without events
    of writes it looks soon after each change.
    """

    def __init__(
        self, database: SqliteDatabase, queue: QueueRecord, partitions: Collection[int] | None
    ) -> None:
        self._database = database
        self._text = statements("sqlite", "main")["read_ends"]
        self._version: int | None = None
        self._bell = wakeups.listen(database.path, queue.queue_id, database.files)
        self._writes = _writes(database.path)
        self._reliable = self._writes is not None
        """Whether there was an event for the last change; not every file system has them."""
        self._first = True
        self._rung = self._written = False
        self._last_sign = -RESTING
        self._last_pause = QUICK
        self._others_until = 0.0
        """Until then, an append without a bell counts as recent."""
        self._deaf_until = 0.0
        """Until then only the bell wakes."""
        super().__init__(queue, partitions, database.connected, database.translating)

    def _descriptors(self) -> Sequence[int]:
        sources = [self._bell] if time.monotonic() < self._deaf_until else [self._bell, self._writes]
        return [events.fileno() for events in sources if events is not None]

    def _read(self, heard: bool) -> list[tuple[int, int, int]] | None:
        # Events are read before the queue, so that later ones wake again.
        self._rung = self._bell is not None and heard and self._bell.heard()
        self._written = self._writes is not None and not self._rung and self._writes.heard()
        self._database.require_same_file()
        if self._connection is None:
            self._connection = self._connect()
            self._connection.execute(f"pragma busy_timeout = {_BUSY_MS}")
            self._version, self._first = None, True
        # Changes with each commit of another connection.
        ((version,),) = self._connection.execute("pragma data_version").fetchall()
        if version == self._version:
            return None
        rows: list[tuple[int, int, int]] = self._connection.execute(self._text, self._wanted).fetchall()
        self._version = version
        return rows

    def _pause(self, changed: bool) -> float:
        now = time.monotonic()
        woken = self._rung or self._written
        if changed and not self._first:
            self._reliable = woken or now - self._last_sign < RESTING
        if changed and not self._rung and not self._first:
            self._others_until = now + RESTING
        self._first = False
        self._last_pause = self._next_pause(changed, woken, now)
        if woken or (changed and not self._reliable):
            self._last_sign = now
        self._deaf_until = now + min(self._last_pause, DEAF) if woken else 0.0
        return self._last_pause

    def _next_pause(self, changed: bool, woken: bool, now: float) -> float:
        rested = now - self._last_sign > RESTING
        others = now < self._others_until and (woken or now - self._last_sign < QUICKLY)
        if others or (changed and not self._reliable) or (self._written and rested):
            return QUICK
        if self._rung:
            return REST
        return min(self._last_pause * 2, SLEEP if self._reliable and rested and not woken else REST)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._database.disconnect(connection)

    def close(self) -> None:
        super().close()
        self._close_events()

    def _close_events(self) -> None:
        sources, self._bell, self._writes = (self._bell, self._writes), None, None
        for events in sources:
            if events is not None:
                events.close()

    def before_fork(self) -> None:
        super().before_fork()
        self._disconnect()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._close_events()


def _writes(path: str) -> FileEvents | None:
    folder, name = os.path.split(path)
    try:
        return FileEvents(folder, [name, f"{name}-wal"], WRITTEN)
    except OSError:
        return None
