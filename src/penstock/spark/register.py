"""Making a Spark session know the data source."""

from __future__ import annotations

from pyspark.sql import SparkSession

from penstock.spark.options import ALL, CONF_PREFIX
from penstock.spark.source import PenstockDataSource
from penstock.spark.workers import check_workers


def register(spark: SparkSession) -> None:
    """Make ``format("penstock")`` known to a session, with the session's defaults; call it again after changing them.

    Defaults are settings such as ``spark.penstock.url`` and ``spark.penstock.guarantee``. Without this call Spark finds
    the data source by itself too, then without defaults.

    Parameters
    ----------
    spark
        A session, classic or Spark Connect.

    Raises
    ------
    MissingDependency
        When the Python of Spark's workers lacks a package.
    """
    check_workers(spark)
    names = {name: spark.conf.get(CONF_PREFIX + name, None) for name in ALL}
    baked = {
        "defaults": {name: value for name, value in names.items() if value is not None},
        "master": spark.conf.get("spark.master", None),
        "__module__": PenstockDataSource.__module__,
        "__doc__": PenstockDataSource.__doc__,
    }
    # A class made here is pickled by value, so what is baked into it reaches every Python worker.
    spark.dataSource.register(type(PenstockDataSource.__name__, (PenstockDataSource,), baked))
