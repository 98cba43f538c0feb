"""Checks whether Spark would start a streaming query (classic sessions, Spark 4.2, 4.3).

They use Spark's own check of a plan in an output mode (``UnsupportedOperationChecker``), and the capabilities
of the sink's format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from py4j.java_gateway import JavaObject, JVMView, is_instance_of
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.internals.plans import analysed, java_frame
from penstock.spark.internals.sessions import JvmError, jvm_of

_SOURCE_RUNNER_VARIABLES = (
    "SPARK_LOCAL_DIRS",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_PYTHON_RUNTIME",
)
_READ_ONLY = "binaryfile"
"""A file format that cannot be written, but reports that only with the first row."""
_TRUNCATES = "org.apache.spark.sql.connector.write.SupportsTruncate"
_UPDATES = "org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend"


@dataclass(frozen=True)
class Refusal:
    """The reason why Spark does not start a query."""

    condition: str | None
    message: str


def check_output_mode(frame: DataFrame, mode: str, trigger: str = "processing time") -> Refusal | None:
    """Return why Spark would refuse a query of a classic session in an output mode; None if it would not.

    A query's start calls ``checkForStreaming``, ``checkForContinuous`` and
    ``checkAdditionalRealTimeModeConstraints`` with the same plan. Triggers other than ``continuous`` and
    ``real time`` mean micro-batches.
    """
    checker, modes = _checker(jvm_of(frame.sparkSession))
    plan = analysed(frame)
    try:
        if trigger == "continuous":
            checker.checkForContinuous(plan, modes[mode])
        else:
            checker.checkForStreaming(plan, modes[mode])
        if trigger == "real time":
            checker.checkAdditionalRealTimeModeConstraints(plan, modes[mode])
    except (AnalysisException, IllegalArgumentException) as error:
        return Refusal(error.getCondition(), _first_line(error.getMessage()))
    return None


def refusal_of_error(error: Exception) -> Refusal:
    """Return the condition and message of a Spark error, even if PySpark has no class for it."""
    if isinstance(error, PySparkException):
        return Refusal(error.getCondition(), _first_line(error.getMessage() or str(error)))
    java_error = getattr(error, "java_exception", None)
    if java_error is None:
        return Refusal(None, _first_line(str(error)))
    try:
        condition = str(java_error.getCondition())
    except JvmError:
        # The error has no condition.
        condition = None
    return Refusal(condition, _first_line(str(java_error.getMessage())))


@lru_cache(maxsize=1)
def _checker(jvm: JVMView) -> tuple[JavaObject, dict[str, JavaObject]]:
    """Return the checker's class and the output modes. Cached, because each name is a call to the JVM."""
    sql = jvm.org.apache.spark.sql
    output_mode = sql.streaming.OutputMode
    modes = {
        "append": output_mode.Append(),
        "update": output_mode.Update(),
        "complete": output_mode.Complete(),
    }
    return sql.catalyst.analysis.UnsupportedOperationChecker, modes


def _first_line(message: str) -> str:
    return message.split(";\n")[0].split(" SQLSTATE")[0].strip()


@dataclass(frozen=True)
class Format:
    """A format and its support for streams."""

    python: bool = False
    """Whether it is a Python data source."""
    is_v1: bool = False
    """Whether it uses the data source API V1, which has no continuous trigger."""
    files: bool = False
    """Whether it adds files to a folder."""
    streams: bool = True
    """Whether it supports streams."""
    truncates: bool | None = None
    """Whether it can be truncated, as complete mode needs; None if unknown."""
    updates: bool | None = None
    """Whether it can append updated rows, as update mode needs; None if unknown."""
    not_found: Refusal | None = None
    """Spark's error if the session does not have the format."""
    lookup_error: str | None = None
    """Spark's error if the capabilities of the format could not be read."""


def preset_environment(spark: SparkSession, name: str) -> None:
    """Set the environment variables that Spark adds to a Python data source when a query starts.

    All queries of a source share one ``java.util.HashMap`` of environment variables, and each query adds
    Spark's variables when it starts (4.2, 4.3: ``PythonStreamingSourceRunner``). If two queries start at the
    same time, they corrupt the map, and every task then fails with an ``OptionalDataException``. Existing
    variables are only replaced, which is safe.
    """
    source = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource(name)
    environment = source.dataSourceCls().envVars()
    for variable in _SOURCE_RUNNER_VARIABLES:
        environment.put(variable, "")


def look_up_format(frame: DataFrame, name: str) -> Format:
    """Look up a format as Spark does when a query that writes a classic DataFrame starts."""
    jvm = jvm_of(frame.sparkSession)
    state = frame.sparkSession._jsparkSession.sessionState()
    sources = jvm.org.apache.spark.sql.execution.datasources.DataSource
    try:
        if state.dataSourceManager().dataSourceExists(name):
            return Format(python=True)
        provider = sources.lookupDataSourceV2(name, state.conf())
        v1_provider = sources.lookupDataSource(name, state.conf()) if provider.isEmpty() else None
    except (JvmError, PySparkException) as error:
        return Format(not_found=refusal_of_error(error))
    try:
        capabilities = None if v1_provider is not None else streaming_capabilities(frame, provider.get())
        if capabilities is None:
            return _v1_format(jvm, name, v1_provider or sources.lookupDataSource(name, state.conf()))
    except (JvmError, PySparkException) as error:
        # A query passes its options, which are not known here.
        return Format(lookup_error=refusal_of_error(error).message)
    return Format(truncates=capabilities[0], updates=capabilities[1])


def streaming_capabilities(frame: DataFrame, provider: JavaObject) -> tuple[bool, bool] | None:
    """Return whether a format's writer can truncate, and append updated rows; None if it supports no streams.

    Spark checks the same writer when a query starts (``StreamExecution.createWrite``). Here it is built
    without the query's options.
    """
    jvm = jvm_of(frame.sparkSession)
    sql, empty = jvm.org.apache.spark.sql, jvm.java.util.Optional.empty()
    schema, options = java_frame(frame).schema(), sql.util.CaseInsensitiveStringMap.empty()
    tables = sql.execution.datasources.v2.DataSourceV2Utils
    try:
        table = tables.getTableFromProvider(provider, options, jvm.scala.Some(schema))
    except (JvmError, PySparkException):
        # The provider does not accept a schema from outside.
        table = tables.getTableFromProvider(provider, options, jvm.scala.Option.empty())
    if sql.connector.catalog.TableCapability.STREAMING_WRITE not in table.capabilities():
        return None
    info = sql.connector.write.LogicalWriteInfoImpl("", schema, options, empty, empty)
    builder, gateway = table.newWriteBuilder(info), frame.sparkSession.sparkContext._gateway
    return is_instance_of(gateway, builder, _TRUNCATES), is_instance_of(gateway, builder, _UPDATES)


def _v1_format(jvm: JVMView, name: str, provider: JavaObject) -> Format:
    if name.lower() == _READ_ONLY:
        return Format(is_v1=True, streams=False)

    def extends(parent_name: str) -> bool:
        parent = jvm.java.lang.Class.forName(f"org.apache.spark.sql.{parent_name}")
        return bool(parent.isAssignableFrom(provider))

    if extends("execution.datasources.FileFormat"):
        return Format(is_v1=True, files=True)
    return Format(is_v1=True, streams=extends("sources.StreamSinkProvider"))
