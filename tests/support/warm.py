"""Python processes that Spark's driver starts one by one, forked from one that has imported what they need.

For each streaming query, and for each kind of work on a data source, the JVM starts a Python that imports
PySpark, Arrow and Penstock: half a second of a core, a third of all that most tests cost. Here that Python
hands itself over as soon as it starts (`tests.support.starting`): its command, environment, directory and
files go to a process that forks one which goes on as it would have. It only waits for that one's end, and
takes it along when it is ended itself.

What it forks has its mark in the environment, and so belongs to the child process of a test that it was
started by.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.starting import SOCKET

USUAL = (
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyarrow.compute",
    "penstock.spark.data_source",
    "penstock.changes.data_source",
)


@contextmanager
def warm_workers() -> Iterator[None]:
    """The JVM that is started in this block has its Pythons forked; what forks them ends with this block."""
    where = str(Path(tempfile.mkdtemp(prefix="penstock-warm-")) / "socket")
    forking = subprocess.Popen(
        [sys.executable, "-m", __name__, where],
        # What it forks are workers of Spark's, and what it imports beforehand is to know that.
        env=os.environ | {"SPARK_PYTHON_RUNTIME": "PYTHON_WORKER"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert forking.stdout is not None
    assert forking.stdout.readline() == b"ready\n"
    os.environ[SOCKET] = where
    try:
        yield
    finally:
        del os.environ[SOCKET]


def serve(where: str) -> None:
    """Fork, until this process's standard input ends."""
    for name in USUAL:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("ready", flush=True)
        forker = os.getpid()
        threading.Thread(target=_end_with, args=(sys.stdin.fileno(), forker), daemon=True).start()
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _go_on(connection)
            connection.close()


def _end_with(file: int, process: int) -> None:
    """Read until there is an end."""
    with suppress(OSError):
        while os.read(file, 1):
            pass
    os.kill(process, signal.SIGTERM)


def _go_on(connection: socket.socket) -> None:
    """As the process that has handed itself over."""
    status = 1
    try:
        command, folder, *environment = _received(connection)
        module, *arguments = command.split(" ")
        os.environ.clear()
        os.environ.update(variable.split("=", 1) for variable in environment)
        os.environ.pop(SOCKET)
        time.tzset()
        os.chdir(folder)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.Thread(target=_end_with, args=(connection.fileno(), os.getpid()), daemon=True).start()
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _received(connection: socket.socket) -> list[str]:
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    with connection.makefile("rb", buffering=0) as whole:
        received = b""
        while len(received) < int.from_bytes(size, "big"):
            received += whole.read(1 << 16)
    return os.fsdecode(received).split("\0")


if __name__ == "__main__":
    serve(sys.argv[1])
