"""Who is alive: a lock that a process holds for as long as it lives, whatever way it ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import StoreReadOnly
from penstock.store import forks
from penstock.store.forks import Forkable
from penstock.store.sqlite.files import READING, StoreFiles

# Another process that looks whether a file lock is free holds it for an instant.
_TRIES, _PAUSE = 5, 0.01


class OwnerLock(Forkable, ABC):
    """A lock with one holder among all processes that use the store; the holder's death releases it."""

    def __init__(self) -> None:
        forks.watch(self)

    @abstractmethod
    def acquire(self) -> bool:
        """Take the lock if nobody holds it; True when this object holds it now."""

    @abstractmethod
    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""

    @abstractmethod
    def held_elsewhere(self) -> bool:
        """Whether somebody else holds the lock."""

    @abstractmethod
    def after_fork_in_child(self) -> None:
        """Not to keep alive, in a child, what its parent's death must release."""


def lock_file(folder: Path, name: str) -> Path:
    return folder / hashlib.sha256(name.encode()).hexdigest()[:32]


def file_held(path: Path) -> bool:
    """Whether somebody holds the lock of that file."""
    import fcntl

    try:
        file = os.open(path, READING)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _no_right(path) from error
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _no_right(path: Path) -> StoreReadOnly:
    return StoreReadOnly(
        f"the lock file {path} cannot be made or opened: check the rights on it and on its folder"
    )


class FileOwnerLock(OwnerLock):
    """A POSIX ``flock`` on a file beside the SQLite file: one machine, and released by the kernel."""

    def __init__(self, folder: Path, name: str, files: StoreFiles = StoreFiles()) -> None:  # noqa: B008 - it never changes
        self._file: int | None = None
        self._files = files
        self._path = lock_file(folder, name)
        super().__init__()

    def acquire(self) -> bool:
        for attempt in range(_TRIES):
            if self._file is not None or self._try():
                return True
            if attempt < _TRIES - 1:
                time.sleep(_PAUSE)
        return False

    def _try(self) -> bool:
        import fcntl

        try:
            self._files.make_folder(str(self._path.parent))
            file = self._files.open_beside(str(self._path))
        except OSError as error:
            raise _no_right(self._path) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def held_elsewhere(self) -> bool:
        return self._file is None and file_held(self._path)

    def after_fork_in_child(self) -> None:
        # The parent's lock lasts until the last copy of the descriptor is closed; closing this one leaves it alone.
        self.release()

    def __del__(self) -> None:
        self.release()


DRAWN_BITS = 20
"""Of a PostgreSQL advisory lock's key that are drawn anew each time it is taken: nobody can hold the key before its owner does."""


def _tag(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> DRAWN_BITS


def advisory_key(name: str) -> int:
    """A 64-bit key for a PostgreSQL advisory lock of that name: another one each time, with the same first bits."""
    key = _tag(name) << DRAWN_BITS | secrets.randbits(DRAWN_BITS)
    return key - (1 << 64) if key >> 63 else key


def advisory_halves(name: str) -> tuple[int, int]:
    """The first bits of its keys, as ``pg_locks`` has them in the key's two halves."""
    key = _tag(name) << DRAWN_BITS
    return key >> 32, (key & 0xFFFFFFFF) >> DRAWN_BITS


_inherited: list[Any] = []


class AdvisoryOwnerLock(OwnerLock):
    """A PostgreSQL session advisory lock on a connection of its own.

    Roles without a right to the store can hold advisory locks too, and see which ones are held. So a key is drawn from a million for its
    name, and a lock of that name is held when a role that may move consumers has any of them.

    Parameters
    ----------
    take
        Takes the lock: the connection that holds it now, or None when somebody else does.
    held
        Tells whether anybody holds it.
    """

    def __init__(self, take: Callable[[], Any], held: Callable[[], bool]) -> None:
        self._connection: Any = None
        self._take = take
        self._held = held
        super().__init__()

    def acquire(self) -> bool:
        if self._connection is None or not self._alive():
            self._connection = self._take()
        return self._connection is not None

    def _alive(self) -> bool:
        try:
            self._connection.execute("select 1")
        except Exception:
            # Whatever went wrong with it, the lock is gone with the connection.
            self.release()
            return False
        return True

    def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # The server would notice a closed connection only a moment later.
            with contextlib.suppress(Exception):
                connection.execute("select pg_advisory_unlock_all()")
            connection.close()

    def held_elsewhere(self) -> bool:
        return self._connection is None and self._held()

    def after_fork_in_child(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # Closing it in order would say goodbye to the server in the parent's name.
            _inherited.append(connection)
            with contextlib.suppress(OSError):
                os.close(connection.fileno())

    def __del__(self) -> None:
        self.release()
