"""What every Python process of the tests does first; it imports nothing that takes long."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # importing it from typing takes a while
if TYPE_CHECKING:
    import _socket
    from collections.abc import Mapping, Sequence

SOCKET = "PENSTOCK_TEST_WARM"
"""The variable that tells the JVM's Pythons where to hand themselves over."""
_STREAMS = (0, 1, 2)
_SIGTERM = 15
_HANDED_OVER = (
    "pyspark.daemon",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "tests.support.daemon",
)


def request_fork(
    where: str,
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    streams: Sequence[int],
    last_signal: int,
) -> _socket.socket:
    """Have the process that listens there fork one that runs a Python command (`tests.support.forking`).

    The answer is its pid, and when it has ended its exit code, which is minus the number of a signal: four
    bytes each. If the connection is closed before, it gets the last signal.
    """
    import _socket

    fields = [folder, str(len(command)), *command]
    fields += [f"{name}={value}" for name, value in environment.items()]
    data = os.fsencode("\0".join(fields))
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(where)
    files = b"".join(file.to_bytes(4, sys.byteorder) for file in streams)
    header = len(data).to_bytes(8, "big") + bytes([last_signal])
    connection.sendmsg([header], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    sent = 0
    while sent < len(data):
        sent += connection.send(data[sent:])
    return connection


def _hand_over(where: str) -> None:
    """Have another process do this one's work, and end with it."""
    environment = {name: value for name, value in os.environ.items() if name != SOCKET}
    connection = request_fork(where, sys.orig_argv, os.getcwd(), environment, _STREAMS, _SIGTERM)
    try:
        while connection.recv(8):
            pass
    finally:
        os._exit(0)


def start() -> None:
    """Does not return in a process whose work another one has done (`tests.support.warm` says why)."""
    # Most processes do little but import, and look through what they import for garbage again and again.
    gc.set_threshold(10_000)
    where = os.environ.get(SOCKET)
    if where is not None and sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] in _HANDED_OVER:
        _hand_over(where)
    # Spark puts archives in front of the path of its Python workers: its own code, which has no bytecode
    # there. The installed packages are the same code; compiling it anew takes each process most of a second.
    sys.path[:] = [path for path in sys.path if not path.endswith((".zip", ".jar"))]
    if "PENSTOCK_TEST_PAYLOADS" in os.environ:
        from tests.support.payloads_everywhere import install

        install()
