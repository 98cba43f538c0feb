"""Traits of Spark's logical operators, on which all decisions about plans are based.

The operators have their names in a printed plan. An unknown operator has no traits, which is always safe.
"""

from __future__ import annotations

from enum import Flag, auto


class Trait(Flag):
    """Properties of an operator (Spark 4.2 and 4.3)."""

    PER_ROW = auto()
    """Each output row depends on one input row."""
    PER_BATCH = auto()
    """Each output row depends on rows of one micro-batch."""
    ONE_TO_ONE = auto()
    """It returns one row for each input row."""
    NAMES_KEPT = auto()
    """It keeps the names of its input columns."""
    GATHERING = auto()
    """A task gets rows of several input partitions, so a repeated micro-batch may have other tasks."""
    STATEFUL = auto()
    """It keeps state on a stream."""
    FUNCTION = auto()
    """A user's stateful function."""
    AGGREGATION = auto()
    """It keeps groups; includes ``SELECT DISTINCT``, for which each distinct row is a group."""
    DEDUPLICATION = auto()
    """It drops rows whose keys it has seen before."""
    DROPS_LATE = auto()
    """It drops rows older than the watermark, or counts repeated rows twice."""
    DROPS_LATE_BY_KEY = auto()
    """It drops rows older than the watermark if one of its keys has one."""
    STREAMING_READ = auto()
    """A leaf that reads a stream."""
    MAP_LIKE = auto()
    """Spark's continuous trigger supports it (``UnsupportedOperationChecker.checkForContinuous``)."""
    CONTINUOUS = auto()
    """Penstock's continuous queries support it."""
    REAL_TIME = auto()
    """The real-time trigger supports it (``RealTimeModeAllowlist``)."""
    REAL_TIME_4_3 = auto()
    """The real-time trigger supports it since Spark 4.3."""
    ABOVE_UNION = auto()
    """The real-time trigger does not support it below a union."""
    REFUSED = auto()
    """Spark refuses it on streams, in any output mode."""
    NEW_COLUMNS = auto()
    """A function defines its output columns, which have a watermark only if the function's schema has one."""
    TRANSFORM = auto()
    """``transformWithState``: a stateful function for any output mode, with its state in RocksDB."""
    PYTHON_STATE = auto()
    """A stateful function in Python."""


_ROW = Trait.PER_ROW | Trait.MAP_LIKE | Trait.REAL_TIME
_READ = Trait.STREAMING_READ | Trait.MAP_LIKE | Trait.REAL_TIME
_FUNCTION = Trait.STATEFUL | Trait.FUNCTION | Trait.GATHERING | Trait.DROPS_LATE | Trait.NEW_COLUMNS
_ABOVE_UNION_4_3 = Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION
_AGGREGATION = Trait.STATEFUL | Trait.AGGREGATION | Trait.GATHERING | Trait.DROPS_LATE | _ABOVE_UNION_4_3
_DEDUPLICATION = Trait.STATEFUL | Trait.DEDUPLICATION | Trait.GATHERING
_TRAITS = {
    # Row by row.
    "Project": _ROW | Trait.ONE_TO_ONE | Trait.CONTINUOUS,
    "SubqueryAlias": _ROW | Trait.ONE_TO_ONE | Trait.NAMES_KEPT | Trait.CONTINUOUS,
    "View": _ROW | Trait.ONE_TO_ONE,
    "Filter": _ROW | Trait.NAMES_KEPT | Trait.CONTINUOUS,
    "TypedFilter": _ROW,
    "MapElements": _ROW,
    "DeserializeToObject": _ROW,
    "SerializeFromObject": _ROW | Trait.NEW_COLUMNS,
    "Generate": Trait.PER_ROW | Trait.REAL_TIME | Trait.CONTINUOUS,
    "EventTimeWatermark": Trait.PER_ROW | Trait.REAL_TIME | Trait.ONE_TO_ONE | Trait.NAMES_KEPT,
    "ResolvedHint": Trait.PER_ROW | Trait.REAL_TIME,
    "CollectMetrics": Trait.REAL_TIME | Trait.ONE_TO_ONE,
    "Expand": Trait.REAL_TIME,
    "AppendColumns": Trait.REAL_TIME,
    "Union": Trait.REAL_TIME,
    # Batch by batch.
    "MapPartitions": Trait.PER_BATCH | Trait.MAP_LIKE | Trait.REAL_TIME,
    "MapInArrow": Trait.PER_BATCH | Trait.CONTINUOUS | Trait.NEW_COLUMNS,
    "MapInPandas": Trait.PER_BATCH | Trait.CONTINUOUS | Trait.NEW_COLUMNS,
    "Repartition": Trait.PER_BATCH | Trait.GATHERING | Trait.NAMES_KEPT,
    "RepartitionByExpression": Trait.PER_BATCH | Trait.GATHERING | Trait.NAMES_KEPT | Trait.REAL_TIME,
    "RebalancePartitions": Trait.PER_BATCH | Trait.GATHERING,
    # Across rows of several tasks.
    "Aggregate": _AGGREGATION,
    "Distinct": _AGGREGATION | Trait.NAMES_KEPT,
    "Join": Trait.STATEFUL | Trait.GATHERING | Trait.DROPS_LATE,
    "AsOfJoin": Trait.GATHERING,
    "Deduplicate": _DEDUPLICATION | Trait.DROPS_LATE_BY_KEY | _ABOVE_UNION_4_3 | Trait.NAMES_KEPT,
    "DeduplicateWithinWatermark": _DEDUPLICATION | Trait.DROPS_LATE,
    "Sort": Trait.GATHERING | Trait.NAMES_KEPT,
    "Window": Trait.GATHERING | Trait.REFUSED,
    "Intersect": Trait.GATHERING | Trait.REFUSED,
    "Except": Trait.GATHERING,
    "Sample": Trait.GATHERING | Trait.REFUSED,
    "Offset": Trait.GATHERING | Trait.REFUSED,
    "Tail": Trait.GATHERING | Trait.REFUSED,
    "GlobalLimit": Trait.GATHERING | Trait.NAMES_KEPT,
    "LocalLimit": Trait.GATHERING | Trait.NAMES_KEPT | Trait.ONE_TO_ONE,
    # Functions over groups.
    "FlatMapGroupsInPandas": Trait.GATHERING | Trait.NEW_COLUMNS,
    "FlatMapGroupsInArrow": Trait.GATHERING | Trait.NEW_COLUMNS,
    "FlatMapCoGroupsInPandas": Trait.GATHERING | Trait.NEW_COLUMNS,
    "FlatMapCoGroupsInArrow": Trait.GATHERING | Trait.NEW_COLUMNS,
    "FlatMapGroupsWithState": _FUNCTION,
    "FlatMapGroupsInPandasWithState": _FUNCTION | Trait.PYTHON_STATE,
    "TransformWithState": _FUNCTION | Trait.TRANSFORM | Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION,
    "TransformWithStateInPySpark": _FUNCTION | Trait.TRANSFORM | Trait.PYTHON_STATE | Trait.ABOVE_UNION,
    # Leaves.
    "StreamingRelationV2": _READ | Trait.ONE_TO_ONE,
    "StreamingRelation": _READ,
    "StreamingExecutionRelation": _READ,
}  # fmt: skip

CONTINUOUS_GENERATORS = ("Explode", "PosExplode", "Inline", "JsonTuple")
"""The expressions of a ``Generate`` that Penstock's continuous queries support."""


def traits_of(name: str) -> Trait:
    return _TRAITS.get(name, Trait(0))
