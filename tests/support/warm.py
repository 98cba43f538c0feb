"""Forks the Python processes that Spark's driver starts, from a process that has imported what they need.

For each streaming query, and for each kind of work on a data source, the JVM starts a Python process that
imports PySpark, Arrow and Penstock. That takes half a second of CPU time, a third of the cost of most tests.
Here such a process delegates its work as soon as it starts (`tests.support.starting`): it sends its command,
environment, directory and files to a server that forks a process which continues in its place
(`tests.support.forking`). It then only waits for the forked process to exit, and kills it if it is itself
killed.

A forked process has the mark of the starting process in its environment, so it belongs to the child process
of the test that started it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support import daemon
from tests.support.forking import ForkServer
from tests.support.starting import SOCKET

PRELOADED = (
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyarrow.compute",
    "penstock.spark.data_source",
    "penstock.changes.data_source",
    *daemon.PRELOADED,
)


@contextmanager
def warm_workers() -> Iterator[None]:
    """Fork the Python processes of a JVM that is started in this block, as long as this process lives."""
    # The forked processes are Spark's workers, and the modules imported beforehand check this variable.
    server = ForkServer(PRELOADED, os.environ | {"SPARK_PYTHON_RUNTIME": "PYTHON_WORKER"})
    os.environ[SOCKET] = server.socket_path
    try:
        yield
    finally:
        del os.environ[SOCKET]
