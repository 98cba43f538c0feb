"""Python programs of tests, forked from a process that has already imported what most of them need."""

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

from tests.support.forking import MARK, ForkServer
from tests.support.starting import request_fork

PRELOADED = (
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
"""Variables that are not read when Python starts or imports a module, but when they are needed."""


class ForkedProgram:
    """Replacement for `subprocess.Popen` whose program is killed when this object is deleted."""

    def __init__(
        self, command: Sequence[str], folder: str, environment: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        connection = request_fork(
            _fork_server().socket_path, command, folder, environment, streams, signal.SIGKILL
        )
        self._connection = socket.socket(fileno=connection.detach())
        self.args = command
        self.pid = _decode_number(self._connection.recv(4))

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal. It is None while the program runs."""
        try:
            return _decode_number(self._connection.recv(4, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.poll(None if timeout is None else timeout * 1000)
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
    """Return whether a command is a Python module or script that runs in a fork as it would run on its own.

    It must have no options for Python. Variables that are read by Python or at an import must have the values
    that they had when the first program was forked.
    """
    arguments = command[1:]
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if command[0] != sys.executable or not arguments:
        return False
    if not (arguments[0].endswith(".py") or arguments[0] == "-m"):
        return False
    changed = environment.items() ^ _fork_server().environment.items()
    return all(_READ_LATER.match(name) for name, _ in changed)


@functools.cache
def _fork_server() -> ForkServer:
    """Return the fork server of this test process."""
    # Each forked program overwrites the mark with its own.
    return ForkServer(PRELOADED, os.environ | {MARK: "-" * 32})


def _decode_number(data: bytes) -> int:
    assert len(data) == 4, "the fork server has exited"
    return int.from_bytes(data, "big", signed=True)
