"""Run a PostgreSQL server exactly as long as its parent process lives.

Run as ``python postgres_guard.py DIRECTORY COMMAND...``. The parent holds the other end of standard input and
never writes to it. End of file means that the parent has exited, for example because of SIGKILL.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from typing import TypedDict


class Identity(TypedDict, total=False):
    """Arguments of subprocess that run a program as another user."""

    user: int
    group: int
    extra_groups: list[int]


def server_identity() -> Identity:
    """Return `nobody` if this process is root, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def main(directory: str, *command: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, **server_identity())
    try:
        sys.stdin.buffer.read()
    finally:
        server.send_signal(signal.SIGQUIT)  # immediate shutdown, because the data is not needed any more
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
