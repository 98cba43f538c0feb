"""A Spark session with what streaming needs and what can only be set at the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from penstock.errors import InvalidInput
from penstock.spark.register import register


def session(
    name: str = "penstock",
    *,
    master: str | None = None,
    url: str | None = None,
    stateful: bool = False,
    memory: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Build a session for streaming, with Penstock registered; for people who have none yet.

    Parameters
    ----------
    name
        The application's name.
    master
        Spark's master URL; that of spark-submit when None, or else ``local[*]``.
    url
        A store, as the session's default.
    stateful
        Whether queries will keep state. Stateless ones need only the last two micro-batches of a checkpoint, and may be
        optimised while they run.
    memory
        The driver's memory, such as ``4g``.
    conf
        More settings; they win over those that are chosen here.

    Raises
    ------
    InvalidInput
        When a session with other static settings is running already, which could not take them.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        raise InvalidInput(
            f"a Spark session runs already ({running.sparkContext.appName!r}), and what this one needs can only be set "
            "at the start: use penstock.register(spark) with it, or stop it first"
        )
    settings = _settings(stateful) | ({"spark.driver.memory": memory} if memory else {}) | dict(conf or {})
    if url is not None:
        settings["spark.penstock.url"] = url
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    if "spark.pyspark.python" not in settings:
        # Without it executors take the first python3 of their PATH, which may lack pyarrow.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _settings(stateful: bool) -> dict[str, str]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        # Python workers live beside the JVM's heap: leave them room.
        "spark.memory.fraction": "0.5",
        "spark.sql.streaming.metricsEnabled": "true",
    }
    if not stateful:
        settings |= {
            "spark.sql.adaptive.streaming.stateless.enabled": "true",
            "spark.sql.streaming.minBatchesToRetain": "2",
        }
    return settings
