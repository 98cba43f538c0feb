"""Spark's Python workers import PySpark from an archive without bytecode, which they compile each time: a second a process."""

from __future__ import annotations

import sys


def prefer_installed() -> None:
    """Import the installed package, which is the same code."""
    sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
