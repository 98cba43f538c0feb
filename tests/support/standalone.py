"""A Spark standalone cluster: a master and workers of PySpark's own package, as processes of their own.

Where the system allows it, workers see an empty folder in the place of the driver's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.support.postgres import free_port
from tests.support.processes import ChildProcess, start

ROOT = Path(__file__).resolve().parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
_SPARK_CLASS = str(SPARK_HOME / "bin/spark-class")
_MASTER = (_SPARK_CLASS, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--webui-port", "0")
_WORKER = (_SPARK_CLASS, "org.apache.spark.deploy.worker.Worker", "--memory", "1g", "--webui-port", "0")
_WITHOUT = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
"""Followed by a folder, and by the command that is to see an empty one there."""


class Standalone:
    """A running master, and the workers that it has."""

    def __init__(self, folder: Path, hidden: Path, environment: Mapping[str, str]) -> None:
        """
        Parameters
        ----------
        folder
            Where each process has a folder of its own.
        hidden
            What workers must not see.
        environment
            What workers get in addition to paths, and executors from them.
        """
        self.workers: list[ChildProcess] = []
        self._folder = folder
        self._environment = environment
        self._without = (*_WITHOUT, str(hidden)) if _can_hide(hidden) else ()
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._master = self._start("master", [*_MASTER, "--port", str(port)])
        self._master.wait_for_line("I have been elected leader")

    def add_worker(self, cores: int = 2) -> ChildProcess:
        """Start a worker, and wait until the master knows it."""
        command = [*self._without, *_WORKER, "--cores", str(cores), "--work-dir", "work", self.url]
        worker = self._start(f"worker-{len(self.workers)}", command)
        self.workers.append(worker)
        worker.wait_for_line("Successfully registered with master")
        return worker

    def close(self) -> None:
        """Kill the processes that are left."""
        for process in [*self.workers, self._master]:
            process.kill_tree()

    def _start(self, name: str, command: list[str]) -> ChildProcess:
        own = self._folder / name
        own.mkdir()
        environment = {
            **{name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ},
            **self._environment,
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        }
        return start(command, environment, self._folder / f"{name}.log", own)


@contextmanager
def standalone(folder: Path, hidden: Path, environment: Mapping[str, str]) -> Iterator[Standalone]:
    """A master without workers; see :class:`Standalone`."""
    folder.mkdir()
    cluster = Standalone(folder, hidden, environment)
    try:
        yield cluster
    finally:
        cluster.close()


def _can_hide(folder: Path) -> bool:
    done = subprocess.run(
        [*_WITHOUT, str(folder), "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0
