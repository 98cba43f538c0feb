"""Formats of sources and sinks, as a classic session looks them up by name (Spark 4.2, 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from py4j.java_gateway import is_instance_of
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.internals.output_mode_checker import Refusal, refusal_of_error
from penstock.spark.internals.sessions import JvmError

_SOURCE_RUNNER_VARIABLES = (
    "SPARK_LOCAL_DIRS",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_PYTHON_RUNTIME",
)
_READ_ONLY = "binaryfile"
"""A file format that reports only on the first row that it cannot write."""
_TRUNCATES = "org.apache.spark.sql.connector.write.SupportsTruncate"
_UPDATES = "org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend"


@dataclass(frozen=True)
class Format:
    """A format, and what it does with streams."""

    python: bool = False
    """Whether it is a Python data source."""
    older: bool = False
    """Whether it uses Spark's older interface, which has no continuous trigger."""
    files: bool = False
    """Whether it adds files to a folder."""
    streams: bool = True
    """Whether it takes streams at all."""
    truncates: bool | None = None
    """Whether it can be truncated, as complete mode needs; None if unknown."""
    updates: bool | None = None
    """Whether it appends new values of a row, as update mode needs; None if unknown."""
    missing: Refusal | None = None
    """Spark's error if the session does not have the format."""
    silent: str | None = None
    """Spark's error if the capabilities of the format could not be read."""


def preset_environment(spark: SparkSession, name: str) -> None:
    """Set the environment variables that Spark adds to a Python data source when a query starts.

    All queries of a source share one ``java.util.HashMap`` of environment variables, and each adds Spark's
    own when it starts (4.2, 4.3: ``PythonStreamingSourceRunner``). Two that do so at once corrupt it, and
    each task then fails with an ``OptionalDataException``. Variables that exist already are only replaced,
    which is safe.
    """
    source = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource(name)
    environment = source.dataSourceCls().envVars()
    for variable in _SOURCE_RUNNER_VARIABLES:
        environment.put(variable, "")


def look_up_format(frame: DataFrame, name: str) -> Format:
    """Look up a format as the start of a query that writes a classic DataFrame would."""
    session: Any = frame.sparkSession
    state = session._jsparkSession.sessionState()
    sources = session._jvm.org.apache.spark.sql.execution.datasources.DataSource
    try:
        if state.dataSourceManager().dataSourceExists(name):
            return Format(python=True)
        provider = sources.lookupDataSourceV2(name, state.conf())
        older = sources.lookupDataSource(name, state.conf()) if provider.isEmpty() else None
    except (JvmError, PySparkException) as error:
        return Format(missing=refusal_of_error(error))
    try:
        capabilities = None if older is not None else streaming_capabilities(frame, provider.get())
        if capabilities is None:
            return _older_format(session, name, older or sources.lookupDataSource(name, state.conf()))
    except (JvmError, PySparkException) as error:
        # The start of a query passes its options, which a check does not have.
        return Format(silent=refusal_of_error(error).message)
    return Format(truncates=capabilities[0], updates=capabilities[1])


def streaming_capabilities(frame: Any, provider: Any) -> tuple[bool, bool] | None:
    """Return whether a format's writer can truncate the sink and append updated rows.

    None if it takes no stream.

    The start of a query asks the same of the same writer (``StreamExecution.createWrite``); here it is built
    without the query's options.
    """
    session = frame.sparkSession
    jvm = session._jvm
    sql, empty = jvm.org.apache.spark.sql, jvm.java.util.Optional.empty()
    schema, options = frame._jdf.schema(), sql.util.CaseInsensitiveStringMap.empty()
    tables = sql.execution.datasources.v2.DataSourceV2Utils
    try:
        table = tables.getTableFromProvider(provider, options, jvm.scala.Some(schema))
    except (JvmError, PySparkException):
        # It accepts no schema from outside.
        table = tables.getTableFromProvider(provider, options, jvm.scala.Option.empty())
    if sql.connector.catalog.TableCapability.STREAMING_WRITE not in table.capabilities():
        return None
    info = sql.connector.write.LogicalWriteInfoImpl("", schema, options, empty, empty)
    builder, gateway = table.newWriteBuilder(info), session.sparkContext._gateway
    return is_instance_of(gateway, builder, _TRUNCATES), is_instance_of(gateway, builder, _UPDATES)


def _older_format(session: Any, name: str, provider: Any) -> Format:
    if name.lower() == _READ_ONLY:
        return Format(older=True, streams=False)

    def is_a(kind: str) -> bool:
        parent = session._jvm.java.lang.Class.forName(f"org.apache.spark.sql.{kind}")
        return bool(parent.isAssignableFrom(provider))

    if is_a("execution.datasources.FileFormat"):
        return Format(older=True, files=True)
    return Format(older=True, streams=is_a("sources.StreamSinkProvider"))
