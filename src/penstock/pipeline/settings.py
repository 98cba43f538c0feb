"""Settings that a query takes with it when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


@contextmanager
def no_data_batches(spark: SparkSession) -> Iterator[None]:
    """Queries that start in here let out what a watermark has closed, with no need of new data; others do as the session says.

    A query copies its session's settings when it starts (Spark 4.3).
    """
    before = spark.conf.get(_NO_DATA, "true")
    spark.conf.set(_NO_DATA, "true")
    try:
        yield
    finally:
        spark.conf.set(_NO_DATA, str(before))
