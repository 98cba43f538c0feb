"""The kernel's word of what happens to files: inotify, through the C library, for want of a module that comes with Python."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

WRITTEN = 0x002
"""A file was modified."""
VISITED = 0x010
"""A file was closed by one who could not write to it."""
_APPEARED = 0x080 | 0x100  # moved here, created
_EVENT = struct.Struct("iIII")
_BUFFER = 1 << 16


class FileEvents:
    """Tells of what happens to files of one folder, also to those that are made, or made anew, later.

    Parameters
    ----------
    folder
        Where the files are.
    names
        The names of the files in it.
    kind
        What to hear of: ``WRITTEN`` or ``VISITED``.

    Raises
    ------
    OSError
        When the system has no such thing, or none left, or the folder is not there.
    """

    def __init__(self, folder: str, names: Sequence[str], kind: int) -> None:
        self._file = -1
        library = ctypes.CDLL(None, use_errno=True)
        try:
            self._init, self._add_watch = library.inotify_init1, library.inotify_add_watch
        except AttributeError as error:
            raise OSError("there is no inotify here") from error
        self._folder = folder
        self._names, self._kind = {os.fsencode(name) for name in names}, kind
        self._watches: dict[int, bytes] = {}
        self._file = self._init(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise _failed()
        try:
            # Others write in that folder too: of them only files that appear are heard of.
            self._home = self._watch(os.fsencode(folder), _APPEARED)
        except OSError:
            self.close()
            raise
        self._watch_files()

    def fileno(self) -> int:
        """Can be read when there are events."""
        return self._file

    def heard(self) -> bool:
        """Take in what has happened since the last call; whether anything has."""
        heard = appeared = False
        while data := self._events():
            position = 0
            while position < len(data):
                watch, _, _, length = _EVENT.unpack_from(data, position)
                position += _EVENT.size
                name = self._watches.get(watch) or data[position : position + length].rstrip(b"\0")
                position += length
                if name in self._names:
                    heard = True
                    appeared |= watch == self._home
        if appeared:
            self._watch_files()
        return heard

    def _events(self) -> bytes:
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
            raise _failed()
        return watch

    def close(self) -> None:
        """Hear no more."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.close()


def _failed() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
