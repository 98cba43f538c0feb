"""Making a session know a Python data source."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

_ADDED = ("SPARK_LOCAL_DIRS", "SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE", "SPARK_PYTHON_RUNTIME")


def make_known(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a source such that queries may start at the same time.

    All queries of a source share one ``java.util.HashMap`` of environment variables, and each adds Spark's own when it starts
    (4.2, 4.3: ``PythonStreamingSourceRunner``). Two that do so at once break it, and each task then fails with an
    ``OptionalDataException``. Where the variables are there before, they are only replaced, which is safe.
    """
    spark.dataSource.register(source)
    if not hasattr(spark, "_jsparkSession"):
        return
    found = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource(source.name())
    environment = found.dataSourceCls().envVars()
    for name in _ADDED:
        environment.put(name, "")
