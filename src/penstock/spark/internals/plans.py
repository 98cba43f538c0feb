"""Properties of a query's analysed plan (Spark 4.2, 4.3)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.spark.internals.catalyst import analysed, children, node_name, to_list
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.sessions import is_classic

# Addresses of objects and ids of columns differ between the plans of two equal queries.
_IDENTITIES = re.compile(r"@[0-9a-f]+|#\d+L?")


@dataclass(frozen=True)
class StreamingRead:
    """A leaf of a plan that reads a stream."""

    format: str
    """In lower case; empty for a source of the older interface, such as files."""
    options: Mapping[str, str] = field(repr=False)
    """By their names in lower case."""
    _leaf: Any = field(repr=False, compare=False)

    @classmethod
    def of(cls, leaf: Any) -> StreamingRead:
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
    """Return the first operator because of which a repeated micro-batch may be split into other tasks.

    None if there is none, or over Spark Connect, which does not show its plan.
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


def watermarks_above(plan: Any, column: str) -> list[str]:
    """Return the event-time columns of the watermarks above the watermark of a column.

    Parameters
    ----------
    plan
        The JVM's logical plan.
    column
        The event-time column of the lower watermark.
    """
    columns: list[str] = []

    def visit(node: Any, above: list[str]) -> None:
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
