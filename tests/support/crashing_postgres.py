"""PostgreSQL server that a test can crash."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.postgres import PostgresServer, start_postgres
from tests.support.postgres_guard import server_identity
from tests.support.waiting import wait_until


class CrashingPostgres:
    """Server that can be crashed and started again."""

    def __init__(self, server: PostgresServer) -> None:
        self.url = server.url
        self._pid_file = server.directory / "data" / "postmaster.pid"
        self._process = psutil.Process(int(self._pid_file.read_text().split()[0]))
        self._command = self._process.cmdline()
        self._log = server.directory / "log"

    def program(self, name: str) -> Path:
        """Return the path of another program of the server's version."""
        return Path(self._command[0]).with_name(name)

    def options(self, *, data: str, port: str) -> list[str]:
        """Return the command that starts a server with the same settings, other data and another port."""
        arguments = list(self._command)
        arguments[arguments.index("-D") + 1], arguments[arguments.index("-p") + 1] = data, port
        return arguments

    def stop(self) -> None:
        """Crash the server: it answers nobody, and flushes nothing."""
        children = self._process.children()
        self._process.send_signal(3)  # SIGQUIT: PostgreSQL's immediate shutdown
        wait_until(
            lambda: not any(map(_is_running, [self._process, *children])),
            30,
            "the server's processes have exited",
        )
        self._pid_file.unlink(missing_ok=True)

    def start(self) -> None:
        with self._log.open("ab") as log:
            popen = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", **server_identity()
            )
        self._process = psutil.Process(popen.pid)
        self._popen = popen

    def wait(self) -> None:
        if _is_running(self._process):
            self.stop()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def crashing_postgres(**settings: str) -> Iterator[CrashingPostgres]:
    guarded = start_postgres(**settings)
    server = CrashingPostgres(guarded)
    yield server
    server.wait()
    guarded.stop()
