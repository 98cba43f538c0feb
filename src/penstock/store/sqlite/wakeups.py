"""Wake the watchers of a SQLite store through inotify and wakeup files.

A wakeup file is a small file next to the SQLite file, one for each queue that is watched. Opening it for
reading and closing it is an event that wakes the watchers of that queue and few others. This needs no write
permission. Writes to the SQLite file itself would wake all watchers at each commit, even before the commit is
visible. Python has no module for inotify, so this module calls the C library.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress

from penstock.errors import StoreUnsafeError
from penstock.store.sqlite.files import READ_FLAGS, StoreFiles

MODIFIED = 0x002
"""Event: a file was modified."""
CLOSED_AFTER_READING = 0x010
"""Event: a file that was open for reading was closed."""
_FILE_CREATED = 0x080 | 0x100  # moved here, created
_EVENT = struct.Struct("iIII")
_BUFFER = 1 << 16
_MAX_WAKEUP_FILES = 64
"""The largest number of wakeup files of a store. If there are more queues, several share a file."""


class FileEvents:
    """Receives events about files in one folder, including files that are created or recreated later.

    ``kind`` is ``MODIFIED`` or ``CLOSED_AFTER_READING``. The constructor raises an OSError if the system has
    no inotify, if inotify's limit is reached, or if the folder does not exist.
    """

    def __init__(self, folder: str, names: Sequence[str], kind: int) -> None:
        self._file = -1
        library = ctypes.CDLL(None, use_errno=True)
        try:
            self._init, self._add_watch = library.inotify_init1, library.inotify_add_watch
        except AttributeError as error:
            raise OSError("this system has no inotify") from error
        self._folder = folder
        self._names, self._kind = {os.fsencode(name) for name in names}, kind
        self._watches: dict[int, bytes] = {}
        self._file = self._init(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise _os_error()
        try:
            # The creation of any file in the folder is an event too.
            self._folder_watch = self._watch(os.fsencode(folder), _FILE_CREATED)
        except OSError:
            self.close()
            raise
        self._watch_files()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when there are events."""
        return self._file

    def has_events(self) -> bool:
        """Return whether there were events since the last call."""
        any_events = any_created = False
        while data := self._read_events():
            position = 0
            while position < len(data):
                watch, _, _, length = _EVENT.unpack_from(data, position)
                position += _EVENT.size
                name = self._watches.get(watch) or data[position : position + length].rstrip(b"\0")
                position += length
                if name in self._names:
                    any_events = True
                    any_created |= watch == self._folder_watch
        if any_created:
            self._watch_files()
        return any_events

    def _read_events(self) -> bytes:
        try:
            return os.read(self._file, _BUFFER)
        except BlockingIOError:
            return b""

    def _watch_files(self) -> None:
        for name in self._names:
            try:
                self._watches[self._watch(os.path.join(os.fsencode(self._folder), name), self._kind)] = name
            except FileNotFoundError:
                continue

    def _watch(self, path: bytes, mask: int) -> int:
        watch: int = self._add_watch(self._file, path, mask)
        if watch < 0:
            raise _os_error()
        return watch

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def wake(path: str, queue_ids: Iterable[int]) -> None:
    """Wake the watchers of queues of the SQLite file ``path``. This costs almost nothing if there never were
    any.
    """
    for queue_id in queue_ids:
        with suppress(OSError):
            os.close(os.open(wakeup_file(path, queue_id), READ_FLAGS))


def listen(path: str, queue_id: int, files: StoreFiles) -> FileEvents | None:
    """Listen to a queue's wakeup file, and create it if needed. Return None if that is impossible, or if the
    file belongs to another user.
    """
    folder, name = os.path.split(wakeup_file(path, queue_id))
    try:
        os.close(files.open_side_file(wakeup_file(path, queue_id)))
        return FileEvents(folder, [name], CLOSED_AFTER_READING)
    except (OSError, StoreUnsafeError):
        return None


def wakeup_file(path: str, queue_id: int) -> str:
    """Return the path of a queue's wakeup file; several queues may share one."""
    return f"{path}-wakeup-{queue_id % _MAX_WAKEUP_FILES}"
