"""What only a classic session's JVM knows: plans and the default file system."""

from __future__ import annotations

import re

from pyspark.sql import DataFrame, SparkSession

# Nodes of a logical plan after which the rows of a task depend on more than its own input (Spark 4.3).
_SHUFFLING = (
    "Aggregate", "Join", "AsOfJoin", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "Sort", "GlobalLimit",
    "LocalLimit", "Repartition", "RepartitionByExpression", "RebalancePartitions", "Window", "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState", "FlatMapGroupsInPandas", "FlatMapGroupsInArrow", "FlatMapCoGroupsInPandas",
    "TransformWithState", "TransformWithStateInPySpark", "Intersect", "Except", "Sample", "Offset", "Tail",
)  # fmt: skip
# A streaming plan's nodes are marked with a tilde.
_NODE = re.compile(r"^[\s:+\-|~]*([A-Z]\w+)", re.MULTILINE)


def repeatable(frame: DataFrame) -> str | None:
    """The first operator that keeps a repeated micro-batch from being cut into the same tasks; None when there is none.

    Only classic sessions show their plan; for others the answer is None.
    """
    java = getattr(frame, "_jdf", None)
    if java is None:
        return None
    plan = str(java.queryExecution().analyzed().toString())
    return next((node for node in _NODE.findall(plan) if node in _SHUFFLING), None)


def default_file_system(spark: SparkSession) -> str | None:
    """Hadoop's default file system, where paths without a scheme go; None when that is the local disk."""
    java = getattr(spark, "_jsc", None)
    found = None if java is None else java.hadoopConfiguration().get("fs.defaultFS")
    return None if found is None or str(found).startswith("file:") else str(found)
