"""Locks on files next to a SQLite file: the write lock, and the locks of consumers' owners.

A SQLite writer that has to wait retries at intervals of up to a tenth of a second. A process that writes in a
loop leaves the file unlocked for only a fraction of a millisecond. So if several processes did that, some
would wait for minutes. The kernel, in contrast, gives a file lock to the process that has waited longest, as
soon as the lock is free.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.errors import StoreReadOnlyError
from penstock.store import forks
from penstock.store.database import OwnerLock
from penstock.store.forks import Forkable
from penstock.store.sqlite.files import READ_FLAGS, StoreFiles

_LOCKS = Path("/proc/locks")
_WRITE_BYTE = 120
"""The offset of the byte that a writer locks in a SQLite file's index (``-shm``)."""
# Transactions are usually short, so a few retries cost less than a waiting thread.
_RETRY_PAUSES = (0.0001, 0.0001, 0.0002, 0.0004, 0.0008)
# A process that checks whether an owner lock is free holds it for an instant.
_OWNER_TRIES, _OWNER_PAUSE = 5, 0.01
SLOW_SECONDS = 5.0
"""How long a writer waits before it logs a warning, in seconds."""


def writing_process(path: str) -> int | None:
    """Return the process that is writing to a SQLite file or will write next; None if it is unknown."""
    with suppress(OSError, ValueError):
        locks = [line.split() for line in _LOCKS.read_text().splitlines()]
        return _lock_holder(locks, f"{path}-shm", "POSIX") or _lock_holder(locks, f"{path}-lock", "FLOCK")
    return None


def _lock_holder(locks: list[list[str]], path: str, kind: str) -> int | None:
    """Return the process that holds the exclusive lock on a file; None if there is none."""
    try:
        inode = str(os.stat(path).st_ino)
    except OSError:
        return None
    for lock in locks:
        # The fields are number, kind, ADVISORY, READ or WRITE, process, file, first byte and last byte. A
        # waiting process has an arrow before the kind.
        if len(lock) != 8 or (lock[1], lock[3]) != (kind, "WRITE") or lock[5].split(":")[-1] != inode:
            continue
        if kind == "FLOCK" or int(lock[6]) <= _WRITE_BYTE <= int(lock[7]):
            return int(lock[4]) or None
    return None


def describe_holder(process: int | None) -> str:
    """Return text about a process that holds a lock, and what to do about it."""
    if process is None:
        return "another process: wait until it ends its transaction, or end it"
    if process == os.getpid():
        return "another connection of this process: commit or roll back there first"
    state = _process_state(process)
    if state == "T":
        return f"process {process}, which is suspended: resume it with `kill -CONT {process}`, or end it"
    return f"process {process}: wait until it ends its transaction, or end it"


def _process_state(process: int) -> str:
    with suppress(OSError, IndexError):
        # The program's name is in parentheses, and may contain any character.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


class WriteLock(Forkable):
    """The lock that one connection takes before it writes. The lock file is created on first use."""

    def __init__(self, path: str, files: StoreFiles) -> None:
        self._path = path
        self._files = files
        self._file: int | None = None
        forks.register(self)

    def after_fork_in_child(self) -> None:
        # If the parent died, this copy of the open file would keep its lock.
        self.close()

    def acquire(self, seconds: float, on_slow: Callable[[], None]) -> bool:
        """Wait for the lock; return False if that takes longer than ``seconds``.

        If the wait is longer than usual, ``on_slow`` is called once.
        """
        import fcntl

        if self._file is None:
            try:
                self._file = self._files.open_side_file(self._path)
            except OSError:
                # Rely on SQLite's own lock. Usually SQLite cannot write there either.
                return True
        for pause in _RETRY_PAUSES:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause)
            else:
                return True
        return self._wait(self._file, seconds, on_slow)

    def _wait(self, file: int, seconds: float, on_slow: Callable[[], None]) -> bool:
        import fcntl

        acquired = threading.Event()

        def wait() -> None:
            # The kernel has no time limit for this wait, so wait in a thread.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
                acquired.set()

        try:
            threading.Thread(target=wait, name="penstock-write-lock", daemon=True).start()
        except RuntimeError:
            # While the program ends, no thread can be started: wait without a limit.
            wait()
        if acquired.wait(min(seconds, SLOW_SECONDS)):
            return True
        if seconds > SLOW_SECONDS:
            on_slow()
            if acquired.wait(seconds - SLOW_SECONDS):
                return True
        # This closes the file under the waiting thread, so the lock is released as soon as it is granted.
        self.close()
        return False

    def release(self) -> None:
        """Release the lock for the next writer. This does nothing if the lock is not held."""
        import fcntl

        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.close()


def lock_path(folder: Path, name: str) -> Path:
    return folder / hashlib.sha256(name.encode()).hexdigest()[:32]


def is_file_locked(path: Path) -> bool:
    """Return whether any process holds the lock on a file."""
    import fcntl

    try:
        file = os.open(path, READ_FLAGS)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _no_permission(path) from error
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _no_permission(path: Path) -> StoreReadOnlyError:
    return StoreReadOnlyError(
        f"the lock file {path} cannot be created or opened: check the permissions on it and its folder"
    )


class FileOwnerLock(OwnerLock):
    """A ``flock`` on a file next to the SQLite file, which the kernel releases when the process dies."""

    def __init__(self, folder: Path, name: str, files: StoreFiles) -> None:
        self._file: int | None = None
        self._files = files
        self._path = lock_path(folder, name)
        super().__init__()

    def acquire(self) -> bool:
        for attempt in range(_OWNER_TRIES):
            if self._file is not None or self._try_lock():
                return True
            if attempt < _OWNER_TRIES - 1:
                time.sleep(_OWNER_PAUSE)
        return False

    def _try_lock(self) -> bool:
        import fcntl

        try:
            self._files.make_folder(str(self._path.parent))
            file = self._files.open_side_file(str(self._path))
        except OSError as error:
            raise _no_permission(self._path) from error
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
        return self._file is None and is_file_locked(self._path)

    def after_fork_in_child(self) -> None:
        # The parent's lock would last until the last copy of the descriptor is closed.
        self.release()

    def __del__(self) -> None:
        self.release()
