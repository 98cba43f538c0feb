"""The kernel's word that a file was written: inotify, through the C library, for want of a module that comes with Python."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_WRITTEN = 0x002 | 0x040 | 0x080 | 0x100 | 0x200  # modified, moved away, moved here, created, deleted
_APPEARED = 0x080 | 0x100
_EVENT = struct.Struct("iIII")
_BUFFER = 1 << 16


class FileEvents:
    """Tells of writes to files of one folder, also of those that are made, or made anew, later.

    Parameters
    ----------
    folder
        Where the files are.
    names
        The names of the files in it.

    Raises
    ------
    OSError
        When the system has no such thing, or none left, or the folder is not there.
    """

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self._file = -1
        library = ctypes.CDLL(None, use_errno=True)
        try:
            self._init, self._add_watch = library.inotify_init1, library.inotify_add_watch
        except AttributeError as error:
            raise OSError("there is no inotify here") from error
        self._folder = folder
        self._names = {os.fsencode(name): os.path.join(folder, name) for name in names}
        self._file = self._init(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise _failed()
        try:
            # Others write in that folder too: of them only files that appear are heard of.
            self._home = self._watch(folder, _APPEARED)
        except OSError:
            self.close()
            raise
        self._watch_files()

    def fileno(self) -> int:
        """Can be read when there are events."""
        return self._file

    def heard(self) -> bool:
        """Take in what has happened since the last call; whether any of it was about the files."""
        about = appeared = False
        while data := self._events():
            position = 0
            while position < len(data):
                watch, _, _, length = _EVENT.unpack_from(data, position)
                position += _EVENT.size
                name = data[position : position + length].rstrip(b"\0")
                position += length
                if watch != self._home:
                    about = True
                elif name in self._names:
                    about = appeared = True
        if appeared:
            self._watch_files()
        return about

    def _events(self) -> bytes:
        try:
            return os.read(self._file, _BUFFER)
        except BlockingIOError:
            return b""

    def _watch_files(self) -> None:
        for path in self._names.values():
            try:
                self._watch(path, _WRITTEN)
            except FileNotFoundError:
                continue

    def _watch(self, path: str, mask: int) -> int:
        watch: int = self._add_watch(self._file, os.fsencode(path), mask)
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
