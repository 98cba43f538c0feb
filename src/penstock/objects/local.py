"""Objects in a folder, on this machine's disk or on a disk that several machines mount."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from penstock.errors import StoreError, StoreFullError, StoreReadOnlyError, StoreUnsafeError
from penstock.folders import FOLDER, make_folder, user_name
from penstock.objects.location import local_folder
from penstock.objects.storage import Buffer, ListedObject, ObjectStorage

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
_TRIES = 3
UNFINISHED = ".part"
"""The suffix of the name of a file that is being written."""
_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a file: never through a link, and without waiting for a pipe."""


class LocalStorage(ObjectStorage):
    """A folder with a file for each object.

    Files and new folders have the permissions of the location's folder; if that did not exist, only its owner
    has access. Other users may be able to write there, so every folder below it is opened by descriptor and
    never through a link, and only regular files are read.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._folder = Path(local_folder(url))
        self._synced: set[tuple[int, ...]] = set()
        """Folders whose names are known to be on disk, by :meth:`_Steps.state`."""

    def check(self, folder: str) -> None:
        for each in (self._folder, *self._folder.parents):
            # A folder that is missing or cannot be inspected is reported by the check below.
            with contextlib.suppress(OSError):
                self._refuse_trap(each)
        super().check(folder)

    def _refuse_trap(self, folder: Path) -> None:
        """Refuse a folder that another user may have created to get at the objects in it."""
        owner = os.stat(folder).st_uid
        if owner not in (0, os.geteuid()) and os.stat(folder.parent).st_mode & stat.S_IWOTH:
            raise StoreUnsafeError(
                f"the folder {folder} belongs to {user_name(owner)}, who could replace and delete the rows "
                "in it: name a folder of this process's user, or let its owner create the queue",
                condition="STORE_UNSAFE.FOLDER_OWNER",
                folder=str(folder),
                owner=user_name(owner),
            )

    def _put(self, name: str, parts: Sequence[Buffer]) -> None:
        *steps, file = name.split("/")
        unfinished = f"{file}.{secrets.token_hex(8)}{UNFINISHED}"
        for left in reversed(range(_TRIES)):
            try:
                self._put_into(steps, file, unfinished, parts)
            except FileNotFoundError as error:
                # Another process has removed an empty folder meanwhile.
                if not left:
                    raise self._translated(error) from error
            else:
                return

    def _put_into(self, steps: Sequence[str], file: str, unfinished: str, parts: Sequence[Buffer]) -> None:
        with self._translating("/".join((*steps, file))):
            self._make_location()
            with self._steps(steps, make=True) as folder:
                state = folder.state()
                if state not in self._synced:
                    # Another process may have made it just now.
                    folder.sync()
                    self._synced.add(state)
                try:
                    _write(unfinished, folder.last, parts, folder.mode & 0o666)
                    os.replace(unfinished, file, src_dir_fd=folder.last, dst_dir_fd=folder.last)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(unfinished, dir_fd=folder.last)
                    raise
                _sync(folder.last)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        *steps, file = name.split("/")
        try:
            with self._translating(name), self._steps(steps) as folder:
                opened = os.open(file, _READING, dir_fd=folder.last)
        except FileNotFoundError:
            raise self.missing(name) from None
        with self._translating(name):
            try:
                status = os.fstat(opened)
                if not stat.S_ISREG(status.st_mode):
                    raise self.damaged(name, "is not a file")
                for start, length in ranges:
                    # Checked first: a wrong length could ask for any amount of memory.
                    if start + length > status.st_size:
                        raise self.damaged(
                            name, f"ends at byte {status.st_size}, before byte {start + length}"
                        )
                return [_read_range(opened, start, length) for start, length in ranges]
            finally:
                os.close(opened)

    def _listed(self, prefix: str) -> Iterator[ListedObject]:
        try:
            with (
                self._translating(prefix),
                self._steps(prefix.strip("/").split("/")) as folder,
                os.scandir(folder.last) as entries,
            ):
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            name = f"{prefix}{entry.name}"
                            yield ListedObject(name, found.st_size, found.st_mtime_ns // 1000)
        except FileNotFoundError:
            return

    def _delete(self, names: Sequence[str]) -> None:
        error: StoreError | None = None
        for name in names:
            try:
                self._delete_one(name)
            except StoreError as failed:
                # A file that cannot be deleted does not stop the others from being deleted.
                error = error or failed
        if error is not None:
            raise error

    def _delete_one(self, name: str) -> None:
        *steps, file = name.split("/")
        try:
            with self._translating(name), self._steps(steps) as folder:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder.last)
                folder.remove_empty()
        except FileNotFoundError:
            return

    def _steps(self, steps: Sequence[str], *, make: bool = False) -> _Steps:
        try:
            # The location's own path may have links, since the user chose it.
            location = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NO_FOLDER:
                raise self._no_folder() from None
            raise
        return _Steps(location, steps, make=make)

    def _no_folder(self) -> StoreError:
        return StoreError(
            f"{self.url} is not a folder, or is below a file: name another location for the rows",
            condition="STORE_ERROR.CANNOT_OPEN",
            storage=self.url,
        )

    def _make_location(self) -> None:
        absent = [each for each in (self._folder, *self._folder.parents) if not each.exists()]
        for each in reversed(absent):
            try:
                each.mkdir(0o700)
            except FileExistsError:
                continue
            except NotADirectoryError:
                raise self._no_folder() from None
            with contextlib.suppress(OSError):
                file = os.open(each.parent, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)

    @contextlib.contextmanager
    def _translating(self, name: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, FileNotFoundError):
            raise
        except OSError as error:
            if error.errno in _NO_FOLDER:
                raise self.damaged(name, "is a link or another kind of file, or is below one") from None
            raise self._translated(error) from error

    def _translated(self, error: OSError) -> StoreError:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            return StoreFullError(
                f"no space left in {self.url}: free some disk space; nothing of this was written"
            )
        if error.errno in _READ_ONLY:
            return StoreReadOnlyError(
                f"{self.url} cannot be read or written ({reason}): check the permissions on the folder"
            )
        return self.unavailable(reason)


class _Steps:
    """The chain of open folders from a location down to one below it, each opened from its parent."""

    def __init__(self, location: int, steps: Sequence[str], *, make: bool = False) -> None:
        self._steps, self._make = steps, make
        self._open = [location]
        self.mode = 0
        """The permissions of the location."""

    def __enter__(self) -> Self:
        try:
            self.mode = stat.S_IMODE(os.fstat(self.last).st_mode)
            for step in self._steps:
                self._open.append(self._below(step))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def last(self) -> int:
        """The descriptor of the lowest folder."""
        return self._open[-1]

    def _below(self, step: str) -> int:
        try:
            return os.open(step, FOLDER, dir_fd=self.last)
        except FileNotFoundError:
            if not self._make:
                raise
        make_folder(step, self.last, partial(_open_up, mode=self.mode))
        _sync(self.last)
        return os.open(step, FOLDER, dir_fd=self.last)

    def state(self) -> tuple[int, ...]:
        """Return values that change when one of the folders is removed and recreated.

        The inode alone is not enough, since a file system may reuse it.
        """
        above = (os.fstat(folder).st_mtime_ns for folder in self._open[:-1])
        return (os.fstat(self.last).st_ino, *above)

    def sync(self) -> None:
        for folder in self._open:
            _sync(folder)

    def remove_empty(self) -> None:
        """Remove the folders that are empty, the lowest first.

        If another process is about to write there, it recreates the folder.
        """
        for above, step in zip(self._open[-2::-1], self._steps[::-1], strict=True):
            try:
                os.rmdir(step, dir_fd=above)
            except OSError:
                break

    def _close(self) -> None:
        for each in self._open:
            os.close(each)
        self._open = []


def _open_up(folder: int, mode: int) -> None:
    if os.fstat(folder).st_uid == os.geteuid():
        os.fchmod(folder, mode)


def _write(name: str, folder: int, parts: Sequence[Buffer], mode: int) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
    with open(file, "wb") as written:
        os.fchmod(file, mode)
        for part in parts:
            written.write(part)
        written.flush()
        os.fsync(file)


def _sync(folder: int) -> None:
    # Some file systems do not support this: they have no names to lose, or cannot promise more.
    with contextlib.suppress(OSError):
        os.fsync(folder)


def _read_range(file: int, start: int, length: int) -> bytes:
    data = os.pread(file, length, start)
    if len(data) < length:
        parts = [data]
        while (left := length - sum(map(len, parts))) > 0:
            part = os.pread(file, left, start + length - left)
            if not part:
                break
            parts.append(part)
        data = b"".join(parts)
    return data
