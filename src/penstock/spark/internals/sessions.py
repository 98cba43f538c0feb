"""Sessions, classic and over Spark Connect, and their versions of Spark (4.2, 4.3)."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, cast

from py4j.java_gateway import JavaObject, JVMView
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame, DataFrameNaFunctions, SparkSession

from penstock.arguments import refusal
from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

CHECKPOINT_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""The file manager for checkpoints.

Spark's default runs a process for each possible symbolic link, about 30 per micro-batch.
"""
HDFS_PROVIDER = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
ROCKSDB_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
"""The state store that transformWithState needs."""
SUPPORTED = ((4, 2), (4, 3))
"""The versions of Spark whose private API ``penstock.spark.internals`` knows."""
_VERSION = re.compile(r"(\d+)\.(\d+)")
_DATA_SOURCE_LOGGER = "org.apache.spark.sql.execution.datasources.DataSourceManager"

JvmError = Py4JError
"""Raised if a call to the JVM fails, in the JVM or on the connection to it."""
JvmException = Py4JJavaError
"""Raised if a call to the JVM raises an exception there."""


def check_session(spark: object) -> None:
    """Refuse anything but a Spark session, classic or Spark Connect; they have no common base class."""
    if not hasattr(type(spark), "readStream"):
        raise refusal("spark", spark, "a Spark session, such as penstock.session() returns")


def parse_version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version; vendors append their own names."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_version(spark: SparkSession) -> None:
    """Refuse an unknown version of Spark, since code that uses its private API could fail silently."""
    if parse_version(spark.version) in SUPPORTED:
        return
    known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    lowest, (major, minor) = SUPPORTED[0], SUPPORTED[-1]
    raise MissingDependencyError(
        f"this session runs Spark {spark.version}, but this version of Penstock supports Spark {known}: "
        f"install 'pyspark>={lowest[0]}.{lowest[1]},<{major}.{minor + 1}', or a newer Penstock",
        condition="MISSING_DEPENDENCY.SPARK_VERSION",
        version=spark.version,
    )


def is_classic(candidate: SparkSession | DataFrame | object) -> bool:
    """Return whether a session or a DataFrame is classic, not Spark Connect."""
    return hasattr(candidate, "_jsparkSession") or hasattr(candidate, "_jdf")


def context_of(spark: SparkSession) -> SparkContext | None:
    """Return the context of a classic session; None over Spark Connect, whose sessions have none."""
    return spark.sparkContext if is_classic(spark) else None


def cause_of(error: BaseException) -> BaseException | None:
    """Return the cause of an error; PySpark stores that of an error from the JVM in an attribute."""
    return getattr(error, "_cause", None) or error.__cause__


def jvm_of(spark: SparkSession) -> JVMView:
    return spark._jvm


def clone_session(spark: SparkSession) -> SparkSession:
    """Return a copy of a classic session, with its settings, views and functions."""
    return SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def activate(spark: SparkSession) -> None:
    """Make a classic session the active session of this thread in the JVM."""
    jvm_of(spark).org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)


def settings_of(spark: SparkSession) -> dict[str, str]:
    """Return all settings of a session.

    ``spark.conf.getAll`` calls a classic session's JVM for each setting (PySpark 4.2, 4.3).
    """
    if not is_classic(spark):
        return dict(spark.conf.getAll)
    # Random, so that no setting contains it.
    separator = secrets.token_hex(16)
    text = spark._jsparkSession.conf().getAll().mkString(separator)
    return {name: value for name, _, value in (pair.partition(" -> ") for pair in text.split(separator))}


def session_id(spark: SparkSession) -> str:
    """Return the id of a session, for which there may be several Python objects."""
    if is_classic(spark):
        return str(spark._jsparkSession.sessionUUID())
    return str(cast("ConnectSession", spark).session_id)


def is_local(master: str) -> bool:
    """Return whether a master URL means that all tasks run on this machine."""
    return master == "local" or master.startswith("local[")


def task_slots(spark: SparkSession) -> int:
    context = cast(JavaObject, spark.sparkContext._jsc).sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def default_file_system(spark: SparkSession) -> str | None:
    """Return Hadoop's default file system, for paths without a scheme; None if it is the local disk."""
    java = getattr(spark, "_jsc", None)
    location = None if java is None else java.hadoopConfiguration().get("fs.defaultFS")
    return None if location is None or str(location).startswith("file:") else str(location)


def remove_folder(spark: SparkSession, location: str) -> None:
    """Remove a folder with Hadoop's file systems, which reach locations that Python may not."""
    path = jvm_of(spark).org.apache.hadoop.fs.Path(location)
    path.getFileSystem(spark._jsc.hadoopConfiguration()).delete(path, True)


def running_context() -> SparkContext | None:
    return SparkContext._active_spark_context


def hide_source_warnings(spark: SparkSession) -> None:
    """Silence a warning of every query: that the registered source replaces one from the Python path."""
    log4j = jvm_of(spark).org.apache.logging.log4j
    log4j.core.config.Configurator.setLevel(_DATA_SOURCE_LOGGER, log4j.Level.ERROR)


def na_functions(frame: object) -> DataFrameNaFunctions:
    """Return the functions of ``DataFrame.na`` for an object with the methods of a DataFrame."""
    from pyspark.sql.classic.dataframe import DataFrameNaFunctions as ClassicNaFunctions

    return ClassicNaFunctions(cast(DataFrame, frame))


def is_dataframe_attribute(name: str) -> bool:
    """Return whether DataFrames of classic sessions have an attribute."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    return hasattr(ClassicDataFrame, name)


def running_checkpoint(spark: SparkSession, query_id: str) -> str:
    """Return the checkpoint location of a running query, as Spark has resolved it."""
    return str(_stream_execution(spark, query_id).resolvedCheckpointRoot())


def running_plan(spark: SparkSession, query_id: str) -> JavaObject:
    """Return the JVM's logical plan of a running query."""
    return _stream_execution(spark, query_id).logicalPlan()


def _stream_execution(spark: SparkSession, query_id: str) -> JavaObject:
    return spark._jsparkSession.streams().get(query_id).streamingQuery()
