"""A Spark session with the settings that streaming needs and that can only be made at its start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from penstock.errors import InvalidInput
from penstock.spark.internals.sessions import CHECKPOINT_FILE_MANAGER, hide_source_warnings, running_context
from penstock.spark.options import CONF_PREFIX
from penstock.spark.registration import register

# Spark's own default (4.2, 4.3), and the setting that may contain a password.
_REDACTED = r"(?i)secret|password|token|access[.]?key|credential|^spark\.penstock\.url$"

PIPELINED = "spark.python.udf.pipelined.enabled"
"""Whether rows are sent to Python and received from it at the same time (Spark 4.3)."""


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
    """Create a session for streaming, with Penstock registered.

    Parameters
    ----------
    name
        The application's name.
    master
        Spark's master URL; when None, that of spark-submit or else ``local[*]``.
    url
        The session's default store.
    stateful
        Whether queries will keep state. Stateless queries need only the last two micro-batches of a
        checkpoint, and can be optimised while they run.
    pipelined
        Whether rows are sent to Python and received from it at the same time
        (``spark.python.udf.pipelined.enabled``). Continuous queries with Python functions need it, and other
        queries drain a backlog faster with it. With it, Spark 4.3.0 occasionally gives a task a worker whose
        channel is closed (``ClosedChannelException``). The task fails, and in local mode, where tasks are not
        retried, so does a micro-batch query. A continuous query resumes by itself.
    memory
        The driver's memory, such as ``4g``.
    conf
        Further settings, which override those made here.

    Raises
    ------
    InvalidInput
        When a session is running already: the settings can only be made at the start.
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
    # Settings of the builder become part of the JVM's command line, which everybody on the machine can read.
    later = {key: value for key, value in settings.items() if key.startswith(CONF_PREFIX)}
    for key in settings.keys() - later.keys():
        builder = builder.config(key, settings[key])
    _choose_python(settings)
    return _registered(builder.getOrCreate(), later)


def _refuse_second() -> None:
    running = running_context()
    if running is not None:
        raise InvalidInput(
            f"a Spark session is running already ({running.appName!r}), and this one's settings can only be "
            "made at the start: use penstock.register(spark) with the running one, or stop it first"
        )


def _choose_python(settings: Mapping[str, str]) -> None:
    """Set PYSPARK_PYTHON: by default, executors use the first python3 of their PATH, which may lack pyarrow."""
    # Spark reads the setting only if spark-submit starts the program, and otherwise the variable.
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
        # At its largest value Spark (4.2, 4.3) counts the rows of a batch for Python, and no longer measures
        # its size after each row, which takes longer than sending it.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.python.filterPushdown.enabled": "true",
        # For continuous queries: Unix domain sockets take a third of the time.
        "spark.python.unix.domain.socket.enabled": "true",
        # Leave memory for Python workers, which are outside of the JVM's heap.
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
