"""The streaming job as a child process that the demo starts, kills and waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from examples.flights import DemoError

BEGIN = "begin\n"
"""The line on standard input on which a job starts its queries. At the end of the input it exits."""
_PROGRESS = "demo: "
_TIMEOUT_SECONDS, _REPORT_SECONDS = 600, 10


class JobProcess:
    """A process group of the job's driver, its JVM and its Python workers, which a ``with`` block ends.

    It starts Spark at once, and its queries on `begin`.

    Parameters
    ----------
    on_progress
        Receives each line of progress that the job prints.
    """

    def __init__(self, url: str, checkpoints: Path, on_progress: Callable[[str], None]) -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        self._log = checkpoints.parent / "job.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "examples.flights.streaming_job", url, str(checkpoints)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        threading.Thread(target=self._read_output, args=[on_progress], daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()

    def begin(self) -> None:
        """Start the queries."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(BEGIN)
            self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL to the whole process group."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the running job has made a condition true."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not condition():
            if self._process.poll() is not None:
                raise DemoError(f"The streaming job ended before it was killed. See {self._log}.")
            if time.monotonic() > deadline:
                raise DemoError(f"The streaming job made too little progress in {_TIMEOUT_SECONDS} s.")
            time.sleep(0.05)

    def wait(self, report: Callable[[], None]) -> None:
        """Wait for the job to succeed, and call `report` every ten seconds meanwhile."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while (code := self._exit_code(_REPORT_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise DemoError(
                    f"The streaming job did not end within {_TIMEOUT_SECONDS} s. See {self._log}."
                )
            report()
        if code:
            raise DemoError(f"The streaming job ended with exit code {code}. See {self._log}.")

    def _exit_code(self, timeout: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def _read_output(self, on_progress: Callable[[str], None]) -> None:
        # The other lines on its standard output are Spark's.
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_PROGRESS):
                on_progress(line.removeprefix(_PROGRESS).rstrip())


def report_progress(text: str) -> None:
    """Print a line of progress, in the job."""
    print(f"{_PROGRESS}{text}", flush=True)
