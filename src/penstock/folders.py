"""Folders that others can use from the moment in which they have their names."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from contextlib import suppress

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder is opened: never through a link."""


def make_folder(name: str, above: int, prepare: Callable[[int], None]) -> None:
    """Make a folder, which another process may make at the same time.

    Parameters
    ----------
    name
        Its name in the folder above.
    above
        The descriptor of that folder.
    prepare
        Gives the folder, by a descriptor, the permissions that the umask would take from it.
    """
    unnamed = f".{name}-{secrets.token_hex(8)}"
    os.mkdir(unnamed, 0o700, dir_fd=above)
    try:
        folder = os.open(unnamed, FOLDER, dir_fd=above)
        try:
            # Somebody may have put another one in its place.
            if not os.listdir(folder):
                prepare(folder)
        finally:
            os.close(folder)
        os.rename(unnamed, name, src_dir_fd=above, dst_dir_fd=above)
    except OSError as error:
        with suppress(OSError):
            os.rmdir(unnamed, dir_fd=above)
        # Another process was faster, and has a file in it.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def user_name(uid: int) -> str:
    """Return the name of a user for a message."""
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
