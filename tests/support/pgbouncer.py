"""Runs pgbouncer in front of the PostgreSQL server of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.postgres import answers, free_port
from tests.support.postgres_guard import server_identity
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SETTINGS = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {directory}/users
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 500
logfile = {directory}/log
"""


@cache
def program() -> tuple[str, str]:
    """Return the path of pgbouncer, and the folder of the libraries that it may need."""
    command = ["bash", str(ROOT / "scripts" / "ensure_pgbouncer.sh")]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    machine = os.uname().machine
    return path, str(ROOT / ".pgbouncer" / "usr" / "lib" / f"{machine}-linux-gnu")


@contextmanager
def pgbouncer(url: str, *, size: int = 2, mode: str = "transaction") -> Iterator[str]:
    """Run a pooler with `size` connections to the server of a URL, and yield the URL of the pooler.

    The URL has the option ``direct`` unless each client has a session of its own.
    """
    parts, own_port = urlsplit(url), free_port()
    path, libraries = program()
    directory = Path(tempfile.mkdtemp(prefix="penstock-pgbouncer-"))
    identity = server_identity()
    (directory / "users").write_text(f'"{parts.username}" "{parts.password}"\n')
    (directory / "settings").write_text(
        SETTINGS.format(
            host=parts.hostname, port=parts.port, own_port=own_port, directory=directory, mode=mode, size=size
        )
    )
    # The user that it runs as must be able to read the program, too.
    copy = directory / "pgbouncer"
    copy.write_bytes(Path(path).read_bytes())
    copy.chmod(0o755)
    if identity:
        os.chown(directory, identity["user"], identity["group"])
    guard = subprocess.Popen(
        [
            sys.executable, str(Path(__file__).with_name("postgres_guard.py")), str(directory),
            str(copy), str(directory / "settings"),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "LD_LIBRARY_PATH": _copy_libraries(libraries, directory)},
    )  # fmt: skip
    netloc = f"{parts.username}:{parts.password}@127.0.0.1:{own_port}"
    query = "&".join(
        filter(None, [parts.query, f"direct={parts.hostname}:{parts.port}" if mode != "session" else ""])
    )
    pooled = parts._replace(netloc=netloc, query=query).geturl()
    try:
        wait_until(
            lambda: answers(parts._replace(netloc=netloc, query="").geturl()), message="pgbouncer answers"
        )
        yield pooled
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(30)


def _copy_libraries(libraries: str, directory: Path) -> str:
    """Copy the libraries to a folder where every user can read them."""
    for library in Path(libraries).glob("*.so*"):
        copy = directory / library.name
        copy.write_bytes(library.read_bytes())
        copy.chmod(0o755)
    return str(directory)
