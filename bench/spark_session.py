"""Spark session for all benchmarks, with little logging."""

from __future__ import annotations

from pyspark.sql import SparkSession

import penstock
from penstock.spark.session import PIPELINED


def spark(*, pipelined: bool = False) -> SparkSession:
    """Return the session. It is recreated if `pipelined` changes."""
    running = SparkSession.getActiveSession()
    if running is not None and (running.conf.get(PIPELINED, "false") == "true") == pipelined:
        return running
    if running is not None:
        running.stop()
    session = penstock.session(
        "bench",
        master="local[2]",
        memory="4g",
        pipelined=pipelined,
        conf={
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
        },
    )
    session.sparkContext.setLogLevel("OFF")
    return session
