"""Making a session know a Python data source."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from penstock.kinds import refusal

_ADDED = ("SPARK_LOCAL_DIRS", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE", "SPARK_PYTHON_RUNTIME")

_known: WeakKeyDictionary[SparkSession, dict[str, Any]] = WeakKeyDictionary()


def check_session(spark: object) -> None:
    """Refuse what is no Spark session, classic or Spark Connect; the two have no class in common.

    Raises
    ------
    InvalidInput
    """
    if not hasattr(type(spark), "readStream"):
        raise refusal("spark", spark, "a Spark session, such as ps.session() gives")


def is_classic(spark: SparkSession) -> bool:
    """Whether it has a JVM at hand; a Spark Connect session has not."""
    return hasattr(spark, "_jsparkSession")


def make_known(spark: SparkSession, source: type[DataSource], **baked: Any) -> None:
    """Register a source such that queries may start at the same time; not again, for Spark warns each time.

    The session becomes the active one of the thread, as with ``createDataFrame``. Where rows are written, Spark looks for the source
    there alone (4.3, ``DataSource.lookupDataSource``), and a thread has none that did not make the session, or whose way to
    the JVM broke off (an interrupt can do it).

    All queries of a source share one ``java.util.HashMap`` of environment variables, and each adds Spark's own when it starts
    (4.2, 4.3: ``PythonStreamingSourceRunner``). Two that do so at once break it, and each task then fails with an
    ``OptionalDataException``. Where the variables are there before, they are only replaced, which is safe.

    Parameters
    ----------
    baked
        What the class is to have besides; a class made here is pickled by value, so it reaches every Python worker.
    """
    if is_classic(spark):
        jvm: Any = spark._jvm
        jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)
    known = _known.setdefault(spark, {})
    if known.get(source.name()) == (source, baked):
        return
    spark.dataSource.register(type(source.__name__, (source,), dict(baked)) if baked else source)
    known[source.name()] = (source, baked)
    if not is_classic(spark):
        return
    found = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource(source.name())
    environment = found.dataSourceCls().envVars()
    for name in _ADDED:
        environment.put(name, "")
