"""The versions of Spark whose private API this room knows."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

from penstock.errors import MissingDependency

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
