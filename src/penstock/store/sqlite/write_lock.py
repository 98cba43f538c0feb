"""Which process writes into a SQLite file, as far as the kernel tells: Linux lists its file locks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from penstock.store import forks
from penstock.store.forks import Forkable
from penstock.store.sqlite.files import StoreFiles

_LOCKS = Path("/proc/locks")
_WRITE_BYTE = 120
"""Of a SQLite file's index (``-shm``): whoever writes holds its lock."""


def writer(path: str) -> int | None:
    """The process that writes into a SQLite file, or whose turn it is; None where that is not known."""
    with suppress(OSError, ValueError):
        locks = [line.split() for line in _LOCKS.read_text().splitlines()]
        return _holder(locks, f"{path}-shm", "POSIX") or _holder(locks, f"{path}-lock", "FLOCK")
    return None


def _holder(locks: list[list[str]], path: str, kind: str) -> int | None:
    """The holder of the exclusive lock on a file."""
    try:
        inode = str(os.stat(path).st_ino)
    except OSError:
        return None
    for lock in locks:
        # Number, kind, ADVISORY, READ or WRITE, process, file, first and last byte; who waits has an arrow before the kind.
        if len(lock) != 8 or (lock[1], lock[3]) != (kind, "WRITE") or lock[5].split(":")[-1] != inode:
            continue
        if kind == "FLOCK" or int(lock[6]) <= _WRITE_BYTE <= int(lock[7]):
            return int(lock[4]) or None
    return None


def described(process: int | None) -> str:
    """A process for a message, and what to do about it."""
    if process is None:
        return "another process: wait until it ends its transaction, or end it"
    if process == os.getpid():
        return "another connection of this process: commit or roll back there first"
    state = _state(process)
    if state == "T":
        return f"process {process}, which is stopped: let it go on with `kill -CONT {process}`, or end it"
    return f"process {process}: wait until it ends its transaction, or end it"


def _state(process: int) -> str:
    with suppress(OSError, IndexError):
        # The program's name is in brackets, and may have any characters.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


# ---- turns: Taking turns at writing into one SQLite file.
#
# SQLite lets a writer that has to wait look again now and then, ten times a second in the end. One that writes in a loop leaves
# the file free for a fraction of a millisecond, so that among several such writers some wait for minutes. A lock on a file beside
# it is given by the kernel to whoever has waited longest, as soon as it is free.

# A turn is short as a rule: to look again some times costs less than a thread that waits.
_SOON = (0.0001, 0.0001, 0.0002, 0.0004, 0.0008)


class Turn(Forkable):
    """One connection's place in the line of writers.

    Parameters
    ----------
    path
        The lock file; it is made when it is first needed, and stays.
    files
        The store's files, of which it is one.
    """

    def __init__(self, path: str, files: StoreFiles = StoreFiles()) -> None:  # noqa: B008 - it never changes
        self._path = path
        self._files = files
        self._file: int | None = None
        forks.watch(self)

    def after_fork_in_child(self) -> None:
        # Left open here, it would keep the turn of a parent that dies.
        self.close()

    def take(self, seconds: float) -> bool:
        """Wait until it is this connection's turn; False when it was not within so many seconds."""
        import fcntl

        if self._file is None:
            try:
                self._file = self._files.open_beside(self._path)
            except OSError:
                # Where no file can be made SQLite's own way has to do; as a rule it cannot write there either.
                return True
        for pause in _SOON:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause)
            else:
                return True
        return self._wait(self._file, seconds)

    def _wait(self, file: int, seconds: float) -> bool:
        import fcntl

        mine = threading.Event()

        def wait() -> None:
            # The kernel has no time limit for this; a thread that waits can be left alone.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
                mine.set()

        try:
            threading.Thread(target=wait, name="penstock-turn", daemon=True).start()
        except RuntimeError:
            # No thread is to be had, as at the program's end: then without a limit.
            wait()
        if mine.wait(seconds):
            return True
        # Closed under the thread that waits for it, the lock is let go as soon as it comes.
        self.close()
        return False

    def give_back(self) -> None:
        """Let the next one write; harmless when it is not this connection's turn."""
        import fcntl

        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave the line."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.close()
