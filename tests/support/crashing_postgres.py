"""A PostgreSQL server that crashes when a test asks it to."""

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
    """A server that can be stopped hard and started again."""

    def __init__(self, server: PostgresServer) -> None:
        self.url = server.url
        self._pid_file = server.directory / "data" / "postmaster.pid"
        self._process = psutil.Process(int(self._pid_file.read_text().split()[0]))
        self._command = self._process.cmdline()
        self._log = server.directory / "log"

    def program(self, name: str) -> Path:
        """The path of another program of the server's version."""
        return Path(self._command[0]).with_name(name)

    def options(self, *, data: str, port: str) -> list[str]:
        """The command that starts a server like this one, with other data at another port."""
        words = list(self._command)
        words[words.index("-D") + 1], words[words.index("-p") + 1] = data, port
        return words

    def stop(self) -> None:
        """As in a crash: nobody gets an answer, nothing is written in order."""
        children = self._process.children()
        self._process.send_signal(3)  # SIGQUIT: PostgreSQL's immediate shutdown
        wait_until(lambda: not any(map(_runs, [self._process, *children])), 30, "the server is gone")
        self._pid_file.unlink(missing_ok=True)

    def start(self) -> None:
        with self._log.open("ab") as log:
            popen = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", **server_identity()
            )
        self._process = psutil.Process(popen.pid)
        self._popen = popen

    def wait(self) -> None:
        if _runs(self._process):
            self.stop()


def _runs(process: psutil.Process) -> bool:
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
