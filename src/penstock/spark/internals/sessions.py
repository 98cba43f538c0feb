"""Sessions, classic and Spark Connect, and what only the JVM of a classic one knows (Spark 4.2, 4.3)."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from penstock.arguments import refusal

_REGISTRY = "org.apache.spark.sql.execution.datasources.DataSourceManager"

CHECKPOINT_FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""Of checkpoints; Spark's own choice runs a process for each link that a path might be, some 30 in a micro-batch."""
ROCKSDB_PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
"""The state store that transformWithState needs."""

JvmError = Py4JError
"""A call to the JVM has failed, there or on the way."""
JvmException = Py4JJavaError
"""A call to the JVM has raised an exception there."""


def check_session(spark: object) -> None:
    """Refuse anything but a Spark session, classic or Spark Connect; the two have no class in common.

    Raises
    ------
    InvalidInput
    """
    if not hasattr(type(spark), "readStream"):
        raise refusal("spark", spark, "a Spark session, such as ps.session() gives")


def is_classic(given: SparkSession | DataFrame | object) -> bool:
    """Whether a session or a DataFrame has a JVM at hand; with Spark Connect neither has."""
    return hasattr(given, "_jsparkSession") or hasattr(given, "_jdf")


def clone_session(spark: SparkSession) -> SparkSession:
    """A session with the settings, views and functions of a classic one, whose changes do not reach that one."""
    return SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def activate(spark: SparkSession) -> None:
    """Make a classic session the active one of this thread's in the JVM."""
    jvm: Any = spark._jvm
    jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)


def session_id(spark: SparkSession) -> str:
    """The id of the session behind a Python object: PySpark has several objects for one session of the JVM's."""
    found: Any = spark
    return str(found._jsparkSession.sessionUUID() if is_classic(spark) else found.session_id)


def is_local(master: str) -> bool:
    """Whether a master URL means this machine and this process alone."""
    return master == "local" or master.startswith("local[")


def task_slots(spark: SparkSession) -> int:
    """How many tasks of a job run at the same time."""
    context: Any = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def default_file_system(spark: SparkSession) -> str | None:
    """Hadoop's default file system, where paths without a scheme go; None when that is the local disk."""
    java = getattr(spark, "_jsc", None)
    found = None if java is None else java.hadoopConfiguration().get("fs.defaultFS")
    return None if found is None or str(found).startswith("file:") else str(found)


def remove_folder(spark: SparkSession, location: str) -> None:
    """Remove a folder and all in it by Hadoop's file systems, which may not be within Python's reach."""
    java: Any = spark
    path = java._jvm.org.apache.hadoop.fs.Path(location)
    path.getFileSystem(java._jsc.hadoopConfiguration()).delete(path, True)


def running_context() -> SparkContext | None:
    """The context of this process, where there is one."""
    return SparkContext._active_spark_context


def hide_source_warnings(spark: SparkSession) -> None:
    """Keep Spark from warning at each query that a source which the session registered takes the place of the one it finds by itself."""
    log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]  # a classic session has a JVM
    log4j.core.config.Configurator.setLevel(_REGISTRY, log4j.Level.ERROR)


def na_functions(frame: object) -> Any:
    """The functions behind ``DataFrame.na``, for something that answers to the names of a DataFrame."""
    from pyspark.sql.classic.dataframe import DataFrameNaFunctions

    given: Any = frame
    return DataFrameNaFunctions(given)


def is_dataframe_attribute(name: str) -> bool:
    """Whether DataFrames of classic sessions have an attribute."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    return hasattr(ClassicDataFrame, name)


# ---- running: A streaming query of a classic session while it runs (Spark 4.2, 4.3).


def running_checkpoint(spark: SparkSession, query_id: str) -> str:
    """Where a running query has its checkpoint, as Spark has resolved it."""
    return str(_execution(spark, query_id).resolvedCheckpointRoot())


def running_plan(spark: SparkSession, query_id: str) -> Any:
    """The JVM's logical plan of a running query."""
    return _execution(spark, query_id).logicalPlan()


def _execution(spark: SparkSession, query_id: str) -> Any:
    query: Any = spark._jsparkSession.streams().get(query_id)
    return query.streamingQuery()
