"""Python processes that Spark's driver starts one by one, forked from one that has imported what they need.

For each streaming query, and for each kind of work on a data source, the JVM starts a Python that imports
PySpark, Arrow and Penstock: half a second of a core, a third of all that most tests cost. Here that Python
hands itself over as soon as it starts (`tests.support.starting`): its command, environment, directory and
files go to a process that forks one which goes on as it would have (`tests.support.forking`). It only waits
for that one's end, and takes it along when it is ended itself.

What it forks has its mark in the environment, and so belongs to the child process of a test that it was
started by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import daemon
from tests.support.forking import Forker
from tests.support.starting import SOCKET

USUAL = (
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyarrow.compute",
    "penstock.spark.data_source",
    "penstock.changes.data_source",
    *daemon.USUAL,
)


@contextmanager
def warm_workers() -> Iterator[None]:
    """The JVM that is started in this block has its Pythons forked, as long as this process lives."""
    # What it forks are workers of Spark's, and what it imports beforehand is to know that.
    forker = Forker(USUAL, os.environ | {"SPARK_PYTHON_RUNTIME": "PYTHON_WORKER"})
    os.environ[SOCKET] = forker.where
    try:
        yield
    finally:
        del os.environ[SOCKET]
