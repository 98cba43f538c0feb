"""Other leaves in the place of a plan's streaming reads (classic sessions, Spark 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame

from penstock.spark.internals.catalyst import analysed, children, frame_of, listed, sequence
from penstock.spark.internals.plans import StreamingRead

StandIn = Callable[[StreamingRead], DataFrame | None]
"""What stands in for a streaming read, with columns of the same types in the same order; None to leave it."""


def replace_reads(frame: DataFrame, stand_in: StandIn) -> DataFrame:
    """The same transformations over other leaves; a DataFrame that is not streaming if none of them is.

    Parameters
    ----------
    stand_in
        Called for each streaming read.
    """
    session: Any = frame.sparkSession
    plan = _rebuilt(session._jvm, analysed(frame), stand_in)
    return frame if plan is None else frame_of(session, plan)


def _rebuilt(jvm: Any, node: Any, stand_in: StandIn) -> Any:
    """The node over other leaves; None where all of them stay."""
    below = children(node)
    if not below:
        other = stand_in(StreamingRead.of(node)) if node.isStreaming() else None
        return None if other is None else _called_alike(jvm, node, other)
    new = [_rebuilt(jvm, child, stand_in) for child in below]
    if all(child is None for child in new):
        return None
    kept = [old if child is None else child for old, child in zip(below, new, strict=True)]
    return node.withNewChildren(sequence(jvm, kept))


def _called_alike(jvm: Any, leaf: Any, other: DataFrame) -> Any:
    """Another plan whose columns are known by the numbers, the names and the metadata that the leaf's are known by."""
    plan = analysed(other)
    catalyst, option = jvm.org.apache.spark.sql.catalyst, jvm.scala.Option
    columns = []
    for column, found in zip(listed(leaf.output()), listed(plan.output()), strict=True):
        known = column.exprId(), column.qualifier(), option.apply(column.metadata()), sequence(jvm, [])
        columns.append(catalyst.expressions.Alias(found, column.name(), *known))
    return catalyst.plans.logical.Project(sequence(jvm, columns), plan)
