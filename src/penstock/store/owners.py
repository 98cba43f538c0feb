"""Who is alive: a lock that a process holds for as long as it lives, whatever way it ends."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class OwnerLock(ABC):
    """A lock with one holder among all processes that use the store; the holder's death releases it."""

    @abstractmethod
    def acquire(self) -> bool:
        """Take the lock if nobody holds it; True when this object holds it now."""

    @abstractmethod
    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""

    def held_elsewhere(self) -> bool:
        """Whether somebody else holds the lock."""
        if not self.acquire():
            return True
        self.release()
        return False


class FileOwnerLock(OwnerLock):
    """A POSIX ``flock`` on a file beside the SQLite file: one machine, and released by the kernel."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / hashlib.sha256(name.encode()).hexdigest()[:32]
        self._file: int | None = None

    def acquire(self) -> bool:
        import fcntl

        if self._file is not None:
            return True
        self._path.parent.mkdir(exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class AdvisoryOwnerLock(OwnerLock):
    """A PostgreSQL session advisory lock on a connection of its own."""

    def __init__(self, connect: Any, name: str) -> None:
        self._connect = connect
        self._key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        self._connection: Any = None

    def acquire(self) -> bool:
        if self._connection is not None and self._alive():
            return True
        connection = self._connect()
        connection.autocommit = True
        if connection.execute("select pg_try_advisory_lock(%s)", (self._key,)).fetchone()[0]:
            self._connection = connection
            return True
        connection.close()
        return False

    def _alive(self) -> bool:
        try:
            self._connection.execute("select 1")
        except Exception:  # noqa: BLE001 - whatever went wrong with it, the lock is gone with the connection
            self._connection = None
            return False
        return True

    def release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
