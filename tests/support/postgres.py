"""Runs a real PostgreSQL server for tests, without root privileges, Docker or a system package."""

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
_SCRAM_ITERATIONS_VERSION = 160_000
"""The first version in which the cost of password hashes can be configured."""


@dataclass(frozen=True)
class PostgresServer:
    """Running server, and the guard process that stops it."""

    url: str
    directory: Path
    guard: subprocess.Popen[bytes]

    def stop(self) -> None:
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        self.guard.wait(30)


def start_postgres(*, fsync: bool = False, **settings: str) -> PostgresServer:
    """Create a cluster in a temporary directory, and serve it on a free port of 127.0.0.1.

    Without ``fsync``, it survives a crash of its processes but not a power failure. ``settings`` override
    SETTINGS.

    It uses TCP with a password, so that executors and child processes in other working directories can
    connect, and because users' URLs have a password.
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
    options = [
        argument for name, value in (SETTINGS | settings).items() for argument in ("-c", f"{name}={value}")
    ]
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
        _reduce_hash_cost(server)
    except BaseException:
        server.stop()
        raise
    return server


def _reduce_hash_cost(server: PostgresServer) -> None:
    """Make logins fast, because the tests open thousands of connections."""
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        if connection.info.server_version >= _SCRAM_ITERATIONS_VERSION:
            connection.execute("SET scram_iterations = 1")
            connection.execute(f"ALTER ROLE penstock PASSWORD '{connection.info.password}'".encode())


def _started(server: PostgresServer, log: Path) -> bool:
    if server.guard.poll() is not None:
        raise AssertionError(f"PostgreSQL did not start:\n{log.read_text()}")
    return answers(server.url)


def answers(url: str) -> bool:
    """Return whether a server or a pooler accepts connections."""
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _binaries(directory: Path) -> Path:
    """Return the folder of the server's programs, copied if its user cannot read them (as under /root)."""
    home = server_home()
    try:
        _run([str(home / "bin" / "postgres"), "--version"], directory)
    except PermissionError:
        # A wheel's libraries are next to its package. The programs find them by a relative path.
        package = home.parent
        copy = directory / package.name / home.name
        shutil.copytree(home, copy, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, directory / libraries.name)
        return copy / "bin"
    return home / "bin"


def _run(command: list[str], directory: Path) -> None:
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        **server_identity(),
        check=False,
    )
    assert result.returncode == 0, f"{command[0]} ended with {result.returncode}:\n{result.stdout.decode()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
