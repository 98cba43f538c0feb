"""A streaming query of a classic session while it runs (Spark 4.2, 4.3)."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


def checkpoint_of(spark: SparkSession, query_id: str) -> str:
    """Where a running query has its checkpoint, as Spark has resolved it."""
    return str(_execution(spark, query_id).resolvedCheckpointRoot())


def plan_of(spark: SparkSession, query_id: str) -> Any:
    """The JVM's logical plan of a running query."""
    return _execution(spark, query_id).logicalPlan()


def _execution(spark: SparkSession, query_id: str) -> Any:
    query: Any = spark._jsparkSession.streams().get(query_id)
    return query.streamingQuery()
