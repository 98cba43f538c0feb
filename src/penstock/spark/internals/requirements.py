"""Requirements on a session's Spark version and on the Python of its workers, checked when the session is
registered.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache

from pyspark import SparkContext
from pyspark.sql import SparkSession

from penstock.errors import MissingDependency
from penstock.spark.internals.sessions import is_classic, is_local

SUPPORTED = ((4, 2), (4, 3))
"""The versions of Spark whose private API ``penstock.spark.internals`` knows."""
_VERSION = re.compile(r"(\d+)\.(\d+)")
_WORKER_PACKAGES = ("penstock", "pyarrow")
_PROBE = "import importlib.util as u, sys; print(','.join(n for n in sys.argv[1:] if u.find_spec(n) is None))"


def parse_version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version, such as 4.3 of ``4.3.0``.

    Vendors append names of their own.
    """
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_version(spark: SparkSession) -> None:
    """Refuse an unknown version of Spark, where code on its private API could go wrong without an error.

    Raises
    ------
    MissingDependency
        SPARK_VERSION.
    """
    if parse_version(spark.version) in SUPPORTED:
        return
    known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    lowest, (major, minor) = SUPPORTED[0], SUPPORTED[-1]
    raise MissingDependency(
        f"this session runs Spark {spark.version}, and this version of Penstock works with Spark {known}: "
        f"install 'pyspark>={lowest[0]}.{lowest[1]},<{major}.{minor + 1}', or a newer Penstock",
        condition="MISSING_DEPENDENCY.SPARK_VERSION",
        version=spark.version,
    )


def check_workers(spark: SparkSession) -> None:
    """Refuse a session whose workers' Python lacks a package; Spark itself reports that only after a while.

    Only classic sessions say which Python that is.

    Raises
    ------
    MissingDependency
        With the Python and the missing packages.
    """
    if not is_classic(spark):
        return
    context = spark.sparkContext
    python = str(context.pythonExec)
    is_on_this_machine = is_local(str(context.master))
    missing = _missing_here(python) if is_on_this_machine else _missing_on_executor(context.applicationId)
    if missing:
        raise MissingDependency(
            f"the Python of Spark's workers ({python}) lacks {', '.join(missing)}: pip install "
            "'penstock[spark]' there, or set PYSPARK_PYTHON to a Python that has it before the session "
            "starts (spark.pyspark.python with spark-submit)",
            python=python,
            missing=missing,
        )


@cache
def _missing_here(python: str) -> tuple[str, ...]:
    if python == sys.executable:
        return ()
    command = [python, "-c", _PROBE, *_WORKER_PACKAGES]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependency(
            f"the Python of Spark's workers ({python}) cannot be run ({type(error).__name__}): "
            "set PYSPARK_PYTHON to one that can before the session starts",
            python=python,
        ) from error
    return tuple(name for name in probe.stdout.strip().split(",") if name)


@cache
def _missing_on_executor(_application: str) -> tuple[str, ...]:
    """Ask one executor, with a task that needs the standard library only."""

    def probe(_rows: object) -> list[str]:
        from importlib.util import find_spec

        return [name for name in ("penstock", "pyarrow") if find_spec(name) is None]

    context = SparkContext.getOrCreate()
    return tuple(context.parallelize([0], 1).mapPartitions(probe).collect())
