"""Which process writes into a SQLite file, as far as the kernel tells: Linux lists its file locks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

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
