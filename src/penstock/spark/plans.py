"""What only a classic session's JVM knows: plans and the default file system."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.spark.plan_tree import tree_of

# Nodes of a logical plan after which the rows of a task depend on more than its own input (Spark 4.3).
_SHUFFLING = (
    "Aggregate", "Join", "AsOfJoin", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "Sort", "GlobalLimit",
    "LocalLimit", "Repartition", "RepartitionByExpression", "RebalancePartitions", "Window", "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState", "FlatMapGroupsInPandas", "FlatMapGroupsInArrow", "FlatMapCoGroupsInPandas",
    "TransformWithState", "TransformWithStateInPySpark", "Intersect", "Except", "Sample", "Offset", "Tail",
)  # fmt: skip
_STATEFUL = (
    "Aggregate", "Join", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState", "TransformWithState", "TransformWithStateInPySpark",
)  # fmt: skip
# What differs in the plans of two equal queries: objects' addresses and columns' numbers.
_OBJECT = re.compile(r"@[0-9a-f]+|#\d+L?")


def repeatable(frame: DataFrame) -> str | None:
    """The first operator that keeps a repeated micro-batch from being cut into the same tasks; None when there is none.

    Only classic sessions show their plan; for others the answer is None.
    """
    if not hasattr(frame, "_jdf"):
        return None
    return next((node.name for node in tree_of(frame).walk() if node.name in _SHUFFLING), None)


def keeps_rows(frame: DataFrame) -> bool:
    """Whether rows may wait in a state store for a watermark; of a session that is not classic it is not known, and False."""
    if not hasattr(frame, "_jdf"):
        return False
    nodes = {node.name for node in tree_of(frame).walk()}
    return "EventTimeWatermark" in nodes and not nodes.isdisjoint(_STATEFUL)


def streaming_reads(frame: DataFrame) -> list[tuple[str, dict[str, str]]] | None:
    """The format of each streaming read in a plan, and its options by their names in lower case.

    A read of Spark's older kind, such as files, has neither. Only classic sessions show their plan; for others the answer is None.
    """
    java = getattr(frame, "_jdf", None)
    if java is None:
        return None
    leaves = java.queryExecution().analyzed().collectLeaves()
    found = (leaves.apply(number) for number in range(leaves.size()))
    return [_read(leaf) for leaf in found if leaf.isStreaming()]


def _read(leaf: Any) -> tuple[str, dict[str, str]]:
    if leaf.nodeName() != "StreamingRelationV2":
        return "", {}
    return str(leaf.sourceName()).lower(), dict(leaf.extraOptions())


def watermarks_over(plan: Any, column: str) -> list[str]:
    """The event-time columns of the watermarks through which rows go that went through the one of a column before.

    Parameters
    ----------
    plan
        The JVM's logical plan.
    column
        The event-time column of the first one.
    """
    found: list[str] = []

    def look(node: Any, over: list[str]) -> None:
        if node.nodeName() == "EventTimeWatermark":
            name = str(node.eventTime().name())
            found.extend(over if name == column else ())
            over = [*over, name]
        children = node.children()
        for number in range(children.size()):
            look(children.apply(number), over)

    look(plan, [])
    return found


def fingerprint(frame: DataFrame, *told: str) -> str:
    """A short name that is the same whenever the same program makes the same query, and says the same of it."""
    java = getattr(frame, "_jdf", None)
    plan = "" if java is None else str(java.queryExecution().analyzed().canonicalized().toString())
    lines = [*told, frame.schema.json(), _OBJECT.sub("", plan)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def default_file_system(spark: SparkSession) -> str | None:
    """Hadoop's default file system, where paths without a scheme go; None when that is the local disk."""
    java = getattr(spark, "_jsc", None)
    found = None if java is None else java.hadoopConfiguration().get("fs.defaultFS")
    return None if found is None or str(found).startswith("file:") else str(found)
