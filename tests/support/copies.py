"""Transformation of the continuous queries that copy a queue in tests."""

from __future__ import annotations

from pyspark.sql import DataFrame


def filter_and_double(frame: DataFrame) -> DataFrame:
    return frame.where("id % 3 != 0").selectExpr("id", "id * 2 as twice")
