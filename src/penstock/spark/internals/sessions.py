"""Sessions, classic and over Spark Connect, and what only the JVM of a classic session knows (Spark 4.2,
4.3).
"""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from penstock.arguments import refusal

CHECKPOINT_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""The file manager for checkpoints.

Spark's default runs a process for each possible symbolic link, some 30 a micro-batch.
"""
ROCKSDB_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
"""The state store that transformWithState needs."""
_DATA_SOURCE_LOGGER = "org.apache.spark.sql.execution.datasources.DataSourceManager"

JvmError = Py4JError
"""A call to the JVM failed, there or in the connection to it."""
JvmException = Py4JJavaError
"""A call to the JVM raised an exception there."""


def check_session(spark: object) -> None:
    """Refuse anything but a Spark session, classic or Spark Connect; the two have no base class in common.

    Raises
    ------
    InvalidInput
    """
    if not hasattr(type(spark), "readStream"):
        raise refusal("spark", spark, "a Spark session, such as ps.session() returns")


def is_classic(candidate: SparkSession | DataFrame | object) -> bool:
    """Return whether a session or a DataFrame has a JVM in this process; over Spark Connect neither has."""
    return hasattr(candidate, "_jsparkSession") or hasattr(candidate, "_jdf")


def clone_session(spark: SparkSession) -> SparkSession:
    """Return a session with the settings, views and functions of a classic one.

    Changes to it do not affect the original.
    """
    return SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def activate(spark: SparkSession) -> None:
    """Make a classic session the active session of this thread in the JVM."""
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)


def session_id(spark: SparkSession) -> str:
    """Return the id of a session; several Python objects may stand for the same session."""
    session: Any = spark
    return str(session._jsparkSession.sessionUUID() if is_classic(spark) else session.session_id)


def is_local(master: str) -> bool:
    """Return whether a master URL means this process only."""
    return master == "local" or master.startswith("local[")


def task_slots(spark: SparkSession) -> int:
    """Return how many tasks of a job run at the same time."""
    context: Any = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def default_file_system(spark: SparkSession) -> str | None:
    """Return Hadoop's default file system, used for paths without a scheme.

    None if that is the local disk.
    """
    java = getattr(spark, "_jsc", None)
    location = None if java is None else java.hadoopConfiguration().get("fs.defaultFS")
    return None if location is None or str(location).startswith("file:") else str(location)


def remove_folder(spark: SparkSession, location: str) -> None:
    """Remove a folder with Hadoop's file systems, which reach locations that Python may not."""
    java: Any = spark
    path = java._jvm.org.apache.hadoop.fs.Path(location)
    path.getFileSystem(java._jsc.hadoopConfiguration()).delete(path, True)


def running_context() -> SparkContext | None:
    """Return the active Spark context of this process."""
    return SparkContext._active_spark_context


def hide_source_warnings(spark: SparkSession) -> None:
    """Silence Spark's warning, at each query, that a registered source replaces one found on the path."""
    log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]  # a classic session has a JVM
    log4j.core.config.Configurator.setLevel(_DATA_SOURCE_LOGGER, log4j.Level.ERROR)


def na_functions(frame: object) -> Any:
    """Return the functions of ``DataFrame.na`` for an object with the methods of a DataFrame."""
    from pyspark.sql.classic.dataframe import DataFrameNaFunctions

    untyped: Any = frame
    return DataFrameNaFunctions(untyped)


def is_dataframe_attribute(name: str) -> bool:
    """Return whether DataFrames of classic sessions have an attribute."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    return hasattr(ClassicDataFrame, name)


def running_checkpoint(spark: SparkSession, query_id: str) -> str:
    """Return the checkpoint location of a running query, as Spark has resolved it."""
    return str(_stream_execution(spark, query_id).resolvedCheckpointRoot())


def running_plan(spark: SparkSession, query_id: str) -> Any:
    """Return the JVM's logical plan of a running query."""
    return _stream_execution(spark, query_id).logicalPlan()


def _stream_execution(spark: SparkSession, query_id: str) -> Any:
    query: Any = spark._jsparkSession.streams().get(query_id)
    return query.streamingQuery()
