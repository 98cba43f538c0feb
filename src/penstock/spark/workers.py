"""Whether the Pythons that run Spark's tasks have what they need, found out before they fail in silence."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from pyspark.sql import SparkSession

from penstock.errors import MissingDependency

_NEEDS = ("pyarrow", "pandas", "penstock")
_PROBE = "import importlib.util as u, sys; print(','.join(n for n in sys.argv[1:] if u.find_spec(n) is None))"


def check_workers(spark: SparkSession) -> None:
    """Fail at once when executors' Python lacks a package; Spark itself would be silent for a while first.

    Raises
    ------
    MissingDependency
        Naming the Python and what it lacks.
    """
    context = getattr(spark, "sparkContext", None) if _classic(spark) else None
    if context is None:
        return
    python = str(context.pythonExec)
    lacking = (
        _local(python)
        if str(context.master).startswith("local[") or context.master == "local"
        else _remote(str(context.applicationId))
    )
    if lacking:
        raise MissingDependency(
            f"the Python of Spark's workers ({python}) lacks {', '.join(lacking)}: install penstock[spark] there, or set "
            "spark.pyspark.python (or PYSPARK_PYTHON) to a Python that has it before the session starts",
            python=python,
            missing=lacking,
        )


def _classic(spark: SparkSession) -> bool:
    return type(spark).__module__ == "pyspark.sql.session" and hasattr(spark, "_jsparkSession")


@cache
def _local(python: str) -> tuple[str, ...]:
    if python == sys.executable:
        return ()
    try:
        found = subprocess.run(
            [python, "-c", _PROBE, *_NEEDS], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependency(
            f"the Python of Spark's workers ({python}) cannot be run ({type(error).__name__}): set spark.pyspark.python "
            "to one that can before the session starts",
            python=python,
        ) from error
    return tuple(name for name in found.stdout.strip().split(",") if name)


@cache
def _remote(_application: str) -> tuple[str, ...]:
    """Ask one executor; the tasks need nothing but the standard library."""

    def probe(_rows: object) -> list[str]:
        from importlib.util import find_spec

        return [name for name in ("pyarrow", "pandas", "penstock") if find_spec(name) is None]

    context = SparkSession.active().sparkContext
    return tuple(sorted(set(context.parallelize([0], 1).mapPartitions(probe).collect())))
