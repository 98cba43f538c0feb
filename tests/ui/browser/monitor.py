"""A real `penstock ui` over a real store, in a separate process."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.processes import ChildProcess, run_child
from tests.support.waiting import wait_until

PROGRAM = Path(__file__).with_name("soon_stuck.py")


class Monitor:
    """Answers at one address, however often it is stopped and started."""

    def __init__(self, store_url: str, log: Path) -> None:
        self._store_url = store_url
        self._log = log
        self._port = free_port()
        self._child: ChildProcess | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        words = ("--url", self._store_url, "--port", self._port, "--every", 0.2)
        self._child = run_child(PROGRAM, *words, log=self._log)
        wait_until(self._answers, 30, f"penstock ui answers\n{self._log.read_text()}")

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill_tree()
            self._child = None

    def _answers(self) -> bool:
        assert self._child is not None
        assert self._child.returncode is None, self._child.output
        try:
            with urllib.request.urlopen(f"{self.address}api/snapshot", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
