"""Watch a queue of a SQLite store, by its wakeup file or by writes to the store's files."""

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

PAUSE, LONGEST_PAUSE = 0.02, 0.1
"""Seconds between two looks at the queue; the longer pause applies when nothing was appended for a while."""
IGNORE_WRITES = 0.02
"""Seconds after a wakeup for which writes to the files do not wake."""
RECENT = 1.0
# A commit becomes visible a moment after it was written, or later if the disk is slow.
SHORT_PAUSE, SHORT_PAUSES = 0.001, 0.03
_BUSY_MS = 100


class SqliteWatch(Watch):
    """Looks at the queue when its wakeup file is touched, as Penstock's writers do after a commit.

    Other writers do not touch it, so a watch also looks after writes to the store's files: soon at first, and
    after longer and longer pauses while the writes append nothing to this queue, since a busy file is written
    all the time. Without events for writes, it looks again soon after each change.
    """

    def __init__(
        self, database: SqliteDatabase, queue: QueueRecord, partitions: Collection[int] | None
    ) -> None:
        self._database = database
        self._text = statements("sqlite", "main")["read_ends"]
        self._version: int | None = None
        self._wakeups = wakeups.listen(database.path, queue.queue_id, database.files)
        self._writes = writes_to(database.path)
        self._reliable = self._writes is not None
        """Whether there was an event for the last change; not every file system has them."""
        self._first = True
        self._notified = self._written = False
        self._last_event = -RECENT
        self._last_pause = SHORT_PAUSE
        self._others_until = 0.0
        """Until this time, an append without a wakeup counts as recent."""
        self._ignoring_writes_until = 0.0
        """Until this time, writes to the files do not wake the watch."""
        super().__init__(queue, partitions, database.connected, database.translating)

    def _descriptors(self) -> Sequence[int]:
        sources = (
            [self._wakeups]
            if time.monotonic() < self._ignoring_writes_until
            else [self._wakeups, self._writes]
        )
        return [events.fileno() for events in sources if events is not None]

    def _read(self, heard: bool) -> list[tuple[int, int, int]] | None:
        # Events are read before the queue, so that later ones wake again.
        self._notified = self._wakeups is not None and heard and self._wakeups.heard()
        self._written = self._writes is not None and not self._notified and self._writes.heard()
        self._database.require_same_file()
        if self.connection is None:
            self.connection = self._connect()
            self.connection.execute(f"pragma busy_timeout = {_BUSY_MS}")
            self._version, self._first = None, True
        # The version changes with each commit of another connection.
        ((version,),) = self.connection.execute("pragma data_version").fetchall()
        if version == self._version:
            return None
        rows: list[tuple[int, int, int]] = self.connection.execute(self._text, self._wanted).fetchall()
        self._version = version
        return rows

    def _pause(self, changed: bool) -> float:
        now = time.monotonic()
        woken = self._notified or self._written
        if changed and not self._first:
            self._reliable = woken or now - self._last_event < RECENT
        if changed and not self._notified and not self._first:
            self._others_until = now + RECENT
        self._first = False
        self._last_pause = self._next_pause(changed, woken, now)
        if woken or (changed and not self._reliable):
            self._last_event = now
        self._ignoring_writes_until = now + min(self._last_pause, IGNORE_WRITES) if woken else 0.0
        return self._last_pause

    def _next_pause(self, changed: bool, woken: bool, now: float) -> float:
        quiet = now - self._last_event > RECENT
        others = now < self._others_until and (woken or now - self._last_event < SHORT_PAUSES)
        if others or (changed and not self._reliable) or (self._written and quiet):
            return SHORT_PAUSE
        if self._notified:
            return PAUSE
        return min(self._last_pause * 2, LONGEST_PAUSE if self._reliable and quiet and not woken else PAUSE)

    def _disconnect(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            self._database.disconnect(connection)

    def close(self) -> None:
        super().close()
        self._close_events()

    def _close_events(self) -> None:
        sources, self._wakeups, self._writes = (self._wakeups, self._writes), None, None
        for events in sources:
            if events is not None:
                events.close()

    def before_fork(self) -> None:
        super().before_fork()
        self._disconnect()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._close_events()


def writes_to(path: str) -> FileEvents | None:
    folder, name = os.path.split(path)
    try:
        return FileEvents(folder, [name, f"{name}-wal"], WRITTEN)
    except OSError:
        return None
