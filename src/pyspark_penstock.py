"""Spark finds the data source ``penstock`` through this module.

It imports each ``pyspark_*`` and takes its ``DefaultSource``.
"""

from penstock.spark.data_source import PenstockDataSource as DefaultSource

__all__ = ["DefaultSource"]
