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

from penstock.errors import (
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    StoreUnsafeError,
)
from penstock.folders import FOLDER, make_folder, user_name
from penstock.objects.location import local_folder
from penstock.objects.storage import Buffer, ListedObject, ObjectStorage

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_A_FOLDER = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
_ATTEMPTS = 3
UNFINISHED_SUFFIX = ".part"
"""The suffix of the name of a file that is being written."""
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a file: do not follow links, and do not wait for a pipe."""


class LocalStorage(ObjectStorage):
    """A folder with a file for each object.

    Files and new folders get the permissions of the location's folder. If this folder did not exist, only its
    owner has access. Other users may be able to write there, so every folder below it is opened by descriptor
    without following links, and only regular files are read.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._folder = Path(local_folder(url))
        self._synced: set[tuple[int, ...]] = set()
        """The :meth:`_FolderChain.state` of folders whose entries are known to be on disk."""

    def check(self, folder: str) -> None:
        for checked_folder in (self._folder, *self._folder.parents):
            # A folder that is missing or cannot be inspected is reported by the check below.
            with contextlib.suppress(OSError):
                self._refuse_folder_of_other_user(checked_folder)
        super().check(folder)

    def _refuse_folder_of_other_user(self, folder: Path) -> None:
        """Refuse a folder that another user may have created to get access to the objects in it."""
        owner = os.stat(folder).st_uid
        if owner not in (0, os.geteuid()) and os.stat(folder.parent).st_mode & stat.S_IWOTH:
            raise StoreUnsafeError(
                f"the folder {folder} belongs to {user_name(owner)}, who could replace and delete the rows "
                "in it: name a folder of this process's user, or let its owner create the queue",
                condition="STORE_UNSAFE.FOLDER_OWNER",
                folder=str(folder),
                owner=user_name(owner),
            )

    def require_folder(self, folder: str) -> None:
        if not os.path.lexists(self._folder / folder):
            raise StoreUnavailableError(
                f"the folder {self._folder / folder}, which has rows of this store, does not exist on this "
                "machine: mount its disk, or move it back. If it is lost for good, `penstock store clean-up "
                "--take-over` creates it again, without its rows",
                condition="STORE_UNAVAILABLE.OBJECTS_FOLDER",
                storage=self.url,
            )

    def _put(self, name: str, parts: Sequence[Buffer], existing: str | None) -> None:
        *folder_names, file = name.split("/")
        unfinished = f"{file}.{secrets.token_hex(8)}{UNFINISHED_SUFFIX}"
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                if existing is not None:
                    # If its disk is not mounted, the folder would be created on the machine's own disk.
                    self.require_folder(existing)
                self._put_file(folder_names, file, unfinished, parts)
            except FileNotFoundError as error:
                # Another process removed an empty folder in the meantime.
                if not attempts_left:
                    raise self._store_error(error) from error
            else:
                return

    def _put_file(
        self, folder_names: Sequence[str], file: str, unfinished: str, parts: Sequence[Buffer]
    ) -> None:
        with self._translating("/".join((*folder_names, file))):
            self._create_location()
            with self._folder_chain(folder_names, create=True) as folder:
                state = folder.state()
                if state not in self._synced:
                    # Another process may just have created it.
                    folder.sync()
                    self._synced.add(state)
                try:
                    _write(unfinished, folder.lowest, parts, folder.mode & 0o666)
                    os.replace(unfinished, file, src_dir_fd=folder.lowest, dst_dir_fd=folder.lowest)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(unfinished, dir_fd=folder.lowest)
                    raise
                _sync(folder.lowest)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        *folder_names, file = name.split("/")
        try:
            with self._translating(name), self._folder_chain(folder_names) as folder:
                descriptor = os.open(file, _READ_FLAGS, dir_fd=folder.lowest)
        except FileNotFoundError:
            raise self.missing(name) from None
        with self._translating(name):
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise self.damaged(name, "is not a file")
                for start, length in ranges:
                    # Check this first, because a wrong length could require any amount of memory.
                    if start + length > status.st_size:
                        raise self.damaged(
                            name, f"ends at byte {status.st_size}, before byte {start + length}"
                        )
                return [_read_range(descriptor, start, length) for start, length in ranges]
            finally:
                os.close(descriptor)

    def _listed(self, prefix: str) -> Iterator[ListedObject]:
        try:
            with (
                self._translating(prefix),
                self._folder_chain(prefix.strip("/").split("/")) as folder,
                os.scandir(folder.lowest) as entries,
            ):
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            name = f"{prefix}{entry.name}"
                            yield ListedObject(name, status.st_size, status.st_mtime_ns // 1000)
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
        *folder_names, file = name.split("/")
        try:
            with self._translating(name), self._folder_chain(folder_names) as folder:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder.lowest)
                folder.remove_empty()
        except FileNotFoundError:
            return

    def _folder_chain(self, folder_names: Sequence[str], *, create: bool = False) -> _FolderChain:
        try:
            # The location's own path may have links, because the user chose it.
            location = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NOT_A_FOLDER:
                raise self._not_a_folder() from None
            raise
        return _FolderChain(location, folder_names, create=create)

    def _not_a_folder(self) -> StoreError:
        return StoreError(
            f"{self.url} is not a folder, or is below a file: name another location for the rows",
            condition="STORE_ERROR.CANNOT_OPEN",
            storage=self.url,
        )

    def _create_location(self) -> None:
        missing_folders = [
            missing_folder
            for missing_folder in (self._folder, *self._folder.parents)
            if not missing_folder.exists()
        ]
        for missing_folder in reversed(missing_folders):
            try:
                missing_folder.mkdir(0o700)
            except FileExistsError:
                continue
            except NotADirectoryError:
                raise self._not_a_folder() from None
            with contextlib.suppress(OSError):
                parent = os.open(missing_folder.parent, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(parent)
                finally:
                    os.close(parent)

    @contextlib.contextmanager
    def _translating(self, name: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, FileNotFoundError):
            raise
        except OSError as error:
            if error.errno in _NOT_A_FOLDER:
                raise self.damaged(name, "is a link or another kind of file, or is below one") from None
            raise self._store_error(error) from error

    def _store_error(self, error: OSError) -> StoreError:
        reason = error.strerror or str(error)
        if error.errno in _DISK_FULL:
            return StoreFullError(
                f"no space left in {self.url}: free some disk space; none of this was written"
            )
        if error.errno in _READ_ONLY:
            return StoreReadOnlyError(
                f"{self.url} cannot be read or written ({reason}): check the permissions on the folder"
            )
        return self.unavailable(reason)


class _FolderChain:
    """The open folders from a location down to a folder below it, each opened relative to its parent."""

    def __init__(self, location: int, folder_names: Sequence[str], *, create: bool = False) -> None:
        self._folder_chain, self._create = folder_names, create
        self._descriptors = [location]
        self.mode = 0
        """The permissions of the location."""

    def __enter__(self) -> Self:
        try:
            self.mode = stat.S_IMODE(os.fstat(self.lowest).st_mode)
            for folder_name in self._folder_chain:
                self._descriptors.append(self._open_child(folder_name))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def lowest(self) -> int:
        """The descriptor of the lowest folder."""
        return self._descriptors[-1]

    def _open_child(self, folder_name: str) -> int:
        try:
            return os.open(folder_name, FOLDER, dir_fd=self.lowest)
        except FileNotFoundError:
            if not self._create:
                raise
        make_folder(folder_name, self.lowest, partial(_set_permissions, mode=self.mode))
        _sync(self.lowest)
        return os.open(folder_name, FOLDER, dir_fd=self.lowest)

    def state(self) -> tuple[int, ...]:
        """Return values that change when one of the folders is removed and recreated.

        The inode alone is not enough, since a file system may reuse it.
        """
        parent_times = (os.fstat(folder).st_mtime_ns for folder in self._descriptors[:-1])
        return (os.fstat(self.lowest).st_ino, *parent_times)

    def sync(self) -> None:
        for folder in self._descriptors:
            _sync(folder)

    def remove_empty(self) -> None:
        """Remove empty folders, starting with the lowest.

        If another process is about to write to such a folder, it recreates it.
        """
        for parent, folder_name in zip(self._descriptors[-2::-1], self._folder_chain[::-1], strict=True):
            try:
                os.rmdir(folder_name, dir_fd=parent)
            except OSError:
                break

    def _close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _set_permissions(folder: int, mode: int) -> None:
    if os.fstat(folder).st_uid == os.geteuid():
        os.fchmod(folder, mode)


def _write(name: str, folder: int, parts: Sequence[Buffer], mode: int) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
    with open(file, "wb") as stream:
        os.fchmod(file, mode)
        for part in parts:
            stream.write(part)
        stream.flush()
        os.fsync(file)


def _sync(folder: int) -> None:
    # Some file systems do not support this, and offer no other way to make names durable.
    with contextlib.suppress(OSError):
        os.fsync(folder)


def _read_range(file: int, start: int, length: int) -> bytes:
    data = os.pread(file, length, start)
    if len(data) < length:
        parts = [data]
        while (remaining := length - sum(map(len, parts))) > 0:
            part = os.pread(file, remaining, start + length - remaining)
            if not part:
                break
            parts.append(part)
        data = b"".join(parts)
    return data
