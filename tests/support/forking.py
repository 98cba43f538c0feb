"""A process that imports what others need and forks them, so that each saves half a second of imports.

It runs no Python code but its one loop. Each process that it forks goes on as a Python that has just been
started with a command would, but that those modules are imported already: with the command's arguments,
environment, directory and streams, in `__main__`, and with the usual end.
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
"""The variable that all processes of one test's child have in common."""


class Forker:
    """The process that forks, from the one that has started it, with which it ends: after all its forks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.where = str(Path(tempfile.mkdtemp(prefix="penstock-fork-")) / "socket")
        program = f"from {__name__} import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, self.where, *modules],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"


def main() -> None:
    where, *modules = sys.argv[1:]
    vars(sys.modules["__main__"]).pop("main")
    inherited = dict(os.environ)
    for name in modules:
        importlib.import_module(name)
    added = dict(os.environ.items() - inherited.items())
    gc.collect()
    gc.freeze()
    order = _Server(where).serve()
    if order is not None:
        order.carry_out(added)


@dataclass(frozen=True)
class _Order:
    """A Python process to be."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]
    last_signal: int

    @classmethod
    def read(cls, connection: socket.socket) -> _Order | None:
        """None from a process that has ended meanwhile."""
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

    def carry_out(self, added: Mapping[str, str]) -> None:
        """Be that process; `added` are variables that modules have set while they were imported."""
        for number, file in enumerate(self.streams):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update({**added, **self.environment})
        if MARK in self.environment:
            _show_mark(self.environment[MARK])
        time.tzset()
        os.chdir(self.folder)
        sys.orig_argv[:] = self.command
        words = self.command[1:]
        unbuffered = words[0] == "-u"
        _open_streams(unbuffered or bool(self.environment.get("PYTHONUNBUFFERED")))
        code = None
        try:
            _run(words[1:] if unbuffered else words)
        except SystemExit as end:
            code = end.code
            if code is not None and not isinstance(code, int):
                raise
        _end(code or 0)


def _show_mark(mark: str) -> None:
    """Put the mark into what this process's environment was when it started.

    Others see it there, and in processes that this one forks.
    """
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    start_environment = (ctypes.c_char * (end - begin)).from_address(begin)
    before, name, _ = start_environment.raw.partition(f"{MARK}=".encode())
    place = len(before) + len(name)
    start_environment[place : place + len(mark)] = mark.encode()


def _open_streams(unbuffered: bool) -> None:
    """Open the standard streams as Python does when it starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        like = getattr(sys, f"__{name}__")
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        raw_text = unbuffered and number > 0
        buffer = raw if raw_text else io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        stream = io.TextIOWrapper(
            buffer,  # type: ignore[arg-type]  # Python itself has a raw file there
            like.encoding,
            like.errors,
            line_buffering=not raw_text and (number == 2 or os.isatty(number)),
            write_through=raw_text,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> None:
    """Run a module (`-m`) or a script as the main one."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    script = os.path.abspath(words[0])
    sys.argv[:] = words
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    main_module = vars(sys.modules["__main__"])
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main_module.update(__file__=script, __loader__=loader, __cached__=None)
    exec(compile(Path(script).read_bytes(), script, "exec"), main_module)


def _end(code: int) -> None:
    """End as Python does, but leave what has been imported as it is: that would take longer than the rest."""
    threading._shutdown()  # type: ignore[attr-defined]  # so does multiprocessing
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        sys.exit(code)  # Python knows what to say
    os._exit(code & 0xFF)


@dataclass(frozen=True)
class _Fork:
    process: int
    connection: socket.socket
    end: int
    """A file that can be read when the process has ended."""

    def close(self) -> None:
        self.connection.close()
        os.close(self.end)


class _Server:
    def __init__(self, where: str) -> None:
        self._folder = Path(where).parent
        self._forks: set[_Fork] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(where)
        self._listener.listen(64)
        self._on(self._listener, self._fork)
        self._on(sys.stdin.fileno(), self._stop)
        self._open = True
        print("ready", flush=True)

    def serve(self) -> _Order | None:
        """Returns in each process that is forked; and None in this one, when it has no use any more."""
        while self._open or self._forks:
            # One at a time: it may be the end of another one.
            for key, _ in self._selector.select()[:1]:
                order: _Order | None = key.data()
                if order is not None:
                    return order
        return None

    def _on(self, file: socket.socket | int, action: Callable[[], _Order | None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, action)

    def _stop(self) -> None:
        """The process that has started this one has ended."""
        self._selector.unregister(sys.stdin.fileno())
        self._selector.unregister(self._listener)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._open = False

    def _fork(self) -> _Order | None:
        connection, _ = self._listener.accept()
        order = _Order.read(connection)
        if order is None:
            connection.close()
            return None
        process = os.fork()
        if process == 0:
            for file in (self._selector, self._listener, connection, *self._forks):
                file.close()
            return order
        for stream in order.streams:
            os.close(stream)
        _answer(connection, process)
        fork = _Fork(process, connection, os.pidfd_open(process))
        self._forks.add(fork)
        self._on(fork.connection, partial(self._abandoned, fork, order.last_signal))
        self._on(fork.end, partial(self._ended, fork))
        return None

    def _abandoned(self, fork: _Fork, last_signal: int) -> None:
        self._selector.unregister(fork.connection)
        os.kill(fork.process, last_signal)

    def _ended(self, fork: _Fork) -> None:
        _, status = os.waitpid(fork.process, 0)
        _answer(fork.connection, os.waitstatus_to_exitcode(status))
        self._selector.unregister(fork.end)
        with suppress(KeyError):
            self._selector.unregister(fork.connection)
        fork.close()
        self._forks.remove(fork)


def _answer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):
        connection.sendall(number.to_bytes(4, "big", signed=True))
