"""Objects in a folder: on this machine's disk, or on one that several machines mount."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import StoreError, StoreFullError, StoreReadOnlyError
from penstock.objects.location import local_folder
from penstock.objects.storage import Buffer, ListedObject, ObjectStorage

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNFINISHED = ".part"


class LocalStorage(ObjectStorage):
    """A folder with a file for each object.

    Files and new folders have the permissions of the location's folder, which is its owner's alone if it did
    not exist.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._folder = Path(local_folder(url))

    def _put(self, name: str, parts: Sequence[Buffer]) -> None:
        path = self._folder / name
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        with self._translating():
            mode = self._made(path.parent) & 0o666
            try:
                _write(unfinished, parts, mode)
                os.replace(unfinished, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise
            _sync_folder(path.parent)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        with self._translating():
            try:
                file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise self.missing(name) from None
            try:
                size = os.fstat(file).st_size
                for start, length in ranges:
                    # Checked first: a wrong length could ask for any amount of memory.
                    if start + length > size:
                        raise self.damaged(name, f"ends at byte {size}, before byte {start + length}")
                return [_read_range(file, start, length) for start, length in ranges]
            finally:
                os.close(file)

    def _listed(self, prefix: str) -> Iterator[ListedObject]:
        with self._translating():
            for folder, _, files in os.walk(self._folder / prefix):
                for file in files:
                    path = Path(folder, file)
                    with contextlib.suppress(FileNotFoundError):
                        found = path.stat(follow_symlinks=False)
                        name = path.relative_to(self._folder).as_posix()
                        yield ListedObject(name, found.st_size, found.st_mtime_ns // 1000)

    def _delete(self, name: str) -> None:
        path = self._folder / name
        with self._translating():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            for folder in path.parents[: len(Path(name).parts) - 1]:
                # Another process may be about to write there: it makes the folder again.
                try:
                    folder.rmdir()
                except OSError:
                    break

    def _made(self, folder: Path) -> int:
        """Make a folder and those above it, durably, and return the permissions of the location's."""
        try:
            mode = stat.S_IMODE(self._folder.stat().st_mode)
        except FileNotFoundError:
            mode = 0o700
        absent = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(absent):
            # The umask would take away what the location's folder grants.
            with contextlib.suppress(FileExistsError):
                each.mkdir(mode)
                each.chmod(mode)
            _sync_folder(each.parent)
        return mode

    @contextlib.contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
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


def _write(path: Path, parts: Sequence[Buffer], mode: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(file, "wb") as written:
        os.fchmod(file, mode)
        for part in parts:
            written.write(part)
        written.flush()
        os.fsync(file)


def _sync_folder(folder: Path) -> None:
    # A file system without this has no names to lose, or cannot promise more.
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


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
