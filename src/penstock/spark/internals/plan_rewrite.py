"""Replacement of the streaming reads in a plan (classic sessions, Spark 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame

from penstock.spark.internals.catalyst import (
    analysed,
    children,
    to_dataframe,
    to_list,
    to_seq,
    with_children,
)
from penstock.spark.internals.plans import StreamingRead

Replacement = Callable[[StreamingRead], DataFrame | None]
"""Returns a DataFrame in place of a streaming read, with columns of the same types in the same order.

None to keep the read.
"""


def replace_reads(frame: DataFrame, replacement: Replacement) -> DataFrame:
    """Apply the same transformations to other reads; the result is not streaming if none of them is."""
    session: Any = frame.sparkSession
    plan = _rebuilt(session._jvm, analysed(frame), replacement)
    return frame if plan is None else to_dataframe(session, plan)


def _rebuilt(jvm: Any, node: Any, replacement: Replacement) -> Any:
    """Rebuild a node over the replaced reads; None if none below it is replaced."""
    below = children(node)
    if not below:
        other = replacement(StreamingRead.of(node)) if node.isStreaming() else None
        return None if other is None else _with_attributes_of(jvm, node, other)
    new = [_rebuilt(jvm, child, replacement) for child in below]
    if all(child is None for child in new):
        return None
    return with_children(
        jvm, node, [old if child is None else child for old, child in zip(below, new, strict=True)]
    )


def _with_attributes_of(jvm: Any, leaf: Any, other: DataFrame) -> Any:
    """Give the columns of another plan the ids, names and metadata of a leaf's columns."""
    plan = analysed(other)
    catalyst, option = jvm.org.apache.spark.sql.catalyst, jvm.scala.Option
    columns = []
    for column, value in zip(to_list(leaf.output()), to_list(plan.output()), strict=True):
        identity = column.exprId(), column.qualifier(), option.apply(column.metadata()), to_seq(jvm, [])
        columns.append(catalyst.expressions.Alias(value, column.name(), *identity))
    return catalyst.plans.logical.Project(to_seq(jvm, columns), plan)
