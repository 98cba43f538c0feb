"""Spark's logical operators, and what each does to a stream: the one table that every decision about plans
goes by.

The names are those that a plan is printed with. An operator that is not in the table has none of the
properties, which is the careful answer wherever one is asked for.
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


_ROW = Trait.PER_ROW | Trait.MAP_LIKE | Trait.REAL_TIME
_READ = Trait.STREAMING_READ | Trait.MAP_LIKE | Trait.REAL_TIME
_FUNCTION = Trait.STATEFUL | Trait.FUNCTION | Trait.GATHERING | Trait.DROPS_LATE | Trait.NEW_COLUMNS
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
    # Rows that were brought together.
    "Aggregate": Trait.STATEFUL | Trait.GATHERING | Trait.DROPS_LATE | Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION,
    "Join": Trait.STATEFUL | Trait.GATHERING | Trait.DROPS_LATE,
    "AsOfJoin": Trait.GATHERING,
    "Deduplicate": Trait.STATEFUL | Trait.DEDUPLICATION | Trait.GATHERING | Trait.DROPS_LATE_BY_KEY | Trait.NAMES_KEPT
    | Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION,
    "DeduplicateWithinWatermark": Trait.STATEFUL | Trait.DEDUPLICATION | Trait.GATHERING | Trait.DROPS_LATE,
    "Distinct": Trait.STATEFUL | Trait.DEDUPLICATION | Trait.GATHERING | Trait.DROPS_LATE_BY_KEY | Trait.REAL_TIME_4_3
    | Trait.ABOVE_UNION,
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
"""The expressions of a ``Generate`` that Penstock's continuous queries take."""


def traits_of(name: str) -> Trait:
    """The properties of an operator, none for one that is not known."""
    return _TRAITS.get(name, Trait(0))
