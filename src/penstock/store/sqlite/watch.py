"""Watch a queue of a SQLite store through its wakeup file or through writes to the store's files."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from penstock.store.records.catalog import QueueRecord
from penstock.store.sqlite import wakeups
from penstock.store.sqlite.wakeups import MODIFIED, FileEvents
from penstock.store.statements import statements
from penstock.store.watching import Watch

if TYPE_CHECKING:
    from penstock.store.sqlite.database import SqliteDatabase

CHECK_SECONDS, LONGEST_CHECK_SECONDS = 0.02, 0.1
"""The shortest and the longest pause between two checks of the queue, in seconds. The longest pause applies
when nothing has been appended for a while.
"""
IGNORE_WRITES_SECONDS = 0.02
"""For how long after a wakeup writes to the files do not wake the watch, in seconds."""
RECENT_SECONDS = 1.0
# A commit becomes visible a moment after it is written, or later if the disk is slow.
SHORT_PAUSE, SHORT_PAUSES = 0.001, 0.03
_BUSY_MS = 100


class SqliteWatch(Watch):
    """Checks the queue when its wakeup file is opened, as Penstock's writers do after a commit.

    Other writers do not open the wakeup file, so the watch also checks after writes to the store's files. The
    first check comes soon. As long as the writes append nothing to this queue, the pauses grow longer, since
    a busy file is written to all the time. If the file system has no events for writes, the watch checks
    again soon after each change.
    """

    def __init__(
        self, database: SqliteDatabase, queue: QueueRecord, partitions: Collection[int] | None
    ) -> None:
        self._database = database
        self._statement = statements("sqlite", "main")["read_ends"]
        self._version: int | None = None
        self._wakeups = wakeups.listen(database.path, queue.queue_id, database.files)
        self._writes = write_events(database.path)
        self._write_events_work = self._writes is not None
        """Whether the last change caused an event. Some file systems have no events."""
        self._is_first_check = True
        self._notified = self._written = False
        self._last_event = -RECENT_SECONDS
        self._last_pause = SHORT_PAUSE
        self._foreign_writes_until = 0.0
        """Until this time, an append without a wakeup counts as recent."""
        self._ignoring_writes_until = 0.0
        """Until this time, writes to the files do not wake the watch."""
        super().__init__(queue, partitions, database.open_connection, database.translating)

    def _descriptors(self) -> Sequence[int]:
        sources = (
            [self._wakeups]
            if time.monotonic() < self._ignoring_writes_until
            else [self._wakeups, self._writes]
        )
        return [events.fileno() for events in sources if events is not None]

    def _read(self, woken: bool) -> list[tuple[int, int, int]] | None:
        # Read the events before the queue, so that later events wake the watch again.
        self._notified = self._wakeups is not None and woken and self._wakeups.has_events()
        self._written = self._writes is not None and not self._notified and self._writes.has_events()
        self._database.require_same_file()
        if self.connection is None:
            self.connection = self._connect()
            self.connection.execute(f"pragma busy_timeout = {_BUSY_MS}")
            self._version, self._is_first_check = None, True
        # The version changes with each commit of another connection.
        ((version,),) = self.connection.execute("pragma data_version").fetchall()
        if version == self._version:
            return None
        rows: list[tuple[int, int, int]] = self.connection.execute(
            self._statement, self._parameters
        ).fetchall()
        self._version = version
        return rows

    def _seconds_to_next_check(self, has_new_rows: bool) -> float:
        now = time.monotonic()
        woken = self._notified or self._written
        if has_new_rows and not self._is_first_check:
            self._write_events_work = woken or now - self._last_event < RECENT_SECONDS
        if has_new_rows and not self._notified and not self._is_first_check:
            self._foreign_writes_until = now + RECENT_SECONDS
        self._is_first_check = False
        self._last_pause = self._next_pause(has_new_rows, woken, now)
        if woken or (has_new_rows and not self._write_events_work):
            self._last_event = now
        self._ignoring_writes_until = now + min(self._last_pause, IGNORE_WRITES_SECONDS) if woken else 0.0
        return self._last_pause

    def _next_pause(self, has_new_rows: bool, woken: bool, now: float) -> float:
        is_quiet = now - self._last_event > RECENT_SECONDS
        is_foreign_writer_active = now < self._foreign_writes_until and (
            woken or now - self._last_event < SHORT_PAUSES
        )
        if (
            is_foreign_writer_active
            or (has_new_rows and not self._write_events_work)
            or (self._written and is_quiet)
        ):
            return SHORT_PAUSE
        if self._notified:
            return CHECK_SECONDS
        return min(
            self._last_pause * 2,
            LONGEST_CHECK_SECONDS if self._write_events_work and is_quiet and not woken else CHECK_SECONDS,
        )

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


def write_events(path: str) -> FileEvents | None:
    folder, name = os.path.split(path)
    try:
        return FileEvents(folder, [name, f"{name}-wal"], MODIFIED)
    except OSError:
        return None
