"""The streaming job as a process of its own: started, begun, killed, waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import QueryFailed

BEGIN = "begin\n"
"""What a job waits for on its standard input. When that ends, the demo has ended, and so does the job."""
_TOLD = "demo: "
_SECONDS, _LOOK_SECONDS = 600, 10


class Job:
    """A process group: the driver, its JVM and the workers.

    It starts Spark at once, and its queries when it is told to begin.

    Parameters
    ----------
    tell
        Where what it says of its progress goes.
    """

    def __init__(self, url: str, checkpoints: Path, tell: Callable[[str], None]) -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        self._log = checkpoints.parent / "job.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.demo.job", url, str(checkpoints)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )
        threading.Thread(target=self._listen, args=[tell], daemon=True).start()

    def begin(self) -> None:
        """Start the queries."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(BEGIN)
            self._process.stdin.flush()

    def _ended(self, timeout: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def _listen(self, tell: Callable[[str], None]) -> None:
        # What else is printed there is Spark's.
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_TOLD):
                tell(line.removeprefix(_TOLD).rstrip())

    def kill(self) -> None:
        """SIGKILL for all of it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """It does not outlive the demo."""
        if self._process.poll() is None:
            self.kill()

    def wait_until(self, there: Callable[[], bool]) -> None:
        """Wait for something that the running job does.

        Raises
        ------
        QueryFailed
            When it ends before, or takes too long.
        """
        deadline = time.monotonic() + _SECONDS
        while not there():
            if self._process.poll() is not None:
                raise QueryFailed(f"the streaming job ended by itself, before it was killed: see {self._log}")
            if time.monotonic() > deadline:
                raise QueryFailed(f"the streaming job made too little progress in {_SECONDS} s")
            time.sleep(0.05)

    def finish(self, look: Callable[[], None]) -> None:
        """Wait for its end, with a look at what it does every ten seconds.

        Raises
        ------
        QueryFailed
            When it fails.
        """
        deadline = time.monotonic() + _SECONDS
        while (code := self._ended(_LOOK_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise QueryFailed(f"the streaming job did not end within {_SECONDS} s: see {self._log}")
            look()
        if code:
            raise QueryFailed(f"the streaming job ended with exit code {code}: see {self._log}")


def tell(text: str) -> None:
    """Say, in a job, what it is about to do."""
    print(f"{_TOLD}{text}", flush=True)


@contextmanager
def running(url: str, checkpoints: Path, tell: Callable[[str], None]) -> Iterator[Job]:
    """A job for the time of a block."""
    job = Job(url, checkpoints, tell)
    try:
        yield job
    finally:
        job.close()
