"""Spark standalone cluster: a master and workers of the PySpark package, in separate processes.

If the system allows it, workers see an empty folder instead of the driver's.
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
_HIDE_FOLDER = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
"""A command prefix, followed by a folder and by the command that must see it empty."""


class Standalone:
    """Running master and its workers."""

    def __init__(self, folder: Path, hidden: Path, environment: Mapping[str, str]) -> None:
        """
        Parameters
        ----------
        folder
            The parent folder for the folders of the processes.
        hidden
            The folder that workers must not see.
        environment
            Additional environment variables of workers, which executors inherit.
        """
        self.workers: list[ChildProcess] = []
        self._folder = folder
        self._environment = environment
        self._hide_prefix = (*_HIDE_FOLDER, str(hidden)) if _can_hide(hidden) else ()
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._master = self._start("master", [*_MASTER, "--port", str(port)])
        self._master.wait_for_line("I have been elected leader")

    def add_worker(self, cores: int = 2) -> ChildProcess:
        """Start a worker, and wait until it is registered with the master."""
        command = [*self._hide_prefix, *_WORKER, "--cores", str(cores), "--work-dir", "work", self.url]
        worker = self._start(f"worker-{len(self.workers)}", command)
        self.workers.append(worker)
        worker.wait_for_line("Successfully registered with master")
        return worker

    def close(self) -> None:
        """Kill the remaining processes."""
        for process in [*self.workers, self._master]:
            process.kill_tree()

    def _start(self, name: str, command: list[str]) -> ChildProcess:
        folder = self._folder / name
        folder.mkdir()
        environment = {
            **{name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ},
            **self._environment,
            "SPARK_HOME": str(SPARK_HOME),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        }
        return start(command, environment, self._folder / f"{name}.log", folder)


@contextmanager
def standalone(folder: Path, hidden: Path, environment: Mapping[str, str]) -> Iterator[Standalone]:
    """Run a master without workers; see :class:`Standalone`."""
    folder.mkdir()
    cluster = Standalone(folder, hidden, environment)
    try:
        yield cluster
    finally:
        cluster.close()


def _can_hide(folder: Path) -> bool:
    result = subprocess.run(
        [*_HIDE_FOLDER, str(folder), "true"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return result.returncode == 0
