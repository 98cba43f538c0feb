"""Python programs that a test starts, forked from a process that has imported what most of them need."""

from __future__ import annotations

import functools
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.support.forking import MARK, Forker
from tests.support.starting import request_fork

USUAL = (
    "importlib.metadata",
    "pandas",
    "penstock.cli.app",
    "penstock.cli.text_output",
    "penstock.pump.pump",
    "penstock.spark.data_source",
    "penstock.store.postgres.database",
    "penstock.ui.reading",
    "pyarrow.compute",
    "pyspark.sql.streaming",
    "tests.support.sparks",
    "tests.support.warm",
    "typer._adapters",
)
_READ_LATER = re.compile(
    r"PENSTOCK_(?!TEST_PAYLOADS$)|PYTEST_|PYSPARK_(DRIVER_)?PYTHON$|SPARK_(AUTH_SOCKET_TIMEOUT|BUFFER_SIZE)$"
)
"""Variables that are read when they are needed, not when a module is imported or Python starts."""


class ForkedProgram:
    """Like the `subprocess.Popen` of the same command, but that the program is killed when this is gone."""

    def __init__(
        self, command: Sequence[str], folder: str, environment: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        connection = request_fork(_forker().where, command, folder, environment, streams, signal.SIGKILL)
        self._connection = socket.socket(fileno=connection.detach())
        self.args = command
        self.pid = _number(self._connection.recv(4))

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal; None while the program runs."""
        try:
            return _number(self._connection.recv(4, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        ending = select.poll()
        ending.register(self._connection, select.POLLIN)
        ending.poll(None if timeout is None else timeout * 1000)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_be_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether it is a Python module or script without options that imports what it would import here.

    A variable that may be read at an import, or by Python itself, has to be as it was when the first program
    was forked.
    """
    words = command[1:]
    if words[:1] == ["-u"]:
        words = words[1:]
    if command[0] != sys.executable or not words:
        return False
    if not (words[0].endswith(".py") or words[0] == "-m"):
        return False
    changed = environment.items() ^ _forker().environment.items()
    return all(_READ_LATER.match(name) for name, _ in changed)


@functools.cache
def _forker() -> Forker:
    """One for each process that runs tests."""
    # Each program that is forked puts its own mark there.
    return Forker(USUAL, os.environ | {MARK: "-" * 32})


def _number(answer: bytes) -> int:
    assert len(answer) == 4, "the process that forks programs has ended"
    return int.from_bytes(answer, "big", signed=True)
