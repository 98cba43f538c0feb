"""What a continuous copy of a queue does with its rows."""

from __future__ import annotations

from pyspark.sql import DataFrame


def doubled(frame: DataFrame) -> DataFrame:
    return frame.where("id % 3 != 0").selectExpr("id", "id * 2 as twice")
