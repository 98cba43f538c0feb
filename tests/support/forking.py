"""Server that imports the modules that other processes need, and forks them, which saves each half a second.

The server runs only its loop. Each forked process behaves like a Python process that was just started with a
command, except that the modules are already imported: it has the command's arguments, environment, directory
and streams, runs the program as `__main__`, and exits as usual.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.machinery
import io
import os
import runpy
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MARK = "PENSTOCK_TEST_CHILD"
"""The environment variable that marks all processes of a test's child process."""


class ForkServer:
    """Client that starts a fork server. The server exits after this process and all forked processes."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.socket_path = str(Path(tempfile.mkdtemp(prefix="penstock-fork-")) / "socket")
        program = f"from {__name__} import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, self.socket_path, *modules],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"


def main() -> None:
    socket_path, *modules = sys.argv[1:]
    vars(sys.modules["__main__"]).pop("main")
    inherited = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    imported_variables = dict(os.environ.items() - inherited.items())
    gc.collect()
    gc.freeze()
    request = _Server(socket_path).serve()
    if request is not None:
        request.execute(imported_variables)


@dataclass(frozen=True)
class _ForkRequest:
    """Request for a Python process."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]
    last_signal: int

    @classmethod
    def read(cls, connection: socket.socket) -> _ForkRequest | None:
        """Read a request. Return None if the requesting process has exited meanwhile."""
        header, streams, _, _ = socket.recv_fds(connection, 9, 3)
        size = int.from_bytes(header[:8], "big")
        with connection.makefile("rb") as file:
            received = file.read(size)
        if len(header) < 9 or len(received) < size:
            return None
        folder, count, *fields = os.fsdecode(received).split("\0")
        command, variables = fields[: int(count)], fields[int(count) :]
        environment = dict(variable.split("=", 1) for variable in variables)
        return cls(command, folder, environment, streams, header[8])

    def execute(self, imported_variables: Mapping[str, str]) -> None:
        """Run as the requested process.

        `imported_variables` are environment variables that modules set when they were imported.
        """
        for number, file in enumerate(self.streams):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update({**imported_variables, **self.environment})
        if MARK in self.environment:
            _write_mark(self.environment[MARK])
        time.tzset()
        os.chdir(self.folder)
        sys.orig_argv[:] = self.command
        arguments = self.command[1:]
        unbuffered = arguments[0] == "-u"
        _open_streams(unbuffered or bool(self.environment.get("PYTHONUNBUFFERED")))
        code = None
        try:
            _run(arguments[1:] if unbuffered else arguments)
        except SystemExit as end:
            code = end.code
            if code is not None and not isinstance(code, int):
                raise
        _exit(code or 0)


def _write_mark(mark: str) -> None:
    """Write the mark into the initial environment of this process.

    Other processes read it there, also for processes that this one forks.
    """
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    start_environment = (ctypes.c_char * (end - begin)).from_address(begin)
    prefix, name, _ = start_environment.raw.partition(f"{MARK}=".encode())
    offset = len(prefix) + len(name)
    start_environment[offset : offset + len(mark)] = mark.encode()


def _open_streams(unbuffered: bool) -> None:
    """Open the standard streams as Python does when it starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        original = getattr(sys, f"__{name}__")
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        raw_text = unbuffered and number > 0
        buffer = raw if raw_text else io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        stream = io.TextIOWrapper(
            buffer,  # type: ignore[arg-type]  # Python itself uses a raw file here
            original.encoding,
            original.errors,
            line_buffering=not raw_text and (number == 2 or os.isatty(number)),
            write_through=raw_text,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(arguments: list[str]) -> None:
    """Run a module (`-m`) or a script as `__main__`."""
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    script = os.path.abspath(arguments[0])
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    main_module = vars(sys.modules["__main__"])
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main_module.update(__file__=script, __loader__=loader, __cached__=None)
    exec(compile(Path(script).read_bytes(), script, "exec"), main_module)


def _exit(code: int) -> None:
    """Exit as Python does, but without finalizing the imported modules, which would take longest."""
    threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing calls it, too
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        sys.exit(code)  # Python reports the error
    os._exit(code & 0xFF)


@dataclass(frozen=True)
class _Fork:
    process: int
    connection: socket.socket
    end: int
    """A file descriptor that becomes readable when the process has exited."""

    def close(self) -> None:
        self.connection.close()
        os.close(self.end)


class _Server:
    def __init__(self, socket_path: str) -> None:
        self._folder = Path(socket_path).parent
        self._forks: set[_Fork] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_path)
        self._listener.listen(64)
        self._register(self._listener, self._fork)
        self._register(sys.stdin.fileno(), self._stop)
        self._open = True
        print("ready", flush=True)

    def serve(self) -> _ForkRequest | None:
        """Serve requests.

        Return the request in each forked process, and None in this one when it is no longer needed.
        """
        while self._open or self._forks:
            # Handle one event at a time, because it may close the file of another one.
            for key, _ in self._selector.select()[:1]:
                request: _ForkRequest | None = key.data()
                if request is not None:
                    return request
        return None

    def _register(self, file: socket.socket | int, action: Callable[[], _ForkRequest | None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, action)

    def _stop(self) -> None:
        """Stop, because the process that started this one has exited."""
        self._selector.unregister(sys.stdin.fileno())
        self._selector.unregister(self._listener)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._open = False

    def _fork(self) -> _ForkRequest | None:
        connection, _ = self._listener.accept()
        request = _ForkRequest.read(connection)
        if request is None:
            connection.close()
            return None
        process = os.fork()
        if process == 0:
            for file in (self._selector, self._listener, connection, *self._forks):
                file.close()
            return request
        for stream in request.streams:
            os.close(stream)
        _send_number(connection, process)
        fork = _Fork(process, connection, os.pidfd_open(process))
        self._forks.add(fork)
        self._register(fork.connection, partial(self._kill_abandoned, fork, request.last_signal))
        self._register(fork.end, partial(self._report_exit, fork))
        return None

    def _kill_abandoned(self, fork: _Fork, last_signal: int) -> None:
        self._selector.unregister(fork.connection)
        os.kill(fork.process, last_signal)

    def _report_exit(self, fork: _Fork) -> None:
        _, status = os.waitpid(fork.process, 0)
        _send_number(fork.connection, os.waitstatus_to_exitcode(status))
        self._selector.unregister(fork.end)
        with suppress(KeyError):
            self._selector.unregister(fork.connection)
        fork.close()
        self._forks.remove(fork)


def _send_number(connection: socket.socket, number: int) -> None:
    with suppress(OSError):
        connection.sendall(number.to_bytes(4, "big", signed=True))
