"""A real PostgreSQL server for the tests, without root rights, Docker or a system package."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.pgtools import server_home
from tests.support.postgres_guard import server_identity
from tests.support.waiting import wait_until

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_prepared_transactions": "10",
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_QUICK_SCRAM = 160_000
"""The server from which on the cost of a password can be chosen."""


@dataclass(frozen=True)
class PostgresServer:
    """A running server and the guard process that ends it."""

    url: str
    directory: Path
    guard: subprocess.Popen[bytes]

    def stop(self) -> None:
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        self.guard.wait(30)


def start_postgres(*, fsync: bool = False, **settings: str) -> PostgresServer:
    """Make a new cluster in a temporary directory and serve it on a free port of 127.0.0.1.

    Without ``fsync`` it survives any end of its processes, and not a power cut. ``settings`` go over
    SETTINGS.

    TCP with a password, because executors and child processes in other working directories reach it too, and
    because a URL with a password is what users have.
    """
    directory = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    try:
        return _start(
            directory, settings if fsync else {"fsync": "off", "full_page_writes": "off"} | settings
        )
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _start(directory: Path, settings: dict[str, str]) -> PostgresServer:
    if identity := server_identity():
        os.chown(directory, identity["user"], identity["group"])
    binaries = _binaries(directory)
    password = secrets.token_hex(8)
    data, log, password_file = directory / "data", directory / "log", directory / "password"
    password_file.write_text(password)
    password_file.chmod(0o644)
    _run(
        [
            str(binaries / "initdb"), f"--pgdata={data}", "--username=penstock", f"--pwfile={password_file}",
            "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync",
        ],
        directory,
    )  # fmt: skip
    port = free_port()
    options = [word for name, value in (SETTINGS | settings).items() for word in ("-c", f"{name}={value}")]
    with log.open("wb") as log_file:
        guard = subprocess.Popen(
            [
                sys.executable, str(Path(__file__).with_name("postgres_guard.py")), str(directory),
                str(binaries / "postgres"), "-D", str(data), "-p", str(port), *options,
            ],
            stdin=subprocess.PIPE, stdout=log_file, stderr=subprocess.STDOUT, cwd=directory,
            start_new_session=True,
        )  # fmt: skip
    server = PostgresServer(f"postgresql://penstock:{password}@127.0.0.1:{port}/postgres", directory, guard)
    try:
        wait_until(lambda: _started(server, log), timeout=60, message="PostgreSQL accepts connections")
        _hash_quickly(server)
    except BaseException:
        server.stop()
        raise
    return server


def _hash_quickly(server: PostgresServer) -> None:
    """Have logins take little time; thousands of connections are made in the tests."""
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        if connection.info.server_version >= _QUICK_SCRAM:
            connection.execute("SET scram_iterations = 1")
            connection.execute(f"ALTER ROLE penstock PASSWORD '{connection.info.password}'".encode())


def _started(server: PostgresServer, log: Path) -> bool:
    if server.guard.poll() is not None:
        raise AssertionError(f"PostgreSQL did not start:\n{log.read_text()}")
    return answers(server.url)


def answers(url: str) -> bool:
    """Return whether a server or a pooler lets one in."""
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _binaries(directory: Path) -> Path:
    """The server's programs, copied where the server's user cannot reach them (a virtual env under /root)."""
    home = server_home()
    try:
        _run([str(home / "bin" / "postgres"), "--version"], directory)
    except PermissionError:
        # A wheel's libraries lie beside its package, and are found by a path relative to the programs.
        package = home.parent
        copy = directory / package.name / home.name
        shutil.copytree(home, copy, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, directory / libraries.name)
        return copy / "bin"
    return home / "bin"


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        **server_identity(),
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout.decode()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
