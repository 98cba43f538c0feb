"""Names of Spark's classes that stand in settings (Spark 4.2, 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from py4j.java_gateway import is_instance_of
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.internals.output_mode_checker import Refusal, refusal_of_error
from penstock.spark.internals.sessions import JvmError

# ---- sources: What a classic session knows of sources and sinks by the names of their formats (Spark 4.2, 4.3).

_ADDED = ("SPARK_LOCAL_DIRS", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE", "SPARK_PYTHON_RUNTIME")
_READ_ONLY = "binaryfile"
"""A format of files that says only when it has rows that it writes none."""
_TRUNCATES = "org.apache.spark.sql.connector.write.SupportsTruncate"
_UPDATES = "org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend"


@dataclass(frozen=True)
class Format:
    """A format, and what it does with streams."""

    python: bool = False
    """Whether it is a Python data source."""
    older: bool = False
    """Whether it is of Spark's older interface, which knows no continuous trigger."""
    files: bool = False
    """Whether it adds files to a folder."""
    streams: bool = True
    """False of a format that takes no stream at all."""
    truncates: bool | None = None
    """Whether it can be emptied, as complete mode needs; None where it is not known."""
    updates: bool | None = None
    """Whether it takes new values of a row as a row more, as update mode needs; None where it is not known."""
    missing: Refusal | None = None
    """What Spark says of a format that the session does not have."""
    silent: str | None = None
    """What Spark said instead of an answer, when it was asked what the format takes."""


def preset_environment(spark: SparkSession, name: str) -> None:
    """Set the environment variables of a Python data source that Spark adds when a query starts.

    All queries of a source share one ``java.util.HashMap`` of environment variables, and each adds Spark's own when it starts
    (4.2, 4.3: ``PythonStreamingSourceRunner``). Two that do so at once break it, and each task then fails with an
    ``OptionalDataException``. Where the variables are there before, they are only replaced, which is safe.
    """
    found = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource(name)
    environment = found.dataSourceCls().envVars()
    for variable in _ADDED:
        environment.put(variable, "")


def look_up_format(frame: DataFrame, name: str) -> Format:
    """A format as a query's start would look it up.

    Parameters
    ----------
    frame
        A DataFrame of a classic session: what would be written.
    """
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
        able = None if older is not None else abilities(frame, provider.get())
        if able is None:
            return _of_the_older_kind(session, name, older or sources.lookupDataSource(name, state.conf()))
    except (JvmError, PySparkException) as error:
        # Its start has the query's options, which a check is not given.
        return Format(silent=refusal_of_error(error).message)
    return Format(truncates=able[0], updates=able[1])


def abilities(frame: Any, provider: Any) -> tuple[bool, bool] | None:
    """Whether a format's writer can empty the sink, and takes new values of a row as a row more; None where it takes no stream.

    A query's start asks the same of the same writer (``StreamExecution.createWrite``); it is made without the query's options.
    """
    session = frame.sparkSession
    jvm = session._jvm
    sql, empty = jvm.org.apache.spark.sql, jvm.java.util.Optional.empty()
    schema, options = frame._jdf.schema(), sql.util.CaseInsensitiveStringMap.empty()
    tables = sql.execution.datasources.v2.DataSourceV2Utils
    try:
        table = tables.getTableFromProvider(provider, options, jvm.scala.Some(schema))
    except (JvmError, PySparkException):
        # It takes no schema from outside.
        table = tables.getTableFromProvider(provider, options, jvm.scala.Option.empty())
    if sql.connector.catalog.TableCapability.STREAMING_WRITE not in table.capabilities():
        return None
    info = sql.connector.write.LogicalWriteInfoImpl("", schema, options, empty, empty)
    builder, gateway = table.newWriteBuilder(info), session.sparkContext._gateway
    return is_instance_of(gateway, builder, _TRUNCATES), is_instance_of(gateway, builder, _UPDATES)


def _of_the_older_kind(session: Any, name: str, found: Any) -> Format:
    if name.lower() == _READ_ONLY:
        return Format(older=True, streams=False)

    def is_a(kind: str) -> bool:
        parent = session._jvm.java.lang.Class.forName(f"org.apache.spark.sql.{kind}")
        return bool(parent.isAssignableFrom(found))

    if is_a("execution.datasources.FileFormat"):
        return Format(older=True, files=True)
    return Format(older=True, streams=is_a("sources.StreamSinkProvider"))
