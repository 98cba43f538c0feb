"""Creation of folders that have their permissions as soon as they have their names."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from contextlib import suppress

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags for opening a folder, which never follow a link."""


def make_folder(name: str, above: int, prepare: Callable[[int], None]) -> None:
    """Create a folder, unless another process creates it at the same time.

    Parameters
    ----------
    name
        The name in the parent folder.
    above
        The descriptor of the parent folder.
    prepare
        A function of the new folder's descriptor, which sets permissions that the umask would remove.
    """
    unnamed = f".{name}-{secrets.token_hex(8)}"
    os.mkdir(unnamed, 0o700, dir_fd=above)
    try:
        folder = os.open(unnamed, FOLDER, dir_fd=above)
        try:
            # Another process may have put another folder in its place.
            if not os.listdir(folder):
                prepare(folder)
        finally:
            os.close(folder)
        os.rename(unnamed, name, src_dir_fd=above, dst_dir_fd=above)
    except OSError as error:
        with suppress(OSError):
            os.rmdir(unnamed, dir_fd=above)
        # Another process was faster, and its folder already has a file.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def user_name(uid: int) -> str:
    """Return the name of a user for a message."""
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
