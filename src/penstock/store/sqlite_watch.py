"""Watching a queue of a SQLite store: the kernel tells of writes to its files, and a look at the queue what they were."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.store.catalog import QueueRecord
from penstock.store.file_events import FileEvents
from penstock.store.statements import statements
from penstock.store.watching import Watch

if TYPE_CHECKING:
    from penstock.store.sqlite import SqliteDatabase

# A commit can be seen a moment after it was written: at once, or when the disk has it.
QUICK, QUICKLY = 0.001, 0.03
# What is written to a slow disk may be seen later than that.
REST, RESTING = 0.02, 1.0
SLEEP = 0.1
_BUSY_MS = 100


class SqliteWatch(Watch):
    """Looks quickly after each write to the file, seldom otherwise; where nothing tells of writes, quickly after each change."""

    def __init__(
        self, database: SqliteDatabase, queue: QueueRecord, partitions: Collection[int] | None
    ) -> None:
        self._database = database
        self._text = statements("sqlite", "main")["read_ends"]
        self._version: int | None = None
        self._last_sign = -RESTING
        self._last_pause = QUICK
        self._events = _events(database.path)
        self._reliable = self._events is not None
        """Whether the last change was told of: not every file system does."""
        self._first = True
        super().__init__(queue, partitions, database.connected, database.translating)

    def _descriptor(self) -> int | None:
        return None if self._events is None else self._events.fileno()

    def _read(self, heard: bool) -> list[tuple[int, int, int]] | None:
        if heard and self._events is not None:
            # Before the look, so that a write after it is heard of anew.
            self._events.heard()
        self._database.require_same_file()
        if self._connection is None:
            self._connection = self._connect()
            self._connection.execute(f"pragma busy_timeout = {_BUSY_MS}")
            self._version, self._first = None, True
        # It changes with each commit of any other connection, for this connection alone.
        ((version,),) = self._connection.execute("pragma data_version").fetchall()
        if version == self._version:
            return None
        rows: list[tuple[int, int, int]] = self._connection.execute(self._text, self._wanted).fetchall()
        self._version = version
        return rows

    def _pause(self, heard: bool, changed: bool) -> float:
        now = time.monotonic()
        told = heard or now - self._last_sign < RESTING
        if changed and not self._first:
            self._reliable = told and self._events is not None
        self._first = False
        if heard or (changed and not self._reliable):
            self._last_sign = now
        quiet = now - self._last_sign
        if quiet < QUICKLY:
            self._last_pause = QUICK
        else:
            longest = SLEEP if self._reliable and quiet > RESTING else REST
            self._last_pause = min(self._last_pause * 2, longest)
        return self._last_pause

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._database.disconnect(connection)

    def close(self) -> None:
        super().close()
        self._deaf()

    def _deaf(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def before_fork(self) -> None:
        super().before_fork()
        self._disconnect()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._deaf()


def _events(path: str) -> FileEvents | None:
    folder, name = os.path.split(path)
    try:
        return FileEvents(folder, [name, f"{name}-wal"])
    except OSError:
        return None
