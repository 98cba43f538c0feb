"""What a Python worker of Spark's has imported is no garbage.

Before a worker takes its next task it looks for garbage among everything it holds (pyspark/daemon.py, Spark 4.2 and 4.3). With
Arrow and pandas that takes 40 ms and more, since a worker that was forked copies the pages it looks at, and the next
micro-batch waits for it.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import cache

from pyspark import SparkContext, TaskContext
from pyspark.sql import SparkSession

from penstock.errors import MissingDependency
from penstock.spark.internals.sessions import is_classic, is_local


def spare_imports() -> None:
    """Let the collector of this worker look only at what comes from now on; elsewhere than in a task nothing happens."""
    if TaskContext.get() is not None:
        _freeze()


@cache
def _freeze() -> None:
    gc.freeze()


# ---- workers: Whether the Pythons that run Spark's tasks have what they need, found out before they fail in silence.

_NEEDS = ("penstock", "pyarrow")
_PROBE = "import importlib.util as u, sys; print(','.join(n for n in sys.argv[1:] if u.find_spec(n) is None))"


def check_workers(spark: SparkSession) -> None:
    """Fail at once when executors' Python lacks a package; Spark itself would be silent for a while first.

    Only classic sessions tell which Python that is.

    Raises
    ------
    MissingDependency
        Naming the Python and what it lacks.
    """
    if not is_classic(spark):
        return
    context = spark.sparkContext
    python = str(context.pythonExec)
    lacking = _local(python) if is_local(str(context.master)) else _remote(context.applicationId)
    if lacking:
        raise MissingDependency(
            f"the Python of Spark's workers ({python}) lacks {', '.join(lacking)}: pip install 'penstock[spark]' there, or set "
            "PYSPARK_PYTHON to a Python that has it before the session starts (spark.pyspark.python with spark-submit)",
            python=python,
            missing=lacking,
        )


@cache
def _local(python: str) -> tuple[str, ...]:
    if python == sys.executable:
        return ()
    command = [python, "-c", _PROBE, *_NEEDS]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependency(
            f"the Python of Spark's workers ({python}) cannot be run ({type(error).__name__}): set PYSPARK_PYTHON to one "
            "that can before the session starts",
            python=python,
        ) from error
    return tuple(name for name in found.stdout.strip().split(",") if name)


@cache
def _remote(_application: str) -> tuple[str, ...]:
    """Ask one executor; the task needs nothing but the standard library."""

    def probe(_rows: object) -> list[str]:
        from importlib.util import find_spec

        return [name for name in ("penstock", "pyarrow") if find_spec(name) is None]

    context = SparkContext.getOrCreate()
    return tuple(context.parallelize([0], 1).mapPartitions(probe).collect())
