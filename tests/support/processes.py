"""Child processes that a test can kill with everything they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.forking import MARK
from tests.support.programs import ForkedProgram, can_be_forked
from tests.support.waiting import wait_until


class ChildProcess:
    """A Python program with its JVM and Python workers; its output, both streams together, is in `log`."""

    def __init__(self, popen: subprocess.Popen[bytes] | ForkedProgram, mark: str, log: Path) -> None:
        self.popen = popen
        self.mark = mark
        self.log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self.popen.poll()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = 120) -> int:
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self._tail()}") from None

    def wait_for_line(self, text: str, timeout: float = 120) -> str:
        """The first whole line of output that contains `text`."""

        def line() -> str | None:
            ended = self.returncode is not None  # read after this, so that a last line is not missed
            for candidate in self.output.splitlines(keepends=True):
                if text in candidate and (ended or candidate.endswith("\n")):
                    return candidate.rstrip("\n")
            if ended:
                raise AssertionError(
                    f"ended with {self.returncode} before it printed {text!r}:\n{self._tail()}"
                )
            return None

        try:
            found = wait_until(line, timeout, f"a line with {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._tail()}") from None
        assert found is not None
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything alive that this child started, itself included, orphans of a driver that died included.

        Parentage does not tell: a dead driver's JVM belongs to init. The environment is inherited and does.
        """
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def kill_tree(self) -> None:
        """SIGKILL the driver, its JVM and its Python workers, all of them, and wait until they are gone.

        They are stopped first, so that none of them sees another one die, or starts a new one meanwhile.
        """
        self.stop_tree()
        for process in self.processes():
            _send(process, signal.SIGKILL)
        self.popen.wait(30)
        wait_until(lambda: not self.processes(), 30, "every killed process is gone")

    def stop_tree(self) -> None:
        """SIGSTOP the driver, its JVM and its Python workers.

        Spark's daemon makes a process group of its own: a signal to the driver's would miss the workers.
        """
        stopped: set[int] = set()
        while fresh := [process for process in self.processes() if process.pid not in stopped]:
            for process in fresh:
                _send(process, signal.SIGSTOP)
                stopped.add(process.pid)

    def continue_tree(self) -> None:
        """SIGCONT what ``stop_tree`` has stopped."""
        for process in self.processes():
            _send(process, signal.SIGCONT)

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.pid == self.pid or process.environ().get(MARK) == self.mark
        except psutil.Error:
            return False

    def _tail(self, lines: int = 60) -> str:
        return "\n".join(self.output.splitlines()[-lines:])


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def run_child(
    script_or_module: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    log: Path,
    fresh: bool = False,
) -> ChildProcess:
    """Start a script (a path, or a name that ends in .py) or a module (``python -m``) with this interpreter.

    `env` is added to this process's environment; output goes to the file `log`. The caller kills it: use the
    `run_child` fixture, which does so at the end of the test.
    """
    target = str(script_or_module)
    program = [target] if target.endswith(".py") else ["-m", target]
    command = [sys.executable, "-u", *program, *map(str, args)]
    return start(command, {**os.environ, **(env or {})}, log, fresh=fresh)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path | None = None,
    *,
    fresh: bool = False,
) -> ChildProcess:
    """Start any program, in a folder, with just this environment.

    A Python program is forked if it can be (`tests.support.programs`). One that is to import all its modules
    itself has to be `fresh`.
    """
    mark = uuid.uuid4().hex
    marked = {**environment, MARK: mark}
    with log.open("ab") as out, open(os.devnull, "rb") as nothing:
        popen: subprocess.Popen[bytes] | ForkedProgram
        if not fresh and can_be_forked(command, environment):
            streams = (nothing.fileno(), out.fileno(), out.fileno())
            popen = ForkedProgram(command, str(folder or Path.cwd()), marked, streams)
        else:
            popen = subprocess.Popen(
                command, cwd=folder, stdin=nothing, stdout=out, stderr=subprocess.STDOUT, env=marked
            )
    return ChildProcess(popen, mark, log)
