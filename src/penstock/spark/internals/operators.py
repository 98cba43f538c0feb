"""Spark's logical operators, and what each does to a stream: the one table that every decision about plans
goes by.

The names are those that a plan is printed with. An operator that is not in the table has none of the
properties, which is the careful answer wherever one is asked for.
"""

from __future__ import annotations

from enum import Flag, auto


class Is(Flag):
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
    """What a task does depends on more than the rows of one input partition, so a repeated micro-batch may
    be cut into other tasks.
    """
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
    REFUSED = auto()
    """Spark takes it on no stream, in any output mode."""
    DROPS_LATE_BY_KEY = auto()
    """It drops rows behind the watermark where one of its keys has one."""
    NEW_COLUMNS = auto()
    """Its columns are those that a function returns, which have no watermark unless the function's schema
    has.
    """
    TRANSFORM = auto()
    """``transformWithState``: of the stateful functions it may have any output mode, and keeps its state
    in RocksDB.
    """
    PYTHON_STATE = auto()
    """A stateful function in Python."""


_ROW = Is.PER_ROW | Is.MAP_LIKE | Is.REAL_TIME
_READ = Is.STREAMING_READ | Is.MAP_LIKE | Is.REAL_TIME
_FUNCTION = Is.STATEFUL | Is.FUNCTION | Is.GATHERING | Is.DROPS_LATE | Is.NEW_COLUMNS
_PROPERTIES = {
    # Row by row.
    "Project": _ROW | Is.ONE_TO_ONE | Is.CONTINUOUS,
    "SubqueryAlias": _ROW | Is.ONE_TO_ONE | Is.NAMES_KEPT | Is.CONTINUOUS,
    "View": _ROW | Is.ONE_TO_ONE,
    "Filter": _ROW | Is.NAMES_KEPT | Is.CONTINUOUS,
    "TypedFilter": _ROW,
    "MapElements": _ROW,
    "DeserializeToObject": _ROW,
    "SerializeFromObject": _ROW | Is.NEW_COLUMNS,
    "Generate": Is.PER_ROW | Is.REAL_TIME | Is.CONTINUOUS,
    "EventTimeWatermark": Is.PER_ROW | Is.REAL_TIME | Is.ONE_TO_ONE | Is.NAMES_KEPT,
    "ResolvedHint": Is.PER_ROW | Is.REAL_TIME,
    "CollectMetrics": Is.REAL_TIME | Is.ONE_TO_ONE,
    "Expand": Is.REAL_TIME,
    "AppendColumns": Is.REAL_TIME,
    "Union": Is.REAL_TIME,
    # Batch by batch.
    "MapPartitions": Is.PER_BATCH | Is.MAP_LIKE | Is.REAL_TIME,
    "MapInArrow": Is.PER_BATCH | Is.CONTINUOUS | Is.NEW_COLUMNS,
    "MapInPandas": Is.PER_BATCH | Is.CONTINUOUS | Is.NEW_COLUMNS,
    "Repartition": Is.PER_BATCH | Is.GATHERING | Is.NAMES_KEPT,
    "RepartitionByExpression": Is.PER_BATCH | Is.GATHERING | Is.NAMES_KEPT | Is.REAL_TIME,
    "RebalancePartitions": Is.PER_BATCH | Is.GATHERING,
    # Rows that were brought together.
    "Aggregate": Is.STATEFUL | Is.GATHERING | Is.DROPS_LATE | Is.REAL_TIME_4_3 | Is.ABOVE_UNION,
    "Join": Is.STATEFUL | Is.GATHERING | Is.DROPS_LATE,
    "AsOfJoin": Is.GATHERING,
    "Deduplicate": Is.STATEFUL | Is.DEDUPLICATION | Is.GATHERING | Is.DROPS_LATE_BY_KEY | Is.NAMES_KEPT
    | Is.REAL_TIME_4_3 | Is.ABOVE_UNION,
    "DeduplicateWithinWatermark": Is.STATEFUL | Is.DEDUPLICATION | Is.GATHERING | Is.DROPS_LATE,
    "Distinct": Is.STATEFUL | Is.DEDUPLICATION | Is.GATHERING | Is.DROPS_LATE_BY_KEY | Is.REAL_TIME_4_3
    | Is.ABOVE_UNION,
    "Sort": Is.GATHERING | Is.NAMES_KEPT,
    "Window": Is.GATHERING | Is.REFUSED,
    "Intersect": Is.GATHERING | Is.REFUSED,
    "Except": Is.GATHERING,
    "Sample": Is.GATHERING | Is.REFUSED,
    "Offset": Is.GATHERING | Is.REFUSED,
    "Tail": Is.GATHERING | Is.REFUSED,
    "GlobalLimit": Is.GATHERING | Is.NAMES_KEPT,
    "LocalLimit": Is.GATHERING | Is.NAMES_KEPT | Is.ONE_TO_ONE,
    # Functions over groups.
    "FlatMapGroupsInPandas": Is.GATHERING | Is.NEW_COLUMNS,
    "FlatMapGroupsInArrow": Is.GATHERING | Is.NEW_COLUMNS,
    "FlatMapCoGroupsInPandas": Is.GATHERING | Is.NEW_COLUMNS,
    "FlatMapCoGroupsInArrow": Is.GATHERING | Is.NEW_COLUMNS,
    "FlatMapGroupsWithState": _FUNCTION,
    "FlatMapGroupsInPandasWithState": _FUNCTION | Is.PYTHON_STATE,
    "TransformWithState": _FUNCTION | Is.TRANSFORM | Is.REAL_TIME_4_3 | Is.ABOVE_UNION,
    "TransformWithStateInPySpark": _FUNCTION | Is.TRANSFORM | Is.PYTHON_STATE | Is.ABOVE_UNION,
    # Leaves.
    "StreamingRelationV2": _READ | Is.ONE_TO_ONE,
    "StreamingRelation": _READ,
    "StreamingExecutionRelation": _READ,
}  # fmt: skip

CONTINUOUS_GENERATORS = ("Explode", "PosExplode", "Inline", "JsonTuple")
"""The expressions of a ``Generate`` that Penstock's continuous queries take."""


def of(name: str) -> Is:
    """The properties of an operator, none for one that is not known."""
    return _PROPERTIES.get(name, Is(0))
