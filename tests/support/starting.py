"""Startup of every Python process of the tests. It imports nothing that takes long."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # importing it from typing takes a while
if TYPE_CHECKING:
    import _socket
    from collections.abc import Mapping, Sequence

SOCKET = "PENSTOCK_TEST_WARM"
"""The environment variable with the socket of the fork server for Python processes of the JVM."""
_STREAMS = (0, 1, 2)
_SIGTERM = 15
_DELEGATED = (
    "pyspark.daemon",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "tests.support.daemon",
)


def request_fork(
    socket_path: str,
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    streams: Sequence[int],
    last_signal: int,
) -> _socket.socket:
    """Ask a fork server to fork a process that runs a Python command (`tests.support.forking`).

    The server sends the process id, and later the exit code, which is negative for a signal, in four bytes
    each. If the connection is closed before, the server sends the process `last_signal`.
    """
    import _socket

    fields = [folder, str(len(command)), *command]
    fields += [f"{name}={value}" for name, value in environment.items()]
    data = os.fsencode("\0".join(fields))
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(socket_path)
    files = b"".join(file.to_bytes(4, sys.byteorder) for file in streams)
    header = len(data).to_bytes(8, "big") + bytes([last_signal])
    connection.sendmsg([header], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    sent = 0
    while sent < len(data):
        sent += connection.send(data[sent:])
    return connection


def _delegate(socket_path: str) -> None:
    """Delegate this process's work to a forked process, and exit when that one exits."""
    environment = {name: value for name, value in os.environ.items() if name != SOCKET}
    connection = request_fork(socket_path, sys.orig_argv, os.getcwd(), environment, _STREAMS, _SIGTERM)
    try:
        while connection.recv(8):
            pass
    finally:
        os._exit(0)


def start() -> None:
    """Set up this process. Does not return if its work was delegated (see `tests.support.warm`)."""
    # Most processes do little but import, and would repeatedly search the imported modules for garbage.
    gc.set_threshold(10_000)
    socket_path = os.environ.get(SOCKET)
    if socket_path is not None and sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in _DELEGATED:
        _delegate(socket_path)
    # Spark puts archives with its own code first on the path of its Python workers. They have no bytecode,
    # and compiling takes each process most of a second. The installed packages have the same code.
    sys.path[:] = [path for path in sys.path if not path.endswith((".zip", ".jar"))]
    if "PENSTOCK_TEST_PAYLOADS" in os.environ:
        from tests.support.payloads_everywhere import install

        install()
