"""The versions of Spark whose private API this room knows."""

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
_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def parse_version(text: str) -> tuple[int, int]:
    """The first two numbers of a version, such as 4.3 of ``4.3.0``; vendors append names of their own."""
    found = _NUMBERS.match(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_version(spark: SparkSession) -> None:
    """Refuse a Spark whose private API is not known: what is built on it could go wrong without an error.

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
        f"this session runs Spark {spark.version}, and this version of Penstock works with Spark {known}: install "
        f"'pyspark>={lowest[0]}.{lowest[1]},<{major}.{minor + 1}', or a newer Penstock",
        condition="MISSING_DEPENDENCY.SPARK_VERSION",
        version=spark.version,
    )


# ---- workers: Requirements on a session's Spark version and on its workers' Python, checked before a query fails for lack of them.

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
