"""The files of a SQLite store: one user's own, unless the store's URL says otherwise.

The SQLite file says who may do what: the files beside it (the log and its index, locks, bells) get its mode, as SQLite gives it to its own.
Whoever may replace one of them, or the folder or a link on the way there, could read the rows or hold a lock. So what another user could
do that with is refused: root and the current user are trusted, and nobody else.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import StoreUnsafe

log = logging.getLogger("penstock.store")

OWN = 0o600
"""The mode of a file that its owner may read and write, and nobody else."""
_SQLITES = ("-wal", "-shm", "-journal")
_BESIDE = (*_SQLITES, "-lock", "-owners")
READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""How a file beside the SQLite file is opened: never through a link, and without a wait for a pipe that somebody has put there."""
_MOST_LINKS = 40
_warned: set[str] = set()


@dataclass(frozen=True)
class StoreFiles:
    """The files of one store.

    Parameters
    ----------
    path
        The SQLite file, behind all links.
    mode
        That of a file that is made here.
    trusting
        Whether everybody who may write in the folder is trusted.
    """

    path: str = ""
    mode: int = OWN
    trusting: bool = False

    def check(self, named: str) -> None:
        """Refuse a store whose files another user could replace, and tighten those beside the SQLite file.

        Parameters
        ----------
        named
            The path in the store's URL.

        Raises
        ------
        StoreUnsafe
        """
        if not self.trusting:
            self._check_links(named)
            self._check_folder()
        for suffix in ("", *_BESIDE):
            self._check_file(f"{self.path}{suffix}")
        self._warn()

    def make(self) -> None:
        """Make the SQLite file, empty, where there is none; SQLite itself would make it by the umask."""
        folder, name = os.path.split(self.path)
        with suppress(OSError):
            if os.path.lexists(self.path):
                return
            # Closed before it has its name: to close it afterwards would free the locks of other connections of this process.
            file, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
            try:
                os.fchmod(file, self.mode)
                os.close(file)
                self._name(temporary)
            finally:
                os.unlink(temporary)

    def _name(self, temporary: str) -> None:
        try:
            os.link(temporary, self.path)
        except FileExistsError:
            return
        except OSError:
            # A file system without links.
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode)
            os.fchmod(file, self.mode)
            os.close(file)

    def open_beside(self, path: str) -> int:
        """Open a file beside the SQLite file for reading, which is all that a lock needs; it is made if it is not there.

        Raises
        ------
        OSError
            When that cannot be done.
        StoreUnsafe
            When somebody else has put it there.
        """
        rights = self._beside()
        try:
            file = _opened(path, rights.mode)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _unsafe_link(path, path) from error
            raise
        try:
            there = os.fstat(file)
            self._require_own(path, there)
            if not stat.S_ISREG(there.st_mode):
                raise OSError(errno.EINVAL, "not a file", path)
            rights.give(file)
        except BaseException:
            os.close(file)
            raise
        return file

    def make_folder(self, path: str) -> None:
        """Make a folder beside the SQLite file.

        Raises
        ------
        OSError
            When that cannot be done.
        StoreUnsafe
            When somebody else has put it there.
        """
        rights = self._beside().of_folder()
        with suppress(FileExistsError):
            os.mkdir(path, rights.mode)
        there = os.lstat(path)
        if stat.S_ISLNK(there.st_mode):
            raise _unsafe_link(path, path)
        self._require_own(path, there)
        rights.give(path)

    def _beside(self) -> _Rights:
        try:
            found = os.stat(self.path)
        except OSError:
            return _Rights(self.mode, None, None)
        return _Rights(stat.S_IMODE(found.st_mode) & 0o666 | OWN, found.st_uid, found.st_gid)

    def _check_links(self, named: str) -> None:
        for link in _links(named):
            with suppress(FileNotFoundError):
                if not _is_trusted(os.lstat(link).st_uid):
                    raise _unsafe_link(named, link)

    def _check_folder(self) -> None:
        folder = os.path.dirname(self.path)
        try:
            found = os.stat(folder)
        except OSError:
            return
        if not _is_trusted(found.st_uid):
            raise StoreUnsafe(
                f"the folder {folder} of the store {self.path} belongs to {_user(found.st_uid)}, who could replace its files: keep it in a "
                "folder of this process's user, or write trust=folder in its URL if that user may",
                condition="STORE_UNSAFE.FOLDER_OWNER",
                folder=folder,
                owner=_user(found.st_uid),
            )
        if not found.st_mode & stat.S_ISVTX and _others_write(found):
            mode = _octal(found.st_mode)
            raise StoreUnsafe(
                f"others may write in the folder {folder} (mode {mode}), and so replace the files of the store {self.path}: run `chmod "
                f"go-w {folder}`, or write trust=folder in its URL if all of them may",
                condition="STORE_UNSAFE.FOLDER_WRITABLE",
                folder=folder,
                mode=mode,
            )

    def _check_file(self, path: str) -> None:
        try:
            found = os.lstat(path)
        except OSError:
            return
        if stat.S_ISLNK(found.st_mode):
            raise _unsafe_link(path, path)
        self._require_own(path, found)
        if path != self.path and stat.S_ISREG(found.st_mode):
            with suppress(OSError):
                self._beside().give(path)

    def _require_own(self, path: str, found: os.stat_result) -> None:
        if self.trusting or _is_trusted(found.st_uid):
            return
        raise StoreUnsafe(
            f"the file {path} of a store belongs to {_user(found.st_uid)}, who could hold its locks or change what is in it: use a store "
            "of this process's user, or run as that one, or write trust=folder in its URL if that user may",
            condition="STORE_UNSAFE.FILE_OWNER",
            file=path,
            owner=_user(found.st_uid),
        )

    def _warn(self) -> None:
        """Say once that others may do more with the SQLite file than they should; it may be meant so, so it stays."""
        try:
            found = os.stat(self.path)
        except OSError:
            return
        wider = stat.S_IMODE(found.st_mode) & 0o066 & ~self.mode
        if not wider or found.st_uid != os.geteuid() or self.path in _warned:
            return
        _warned.add(self.path)
        log.warning(
            "others may %s the store's file %s: run `chmod %s %s`, or write mode=%s in its URL if they may",
            "write" if wider & 0o022 else "read",
            self.path,
            _octal(self.mode),
            self.path,
            _octal(found.st_mode & 0o666),
            extra={"action": "store_open_to_others", "store": f"sqlite:///{self.path}"},
        )


@dataclass(frozen=True)
class _Rights:
    """Who may do what with a file, and whose it is; the latter only counts for root."""

    mode: int
    owner: int | None
    group: int | None

    def of_folder(self) -> _Rights:
        """Of a folder with such files: who may read them may look there."""
        return _Rights(0o700 | self.mode | (self.mode & 0o444) >> 2, self.owner, self.group)

    def give(self, file: int | str) -> None:
        """Give them to a file of this process's user."""
        found = os.stat(file)
        if found.st_uid != os.geteuid():
            return
        if stat.S_IMODE(found.st_mode) != self.mode:
            os.chmod(file, self.mode)
        if (
            os.geteuid() == 0
            and self.owner is not None
            and (found.st_uid, found.st_gid) != (self.owner, self.group)
        ):
            # As SQLite does: root's own would keep the store's user out.
            os.chown(file, self.owner, -1 if self.group is None else self.group)


def _links(path: str) -> Iterator[str]:
    """The symbolic links on the way to a file, the last one included."""
    parts, place, left = path.split("/")[::-1], "/", _MOST_LINKS
    while parts and left:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":
            place = os.path.dirname(place)
            continue
        here = os.path.join(place, part)
        try:
            leads = os.readlink(here)
        except OSError:
            place = here
            continue
        yield here
        left -= 1
        place = "/" if leads.startswith("/") else place
        parts += leads.split("/")[::-1]


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())


def _others_write(folder: os.stat_result) -> bool:
    if folder.st_mode & stat.S_IWOTH:
        return True
    return bool(folder.st_mode & stat.S_IWGRP) and not _is_own_group(folder.st_gid)


def _is_own_group(gid: int) -> bool:
    """Whether a group has only this process's user, as where each user has one of the same name; or is root's."""
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def _octal(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _opened(path: str, mode: int) -> int:
    try:
        # Some systems let nobody else's file be opened as one to be made, in a folder such as /tmp.
        return os.open(path, READING)
    except FileNotFoundError:
        return os.open(path, READING | os.O_CREAT, mode)


def _unsafe_link(path: str, link: str) -> StoreUnsafe:
    owner = _user(os.lstat(link).st_uid)
    return StoreUnsafe(
        f"the store's file {path} is behind the symbolic link {link} of {owner}, which could lead elsewhere at any time: write the path of "
        "the file itself in the URL, or remove the link",
        condition="STORE_UNSAFE.SYMLINK",
        file=path,
        link=link,
        owner=owner,
    )
