"""The files of a SQLite store. They belong to one user unless the store's URL says otherwise.

The files next to the SQLite file are the log and its index, locks and wakeup files. They get the mode of the
SQLite file, as SQLite does with the files that it creates itself. A user who can replace one of them, the
folder or a link on the path could read the rows or hold a lock. So Penstock trusts only root and the current
user, and refuses files that any other user could replace.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from penstock.errors import StoreUnsafeError
from penstock.folders import make_folder, user_name

log = logging.getLogger("penstock.store")

OWNER_ONLY = 0o600
"""The mode of files that only their owner may read and write."""
_SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
_SIDE_FILE_SUFFIXES = (*_SQLITE_SUFFIXES, "-lock", "-owners")
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""The flags for opening a file next to the SQLite file. They do not follow links, and do not wait if another
user has put a pipe there.
"""
_O_PATH = getattr(os, "O_PATH", 0)
_MAX_LINKS = 40
_warned: set[str] = set()


@dataclass(frozen=True)
class StoreFiles:
    """The files of one store: the SQLite file ``path``, with links resolved, and the files next to it.

    New files get ``mode``. ``trusts_folder`` means that all users who may write in the folder are trusted.
    """

    path: str = ""
    mode: int = OWNER_ONLY
    trusts_folder: bool = False

    def check(self, url_path: str) -> None:
        """Refuse a store whose files another user could replace, and set the mode of the files next to the
        SQLite file. ``url_path`` is the path in the store's URL.
        """
        if not self.trusts_folder:
            self._check_links(url_path)
            self._check_folder()
        for suffix in ("", *_SIDE_FILE_SUFFIXES):
            self._check_file(f"{self.path}{suffix}")
        self._warn()

    def create_if_missing(self) -> None:
        """Create an empty SQLite file if there is none. SQLite itself would use the umask."""
        folder, name = os.path.split(self.path)
        with suppress(OSError):
            if os.path.lexists(self.path):
                return
            # Close the file before it gets its final name: closing it later would release the locks of other
            # connections in this process.
            file, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
            try:
                os.fchmod(file, self.mode)
                os.close(file)
                self._link_to_path(temporary)
            finally:
                os.unlink(temporary)

    def _link_to_path(self, temporary: str) -> None:
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return
        except OSError:
            # The file system has no links.
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode)
            os.fchmod(file, self.mode)
            os.close(file)

    def open_side_file(self, path: str) -> int:
        """Open a file next to the SQLite file, and create it if needed. It is opened for reading, which is
        enough for a lock. Refuse a file that another user created.
        """
        permissions = self._side_file_permissions()
        try:
            file = _open_or_create(path, permissions.mode)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _unsafe_link(path, path) from error
            raise
        try:
            status = os.fstat(file)
            self._require_trusted_owner(path, status)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a file", path)
            self._apply(permissions, _FileHandle(file, status))
        except BaseException:
            os.close(file)
            raise
        return file

    def make_folder(self, path: str) -> None:
        """Create a folder next to the SQLite file; refuse one that belongs to another user."""
        permissions = self._side_file_permissions().for_folder()
        if not os.path.lexists(path):
            parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                make_folder(os.path.basename(path), parent, permissions.prepare)
            finally:
                os.close(parent)
        with _file_handle(path) as handle:
            if stat.S_ISLNK(handle.status.st_mode):
                raise _unsafe_link(path, path)
            self._require_trusted_owner(path, handle.status)
            if not self.trusts_folder:
                permissions.apply(handle)

    def _side_file_permissions(self) -> _Permissions:
        try:
            status = os.stat(self.path)
        except OSError:
            return _Permissions(self.mode, None, None)
        return _Permissions(stat.S_IMODE(status.st_mode) & 0o666 | OWNER_ONLY, status.st_uid, status.st_gid)

    def _check_links(self, url_path: str) -> None:
        for link in _links_on_path(url_path):
            with suppress(FileNotFoundError):
                if not _is_trusted(os.lstat(link).st_uid):
                    raise _unsafe_link(url_path, link)

    def _check_folder(self) -> None:
        folder = os.path.dirname(self.path)
        try:
            status = os.stat(folder)
        except OSError:
            return
        if not _is_trusted(status.st_uid):
            raise StoreUnsafeError(
                f"the folder {folder} of the store {self.path} belongs to {user_name(status.st_uid)}, who "
                "could replace the store's files: keep the store in a folder of this process's user, or add "
                "trust=folder to its URL if you trust that user",
                condition="STORE_UNSAFE.FOLDER_OWNER",
                folder=folder,
                owner=user_name(status.st_uid),
            )
        if not status.st_mode & stat.S_ISVTX and _others_can_write(status):
            mode = _octal_mode(status.st_mode)
            raise StoreUnsafeError(
                f"other users may write in the folder {folder} (mode {mode}), so they could replace the "
                f"files of the store {self.path}: run `chmod go-w {folder}`, or add trust=folder to the "
                "store's URL if you trust them all",
                condition="STORE_UNSAFE.FOLDER_WRITABLE",
                folder=folder,
                mode=mode,
            )

    def _check_file(self, path: str) -> None:
        with suppress(OSError), _file_handle(path) as handle:
            if stat.S_ISLNK(handle.status.st_mode):
                raise _unsafe_link(path, path)
            self._require_trusted_owner(path, handle.status)
            if path != self.path and stat.S_ISREG(handle.status.st_mode):
                with suppress(OSError):
                    self._apply(self._side_file_permissions(), handle)

    def _apply(self, permissions: _Permissions, file: _FileHandle) -> None:
        """Give a file the rights of the SQLite file.

        If other users may write in the folder, only an empty file is changed: they may have renamed or linked
        an unrelated file of this user to this name.
        """
        if not self.trusts_folder or not file.status.st_size:
            permissions.apply(file)

    def _require_trusted_owner(self, path: str, status: os.stat_result) -> None:
        if self.trusts_folder or _is_trusted(status.st_uid):
            return
        raise StoreUnsafeError(
            f"the file {path} of a store belongs to {user_name(status.st_uid)}, who could hold the store's "
            "locks or change its rows: use a store of this process's user, run this process as that user, "
            "or add trust=folder to the URL if you trust that user",
            condition="STORE_UNSAFE.FILE_OWNER",
            file=path,
            owner=user_name(status.st_uid),
        )

    def _warn(self) -> None:
        """Warn once if other users may read or write the SQLite file. The mode stays, since it may be
        intended.
        """
        try:
            status = os.stat(self.path)
        except OSError:
            return
        extra_bits = stat.S_IMODE(status.st_mode) & 0o066 & ~self.mode if stat.S_ISREG(status.st_mode) else 0
        if not extra_bits or status.st_uid != os.geteuid() or self.path in _warned:
            return
        _warned.add(self.path)
        log.warning(
            "others can %s the store's file %s: run `chmod %s %s`, or, if that is intended, put mode=%s in "
            "its URL",
            "write" if extra_bits & 0o022 else "read",
            self.path,
            _octal_mode(self.mode),
            self.path,
            _octal_mode(status.st_mode & 0o666),
            extra={"action": "store_open_to_others", "store": f"sqlite:///{self.path}"},
        )


@dataclass(frozen=True)
class _FileHandle:
    """A handle of a checked file. It refers to the same file even if another user replaces the path with a
    link.
    """

    target: int | str
    """The argument for ``chmod`` and ``chown``: a descriptor, the name of a descriptor, or the path."""
    status: os.stat_result

    def chmod(self, mode: int) -> None:
        os.chmod(self.target, mode, **self._not_through_a_link())

    def chown(self, owner: int, group: int) -> None:
        os.chown(self.target, owner, group, **self._not_through_a_link())

    def _not_through_a_link(self) -> dict[str, bool]:
        return {} if _O_PATH or isinstance(self.target, int) else {"follow_symlinks": False}


@contextmanager
def _file_handle(path: str) -> Iterator[_FileHandle]:
    if not _O_PATH:
        yield _FileHandle(path, os.lstat(path))
        return
    # Use O_PATH: closing any other kind of descriptor would release the locks that SQLite has on the file in
    # this process.
    file = os.open(path, _O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Only through this name can the mode be changed for this kind of descriptor.
        yield _FileHandle(f"/proc/self/fd/{file}", os.fstat(file))
    finally:
        os.close(file)


@dataclass(frozen=True)
class _Permissions:
    """The mode and the owner of a file. Only root can apply the owner."""

    mode: int
    owner: int | None
    group: int | None

    def for_folder(self) -> _Permissions:
        """Return the permissions of a folder with such files. Users who may read the files may list the
        folder.
        """
        return _Permissions(0o700 | self.mode | (self.mode & 0o444) >> 2, self.owner, self.group)

    def prepare(self, folder: int) -> None:
        """Apply the permissions to a folder that this process has just created."""
        self.apply(_FileHandle(folder, os.fstat(folder)))

    def apply(self, file: _FileHandle) -> None:
        """Apply the permissions to a file that belongs to this process's user and has no other name."""
        status = file.status
        if status.st_uid != os.geteuid() or (stat.S_ISREG(status.st_mode) and status.st_nlink > 1):
            return
        if stat.S_IMODE(status.st_mode) != self.mode:
            file.chmod(self.mode)
        if (
            os.geteuid() == 0
            and self.owner is not None
            and (status.st_uid, status.st_gid) != (self.owner, self.group)
        ):
            # Change the owner, as SQLite does: a file owned by root would lock out the store's user.
            file.chown(self.owner, -1 if self.group is None else self.group)


def _links_on_path(path: str) -> Iterator[str]:
    """Yield the symbolic links on the path to a file, including the file itself."""
    pending, resolved, links_left = path.split("/")[::-1], "/", _MAX_LINKS
    while pending and links_left:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            resolved = os.path.dirname(resolved)
            continue
        candidate = os.path.join(resolved, part)
        try:
            target = os.readlink(candidate)
        except OSError:
            resolved = candidate
            continue
        yield candidate
        links_left -= 1
        resolved = "/" if target.startswith("/") else resolved
        pending += target.split("/")[::-1]


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())


def _others_can_write(folder: os.stat_result) -> bool:
    if folder.st_mode & stat.S_IWOTH:
        return True
    return bool(folder.st_mode & stat.S_IWGRP) and not is_own_group(folder.st_gid)


def is_own_group(gid: int) -> bool:
    """Return whether a group is root's, or has this process's user as its only member."""
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def _octal_mode(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"


def _open_or_create(path: str, mode: int) -> int:
    try:
        # First try without O_CREAT: some systems refuse it for another user's file in a folder such as /tmp.
        return os.open(path, READ_FLAGS)
    except FileNotFoundError:
        return os.open(path, READ_FLAGS | os.O_CREAT, mode)


def _unsafe_link(path: str, link: str) -> StoreUnsafeError:
    owner = user_name(os.lstat(link).st_uid)
    return StoreUnsafeError(
        f"the path to the store's file {path} has the symbolic link {link} of {owner}, who could change it "
        "at any time: write the path of the file itself in the URL, or remove the link",
        condition="STORE_UNSAFE.SYMLINK",
        file=path,
        link=link,
        owner=owner,
    )
