"""Child processes that a test can kill with all processes that they started."""

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
    """Python program with its JVM and Python workers. Standard output and error both go to `log`."""

    def __init__(self, popen: subprocess.Popen[bytes] | ForkedProgram, mark: str, log: Path) -> None:
        self.popen = popen
        self.mark = mark
        self.log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of a signal. It is None while the program runs."""
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
        """Wait for a whole line of output that contains `text`, and return it."""

        def line() -> str | None:
            ended = self.returncode is not None  # before reading the output, so that no last line is missed
            for candidate in self.output.splitlines(keepends=True):
                if text in candidate and (ended or candidate.endswith("\n")):
                    return candidate.rstrip("\n")
            if ended:
                raise AssertionError(
                    f"ended with {self.returncode} before it printed {text!r}:\n{self._tail()}"
                )
            return None

        try:
            matching = wait_until(line, timeout, f"a line with {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._tail()}") from None
        assert matching is not None
        return matching

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this child: itself and all that it started, including orphans.

        They are identified by the inherited environment, because init adopts the JVM of a dead driver.
        """
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def kill_tree(self) -> None:
        """Kill the driver, its JVM and its Python workers with SIGKILL, and wait until they have exited.

        They are stopped first, so that none of them notices that another one died, or starts a new process.
        """
        self.stop_tree()
        for process in self.processes():
            _send(process, signal.SIGKILL)
        self.popen.wait(30)
        wait_until(lambda: not self.processes(), 30, "all killed processes have exited")

    def stop_tree(self) -> None:
        """Stop the driver, its JVM and its Python workers with SIGSTOP.

        Spark's daemon creates its own process group, so a signal to the driver's would miss the workers.
        """
        stopped: set[int] = set()
        while running := [process for process in self.processes() if process.pid not in stopped]:
            for process in running:
                _send(process, signal.SIGSTOP)
                stopped.add(process.pid)

    def continue_tree(self) -> None:
        """Resume the processes that ``stop_tree`` has stopped."""
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

    `env` is added to this process's environment, and output goes to the file `log`. The caller must kill the
    child. The fixture `run_child` does so at the end of the test.
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
    """Start a program in a folder, with exactly this environment.

    A Python program is forked if possible (`tests.support.programs`). Pass `fresh` if it must import its
    modules itself.
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
