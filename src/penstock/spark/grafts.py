"""Other leaves in the place of a plan's streaming reads (classic sessions, Spark 4.2 and 4.3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType


@dataclass(frozen=True)
class StreamingRead:
    """A leaf of a plan that reads a stream."""

    format: str
    """In lower case; empty for a read of Spark's older kind, such as files."""
    options: Mapping[str, str] = field(repr=False)
    """By their names in lower case."""
    schema: StructType


StandIn = Callable[[StreamingRead], DataFrame | None]
"""What stands in for a streaming read, with columns of the same types in the same order; None to leave it."""


def streaming_leaves(frame: DataFrame) -> list[StreamingRead]:
    """The streaming reads of a plan, from left to right."""
    found = _java(frame).queryExecution().analyzed().collectLeaves()
    leaves = [found.apply(number) for number in range(found.size())]
    return [_read(leaf) for leaf in leaves if leaf.isStreaming()]


def grafted(frame: DataFrame, stand_in: StandIn) -> DataFrame:
    """The same transformations over other leaves; a DataFrame that is not streaming if none of them is.

    Parameters
    ----------
    stand_in
        Called for each streaming read.
    """
    session: Any = frame.sparkSession
    jvm = session._jvm
    plan = _regrown(jvm, _java(frame).queryExecution().analyzed(), stand_in)
    if plan is None:
        return frame
    # What each method of a DataFrame does with the plan that it makes.
    made = jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, plan)
    return DataFrame(made, session)


def _java(frame: Any) -> Any:
    return frame._jdf


def _regrown(jvm: Any, node: Any, stand_in: StandIn) -> Any:
    """The node over other leaves; None where all of them stay."""
    children = node.children()
    below = [children.apply(number) for number in range(children.size())]
    if not below:
        other = stand_in(_read(node)) if node.isStreaming() else None
        return None if other is None else _called_alike(jvm, node, other)
    new = [_regrown(jvm, child, stand_in) for child in below]
    if all(child is None for child in new):
        return None
    kept = [old if child is None else child for old, child in zip(below, new, strict=True)]
    return node.withNewChildren(_seq(jvm, kept))


def _called_alike(jvm: Any, leaf: Any, other: DataFrame) -> Any:
    """Another plan whose columns are known by the numbers, the names and the metadata that the leaf's are known by."""
    plan = _java(other).queryExecution().analyzed()
    wanted, found = leaf.output(), plan.output()
    catalyst, option = jvm.org.apache.spark.sql.catalyst, jvm.scala.Option
    columns = []
    for number in range(wanted.size()):
        column = wanted.apply(number)
        known = column.exprId(), column.qualifier(), option.apply(column.metadata()), _seq(jvm, [])
        columns.append(catalyst.expressions.Alias(found.apply(number), column.name(), *known))
    return catalyst.plans.logical.Project(_seq(jvm, columns), plan)


def _seq(jvm: Any, items: list[Any]) -> Any:
    return jvm.PythonUtils.toSeq(items)


def _read(leaf: Any) -> StreamingRead:
    schema = StructType.fromJson(json.loads(leaf.schema().json()))
    if leaf.nodeName() != "StreamingRelationV2":
        return StreamingRead("", {}, schema)
    return StreamingRead(str(leaf.sourceName()).lower(), dict(leaf.extraOptions()), schema)
