"""What a plan does to its rows, as far as taking some of them depends on it."""

from __future__ import annotations

from enum import IntEnum

from pyspark.sql import DataFrame

from penstock.spark.plan_tree import tree_of

_ROWS = frozenset({
    "Project", "Filter", "TypedFilter", "Generate", "SubqueryAlias", "View", "EventTimeWatermark", "ResolvedHint",
    "MapElements", "DeserializeToObject", "SerializeFromObject",
})  # fmt: skip
_BATCHES = frozenset({
    "MapInArrow", "MapInPandas", "MapPartitions", "Repartition", "RepartitionByExpression", "RebalancePartitions",
})  # fmt: skip
_READ = "StreamingRelationV2"


class Reach(IntEnum):
    """On how much of the stream a row that comes out may depend."""

    ROW = 1
    """On one row that went in."""
    MICRO_BATCH = 2
    """On those of one micro-batch."""
    STREAM = 3
    """On all that came before, which Spark keeps as state, or on something that is not known here."""


def reach_of(frame: DataFrame) -> Reach:
    """The reach of a plan over one streaming read; STREAM for all plans with more leaves."""
    names = [node.name for node in tree_of(frame).walk()]
    if names.count(_READ) != 1 or set(names) - _ROWS - _BATCHES - {_READ}:
        return Reach.STREAM
    return Reach.ROW if _BATCHES.isdisjoint(names) else Reach.MICRO_BATCH


def keeps_state(frame: DataFrame) -> bool:
    """Whether a task may have to read all its rows, because what it keeps of them is committed behind the last one."""
    names = {node.name for node in tree_of(frame).walk() if node.children}
    return not names <= _ROWS | _BATCHES | {"Union"}
