"""Watching a queue of a SQLite store: the kernel tells of writes to its files, and a look at the queue what they were."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.store.catalog import QueueRecord
from penstock.store.file_events import FileEvents, Heard
from penstock.store.statements import statements
from penstock.store.watching import Watch

if TYPE_CHECKING:
    from penstock.store.sqlite import SqliteDatabase

# A commit can be seen a moment after it was written: at once, or when the disk has it. Penstock's own writers ring then.
QUICK, QUICKLY = 0.001, 0.03
# What is written to a slow disk may be seen later than that.
REST, RESTING = 0.02, 1.0
SLEEP = 0.1
_BUSY_MS = 100


class SqliteWatch(Watch):
    """Looks when a writer rings, quickly after a write to the file, and seldom otherwise.

    Where nothing tells of either it looks quickly after each change.
    """

    def __init__(
        self, database: SqliteDatabase, queue: QueueRecord, partitions: Collection[int] | None
    ) -> None:
        self._database = database
        self._text = statements("sqlite", "main")["read_ends"]
        self._version: int | None = None
        self._heard = Heard.NOTHING
        self._quick_until = 0.0
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
        # Before the look, so that a write after it is heard of anew.
        self._heard = self._events.heard() if heard and self._events is not None else Heard.NOTHING
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

    def _pause(self, changed: bool) -> float:
        now = time.monotonic()
        told = self._heard is not Heard.NOTHING
        if changed and not self._first:
            self._reliable = self._events is not None and (told or now - self._last_sign < RESTING)
        self._first = False
        if told or (changed and not self._reliable):
            self._last_sign = now
            self._last_pause = QUICK
            # A write whose commit cannot be seen yet comes before the bell of that commit.
            self._quick_until = 0.0 if self._heard is Heard.BELL else now + QUICKLY
        if now < self._quick_until:
            return QUICK
        longest = SLEEP if self._reliable and now - self._last_sign > RESTING else REST
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
        return FileEvents(folder, [name, f"{name}-wal"], f"{name}-lock")
    except OSError:
        return None
