"""Properties of a query's analysed plan, and replacement of the streaming reads in it (Spark 4.2, 4.3)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from py4j.java_gateway import JavaObject, JVMView
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.spark.internals.catalyst import (
    analysed,
    children,
    node_name,
    to_dataframe,
    to_list,
    to_seq,
    with_children,
)
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.sessions import is_classic, jvm_of

# Addresses of objects and ids of columns differ between the plans of two equal queries.
_IDENTITIES = re.compile(r"@[0-9a-f]+|#\d+L?")


@dataclass(frozen=True)
class StreamingRead:
    """A leaf of a plan that reads a stream."""

    format: str
    """In lower case; empty for a source of the older interface, such as files."""
    options: Mapping[str, str] = field(repr=False)
    """By their names in lower case."""
    _leaf: JavaObject = field(repr=False, compare=False)

    @classmethod
    def of(cls, leaf: JavaObject) -> StreamingRead:
        """Describe a leaf of a JVM plan."""
        if node_name(leaf) != "StreamingRelationV2":
            return cls("", {}, leaf)
        return cls(str(leaf.sourceName()).lower(), dict(leaf.extraOptions()), leaf)

    @cached_property
    def schema(self) -> StructType:
        return StructType.fromJson(json.loads(self._leaf.schema().json()))


def streaming_reads(frame: DataFrame) -> list[StreamingRead] | None:
    """Return the streaming reads of a plan, from left to right.

    None over Spark Connect, which does not show them.
    """
    if not is_classic(frame):
        return None
    return [StreamingRead.of(leaf) for leaf in to_list(analysed(frame).collectLeaves()) if leaf.isStreaming()]


def first_gathering_operator(frame: DataFrame) -> str | None:
    """Return the first operator that may change the tasks of a repeated micro-batch.

    None over Spark Connect, which does not show its plan.
    """
    if not is_classic(frame):
        return None
    names = (node.name for node in plan_tree(frame).walk())
    return next((name for name in names if Trait.GATHERING in traits_of(name)), None)


def may_retain_rows(frame: DataFrame) -> bool:
    """Return whether rows may wait in a state store for a watermark.

    False over Spark Connect, where that is unknown.
    """
    if not is_classic(frame):
        return False
    names = {node.name for node in plan_tree(frame).walk()}
    return "EventTimeWatermark" in names and any(Trait.STATEFUL in traits_of(name) for name in names)


def watermarks_above(plan: JavaObject, column: str) -> list[str]:
    """Return the event-time columns of the watermarks above the one of a column, in a JVM plan."""
    columns: list[str] = []

    def visit(node: JavaObject, above: list[str]) -> None:
        if node_name(node) == "EventTimeWatermark":
            name = str(node.eventTime().name())
            columns.extend(above if name == column else ())
            above = [*above, name]
        for child in children(node):
            visit(child, above)

    visit(plan, [])
    return columns


def fingerprint(frame: DataFrame, *details: str) -> str:
    """Return a short name that is the same for each run of the same query with the same details."""
    plan = str(analysed(frame).canonicalized().toString()) if is_classic(frame) else ""
    lines = [*details, frame.schema.json(), _IDENTITIES.sub("", plan)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


Replacement = Callable[[StreamingRead], DataFrame | None]
"""Returns a DataFrame in place of a streaming read, with columns of the same types in the same order.

None to keep the read.
"""


def replace_reads(frame: DataFrame, replacement: Replacement) -> DataFrame:
    """Apply the same transformations to other reads; the result is not streaming if none of them is."""
    spark = frame.sparkSession
    plan = _rebuilt(jvm_of(spark), analysed(frame), replacement)
    return frame if plan is None else to_dataframe(spark, plan)


def _rebuilt(jvm: JVMView, node: JavaObject, replacement: Replacement) -> JavaObject | None:
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


def _with_attributes_of(jvm: JVMView, leaf: JavaObject, other: DataFrame) -> JavaObject:
    """Give the columns of another plan the ids, names and metadata of a leaf's columns."""
    plan = analysed(other)
    catalyst, option = jvm.org.apache.spark.sql.catalyst, jvm.scala.Option
    columns = []
    for column, value in zip(to_list(leaf.output()), to_list(plan.output()), strict=True):
        identity = column.exprId(), column.qualifier(), option.apply(column.metadata()), to_seq(jvm, [])
        columns.append(catalyst.expressions.Alias(value, column.name(), *identity))
    return catalyst.plans.logical.Project(to_seq(jvm, columns), plan)
