"""Traits of Spark's logical operators on streams: the table behind every decision about a plan.

The names are those in a printed plan. An operator that is not in the table has no trait, which is the safe
answer for each of them.
"""

from __future__ import annotations

from enum import Flag, auto


class Trait(Flag):
    """A property of an operator (Spark 4.2 and 4.3, unless noted)."""

    PER_ROW = auto()
    """Each output row depends on one input row."""
    PER_BATCH = auto()
    """Output rows depend on rows of one micro-batch only."""
    ONE_TO_ONE = auto()
    """One output row for each input row."""
    NAMES_KEPT = auto()
    """Columns keep their names."""
    GATHERING = auto()
    """A task depends on more than one input partition, so a repeated micro-batch may be split into other
    tasks.
    """
    STATEFUL = auto()
    """Keeps state on a stream."""
    FUNCTION = auto()
    """A stateful function of the user."""
    DEDUPLICATION = auto()
    """Drops rows with keys that it has seen before."""
    DROPS_LATE = auto()
    """Drops rows older than the watermark, or counts repeated rows twice."""
    STREAMING_READ = auto()
    """A leaf that reads a stream."""
    MAP_LIKE = auto()
    """Supported by Spark's continuous trigger (``UnsupportedOperationChecker.checkForContinuous``)."""
    CONTINUOUS = auto()
    """Supported by Penstock's continuous queries."""
    REAL_TIME = auto()
    """Supported by the real-time trigger (``RealTimeModeAllowlist``)."""
    REAL_TIME_4_3 = auto()
    """Supported by the real-time trigger from Spark 4.3 on."""
    ABOVE_UNION = auto()
    """Not supported by the real-time trigger below a union."""


_ROW = Trait.PER_ROW | Trait.MAP_LIKE | Trait.REAL_TIME
_READ = Trait.STREAMING_READ | Trait.MAP_LIKE | Trait.REAL_TIME
_STATE = Trait.STATEFUL | Trait.GATHERING
_FUNCTION = _STATE | Trait.FUNCTION | Trait.DROPS_LATE
_FROM_4_3 = Trait.REAL_TIME_4_3 | Trait.ABOVE_UNION
_TRAITS = {
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
    # Over rows of several tasks.
    "Aggregate": _STATE | Trait.DROPS_LATE | _FROM_4_3,
    "Join": _STATE | Trait.DROPS_LATE,
    "AsOfJoin": Trait.GATHERING,
    "Deduplicate": _STATE | Trait.DEDUPLICATION | Trait.NAMES_KEPT | _FROM_4_3,
    "DeduplicateWithinWatermark": _STATE | Trait.DEDUPLICATION | Trait.DROPS_LATE,
    "Distinct": _STATE | Trait.DEDUPLICATION | _FROM_4_3,
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
    "TransformWithState": _FUNCTION | _FROM_4_3,
    "TransformWithStateInPySpark": _FUNCTION | Trait.ABOVE_UNION,
    # Leaves.
    "StreamingRelationV2": _READ | Trait.ONE_TO_ONE,
    "StreamingRelation": _READ,
    "StreamingExecutionRelation": _READ,
}  # fmt: skip


def traits_of(name: str) -> Trait:
    """Return the traits of an operator, none for an unknown one."""
    return _TRAITS.get(name, Trait(0))
