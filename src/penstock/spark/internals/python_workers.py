"""Spark's Python workers: required packages, access to stores, garbage collection and Arrow types.

Before a worker takes its next task, it runs a full garbage collection (pyspark/daemon.py, Spark 4.2 and 4.3).
With Arrow and pandas, that takes 40 ms or more, because a forked worker copies each memory page that the
collector touches, and the next micro-batch waits for it. So imported modules are excluded. Types are
converted as in PySpark (``pyspark.sql.pandas.types``).
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import cache, lru_cache

import pyarrow as pa
from pyspark import SparkContext, TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType, StructType, _parse_datatype_json_string

from penstock.errors import InvalidOptionError, MissingDependencyError
from penstock.spark.internals.sessions import is_classic, is_local
from penstock.store.url import parse_url

_REUSE_VARIABLE = "SPARK_REUSE_WORKER"
"""The environment variable that makes a worker wait for another task (Spark 4.2, 4.3)."""
_WORKER_PACKAGES = ("penstock", "pyarrow")
_PROBE_PROGRAM = (
    "import importlib.util as u, sys; print(','.join(n for n in sys.argv[1:] if not u.find_spec(n)))"
)


def check_workers(spark: SparkSession) -> None:
    """Refuse a classic session whose workers' Python lacks a package; Spark would report that later."""
    if not is_classic(spark):
        return
    context = spark.sparkContext
    python = str(context.pythonExec)
    is_on_this_machine = is_local(str(context.master))
    missing = _missing_here(python) if is_on_this_machine else _missing_on_executor(context.applicationId)
    if missing:
        raise MissingDependencyError(
            f"the Python of Spark's workers ({python}) lacks {', '.join(missing)}: pip install "
            "'penstock-spark[spark]' there, or set PYSPARK_PYTHON to a Python that has it before the session "
            "starts (spark.pyspark.python with spark-submit)",
            python=python,
            missing=missing,
        )


@cache
def _missing_here(python: str) -> tuple[str, ...]:
    if python == sys.executable:
        return ()
    command = [python, "-c", _PROBE_PROGRAM, *_WORKER_PACKAGES]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependencyError(
            f"the Python of Spark's workers ({python}) cannot be run ({type(error).__name__}): "
            "set PYSPARK_PYTHON to one that can before the session starts",
            python=python,
        ) from error
    return tuple(name for name in probe.stdout.strip().split(",") if name)


@cache
def _missing_on_executor(_application: str) -> tuple[str, ...]:
    """Check one executor, with a task that only needs the standard library."""

    def probe(_rows: object) -> list[str]:
        from importlib.util import find_spec

        return [name for name in ("penstock", "pyarrow") if find_spec(name) is None]

    context = SparkContext.getOrCreate()
    return tuple(context.parallelize([0], 1).mapPartitions(probe).collect())


def check_store_reach(url: str, master: str | None) -> None:
    """Refuse a SQLite store on a cluster; when None, ``master`` is that of the running task."""
    if master is None:
        context = TaskContext.get()
        master = context.getLocalProperty("spark.master") if context is not None else None
    if master is None or parse_url(url).dialect != "sqlite" or is_local(master):
        return
    raise InvalidOptionError(
        f"a SQLite store is a file on one machine, and this session runs on {master!r}, whose executors may "
        "be on others: use a postgresql store",
        condition="INVALID_OPTION.SQLITE_ON_CLUSTER",
        option="url",
        master=master,
    )


def freeze_imports() -> None:
    """Exclude all current objects of a Spark worker from garbage collection; do nothing in other processes.

    Workers run tasks, and the driver side of data sources, such as commits.
    """
    if TaskContext.get() is not None or _REUSE_VARIABLE in os.environ:
        _freeze(len(sys.modules))


@lru_cache(maxsize=1)
def _freeze(_modules: int) -> None:
    """Freeze once for each number of imported modules: the first tasks of a worker import more modules.

    Freezing after every task would keep garbage.
    """
    gc.freeze()


def arrow_schema(schema: StructType, time_zone: str | None = "UTC") -> pa.Schema:
    """Return the Arrow schema of the batches in which Spark sends rows to Python."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone=time_zone)


def arrow_type(data_type: DataType) -> pa.DataType:
    """Return the Arrow type in which Spark sends values to Python."""
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(data_type, timezone="UTC")


def round_trip_type(data_type: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type in which Spark returns values of a type; None if Spark does not support it."""
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        return arrow_type(from_arrow_type(data_type))
    except PySparkException:
        return None


def parse_type(text: str) -> DataType:
    return _parse_datatype_json_string(text)
