"""Spark's logical operators, and what each does to a stream: the one table that every decision about plans goes by.

The names are those that a plan is printed with. An operator that is not in the table has none of the properties, which is the careful
answer wherever one is asked for.
"""

from __future__ import annotations

from enum import Flag, auto


class Trait(Flag):
    """Properties of an operator (Spark 4.2 and 4.3, unless it says something else)."""

    PER_ROW = auto()
    """Each row that comes out depends on one row that went in."""
    PER_BATCH = auto()
    """Rows that come out depend on some of one micro-batch, and on nothing before it."""
    ONE_TO_ONE = auto()
    """One row comes out for each row that goes in."""
    NAMES_KEPT = auto()
    """Columns above it have the names that they have below."""
    GATHERING = auto()
    """What a task does depends on more than the rows of one input partition, so a repeated micro-batch may be cut into other tasks."""
    STATEFUL = auto()
    """On a stream it keeps state."""
    FUNCTION = auto()
    """A stateful function of the user's."""
    DEDUPLICATION = auto()
    """It drops rows with keys that came before."""
    DROPS_LATE = auto()
    """It drops rows behind the watermark, or counts rows that come again twice."""
    STREAMING_READ = auto()
    """A leaf that reads a stream."""
    MAP_LIKE = auto()
    """Spark's continuous trigger takes it (``UnsupportedOperationChecker.checkForContinuous``)."""
    CONTINUOUS = auto()
    """Penstock's continuous queries take it."""
    REAL_TIME = auto()
    """The real-time trigger takes it (``RealTimeModeAllowlist``)."""
    REAL_TIME_4_3 = auto()
    """The real-time trigger takes it from Spark 4.3 on."""
    ABOVE_UNION = auto()
    """The real-time trigger does not take it below a union."""


_ROW = Trait.PER_ROW | Trait.MAP_LIKE | Trait.REAL_TIME
_READ = Trait.STREAMING_READ | Trait.MAP_LIKE | Trait.REAL_TIME
_FUNCTION = Trait.STATEFUL | Trait.FUNCTION | Trait.GATHERING | Trait.DROPS_LATE
_PROPERTIES = {
    # Row by row.
    "Project": _ROW | Trait.ONE_TO_ONE | Trait.CONTINUOUS,
    "SubqueryAlias": _ROW | Trait.ONE_TO_ONE | Trait.NAMES_KEPT | Trait.CONTINUOUS,
    "View": _ROW | Trait.ONE_TO_ONE,
    "Filter": _ROW | Trait.NAMES_KEPT | Trait.CONTINUOUS,
    "TypedFilter": _ROW,
    "MapElements": _ROW,
    "DeserializeToObject": _ROW,
    "SerializeFromObject": _ROW,
    "Generate": Trait.PER_ROW | Trait.REAL_TIME | Trait.CONTINUOUS,
    "EventTimeWatermark": Trait.PER_ROW | Trait.REAL_TIME | Trait.ONE_TO_ONE | Trait.NAMES_KEPT,
    "ResolvedHint": Trait.PER_ROW | Trait.REAL_TIME,
    "CollectMetrics": Trait.REAL_TIME | Trait.ONE_TO_ONE,
    "Expand": Trait.REAL_TIME,
    "AppendColumns": Trait.REAL_TIME,
    "Union": Trait.REAL_TIME,
    # Batch by batch.
    "MapPartitions": Trait.PER_BATCH | Trait.MAP_LIKE | Trait.REAL_TIME,
    "MapInArrow": Trait.PER_BATCH | Trait.CONTINUOUS,
    "MapInPandas": Trait.PER_BATCH | Trait.CONTINUOUS,
    "Repartition": Trait.PER_BATCH | Trait.GATHERING | Trait.NAMES_KEPT,
    "RepartitionByExpression": Trait.PER_BATCH | Trait.GATHERING | Trait.NAMES_KEPT | Trait.REAL_TIME,
    "RebalancePartitions": Trait.PER_BATCH | Trait.GATHERING,
    # Rows that were brought together.
    "Aggregate": Trait.STATEFUL | Trait.GATHERING | Trait.DROPS_LATE | Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION,
    "Join": Trait.STATEFUL | Trait.GATHERING | Trait.DROPS_LATE,
    "AsOfJoin": Trait.GATHERING,
    "Deduplicate": Trait.STATEFUL | Trait.DEDUPLICATION | Trait.GATHERING | Trait.NAMES_KEPT | Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION,
    "DeduplicateWithinWatermark": Trait.STATEFUL | Trait.DEDUPLICATION | Trait.GATHERING | Trait.DROPS_LATE,
    "Distinct": Trait.STATEFUL | Trait.DEDUPLICATION | Trait.GATHERING | Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION,
    "Sort": Trait.GATHERING | Trait.NAMES_KEPT,
    "Window": Trait.GATHERING,
    "Intersect": Trait.GATHERING,
    "Except": Trait.GATHERING,
    "Sample": Trait.GATHERING,
    "Offset": Trait.GATHERING,
    "Tail": Trait.GATHERING,
    "GlobalLimit": Trait.GATHERING | Trait.NAMES_KEPT,
    "LocalLimit": Trait.GATHERING | Trait.NAMES_KEPT | Trait.ONE_TO_ONE,
    # Functions over groups.
    "FlatMapGroupsInPandas": Trait.GATHERING,
    "FlatMapGroupsInArrow": Trait.GATHERING,
    "FlatMapCoGroupsInPandas": Trait.GATHERING,
    "FlatMapGroupsWithState": _FUNCTION,
    "FlatMapGroupsInPandasWithState": _FUNCTION,
    "TransformWithState": _FUNCTION | Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION,
    "TransformWithStateInPySpark": _FUNCTION | Trait.ABOVE_UNION,
    # Leaves.
    "StreamingRelationV2": _READ | Trait.ONE_TO_ONE,
    "StreamingRelation": _READ,
    "StreamingExecutionRelation": _READ,
}  # fmt: skip


def traits_of(name: str) -> Trait:
    """The properties of an operator, none for one that is not known."""
    return _PROPERTIES.get(name, Trait(0))
