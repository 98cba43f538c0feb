"""A Spark session with what streaming needs and what can only be set at the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from penstock.errors import InvalidInput
from penstock.spark.internals.sessions import CHECKPOINT_FILE_MANAGER, hide_source_warnings, running_context
from penstock.spark.options import CONF_PREFIX
from penstock.spark.registration import register

# Spark's own default (4.2, 4.3), and the setting that may have a password in it.
_REDACTED = r"(?i)secret|password|token|access[.]?key|credential|^spark\.penstock\.url$"

PIPELINED = "spark.python.udf.pipelined.enabled"
"""Whether rows go to Python and come back side by side (Spark 4.3)."""


def session(
    name: str = "penstock",
    *,
    master: str | None = None,
    url: str | None = None,
    stateful: bool = False,
    pipelined: bool = False,
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
    pipelined
        Whether rows go to Python and come back side by side (``spark.python.udf.pipelined.enabled``), which continuous queries with
        Python functions need, and others drain a backlog faster with. Spark 4.3.0 now and then gives a task a worker whose channel it
        has closed then (``ClosedChannelException``): the task fails, and in local mode, where no task is tried twice, a
        micro-batch query with it. A continuous query goes on by itself.
    memory
        The driver's memory, such as ``4g``.
    conf
        More settings; they win over those that are chosen here.

    Raises
    ------
    InvalidInput
        When a session runs already, which could not take the settings that are made at the start.
    MissingDependency
        When the Python of Spark's workers lacks a package.
    """
    _refuse_second()
    settings = (
        _settings(stateful, pipelined)
        | ({"spark.driver.memory": memory} if memory else {})
        | dict(conf or {})
    )
    if url is not None:
        settings[f"{CONF_PREFIX}url"] = url
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    # What is given at the start becomes part of the JVM's command line, which everybody on the machine can read.
    later = {key: value for key, value in settings.items() if key.startswith(CONF_PREFIX)}
    for key in settings.keys() - later.keys():
        builder = builder.config(key, settings[key])
    _choose_python(settings)
    return _registered(builder.getOrCreate(), later)


def _refuse_second() -> None:
    running = running_context()
    if running is not None:
        raise InvalidInput(
            f"a Spark session runs already ({running.appName!r}), and what this one needs can only be set at the start: "
            "use penstock.register(spark) with it, or stop it first"
        )


def _choose_python(settings: Mapping[str, str]) -> None:
    """Without one, executors take the first python3 of their PATH, which may lack pyarrow."""
    # Spark heeds the setting where spark-submit starts the program, and here the variable alone.
    if "spark.pyspark.python" in settings:
        os.environ["PYSPARK_PYTHON"] = settings["spark.pyspark.python"]
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _registered(spark: SparkSession, defaults: Mapping[str, str]) -> SparkSession:
    try:
        for key, value in defaults.items():
            spark.conf.set(key, value)
            hide_source_warnings(spark)
        register(spark)
    except BaseException:
        spark.stop()
        raise
    return spark


def _settings(stateful: bool, pipelined: bool) -> dict[str, str]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # At its largest value Spark (4.2, 4.3) counts the rows of a batch for Python and no longer weighs it after each of
        # them, which costs more than sending them does.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.python.filterPushdown.enabled": "true",
        # For continuous queries: sockets of the machine alone take a third of the time.
        "spark.python.unix.domain.socket.enabled": "true",
        # Python workers live beside the JVM's heap: leave them room.
        "spark.memory.fraction": "0.5",
        "spark.redaction.regex": _REDACTED,
        "spark.sql.streaming.metricsEnabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_FILE_MANAGER,
    }
    if pipelined:
        settings[PIPELINED] = "true"
    if not stateful:
        settings |= {
            "spark.sql.adaptive.streaming.stateless.enabled": "true",
            "spark.sql.streaming.minBatchesToRetain": "2",
        }
    return settings
