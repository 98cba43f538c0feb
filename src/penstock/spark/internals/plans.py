"""What the analysed plan of a query tells (Spark 4.2, 4.3)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.spark.internals.catalyst import analysed, children, listed, name_of
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.sessions import is_classic

# What differs in the plans of two equal queries: objects' addresses and columns' numbers.
_OBJECT = re.compile(r"@[0-9a-f]+|#\d+L?")


@dataclass(frozen=True)
class StreamingRead:
    """A leaf of a plan that reads a stream."""

    format: str
    """In lower case; empty for a read of Spark's older kind, such as files."""
    options: Mapping[str, str] = field(repr=False)
    """By their names in lower case."""
    schema: StructType

    @classmethod
    def of(cls, leaf: Any) -> StreamingRead:
        """The read of a leaf of the JVM's plan."""
        schema = StructType.fromJson(json.loads(leaf.schema().json()))
        if name_of(leaf) != "StreamingRelationV2":
            return cls("", {}, schema)
        return cls(str(leaf.sourceName()).lower(), dict(leaf.extraOptions()), schema)


def streaming_reads(frame: DataFrame) -> list[StreamingRead] | None:
    """The streaming reads of a plan, from left to right; None over Spark Connect, which does not show them."""
    if not is_classic(frame):
        return None
    return [StreamingRead.of(leaf) for leaf in listed(analysed(frame).collectLeaves()) if leaf.isStreaming()]


def first_gathering_operator(frame: DataFrame) -> str | None:
    """The first operator that keeps a repeated micro-batch from being cut into the same tasks; None when there is none.

    Only classic sessions show their plan; for others the answer is None.
    """
    if not is_classic(frame):
        return None
    return next(
        (node.name for node in plan_tree(frame).walk() if Trait.GATHERING in traits_of(node.name)), None
    )


def may_retain_rows(frame: DataFrame) -> bool:
    """Whether rows may wait in a state store for a watermark; of a session that is not classic it is not known, and False."""
    if not is_classic(frame):
        return False
    nodes = {node.name for node in plan_tree(frame).walk()}
    return "EventTimeWatermark" in nodes and any(Trait.STATEFUL in traits_of(name) for name in nodes)


def watermarks_above(plan: Any, column: str) -> list[str]:
    """The event-time columns of the watermarks through which rows go that went through the one of a column before.

    Parameters
    ----------
    plan
        The JVM's logical plan.
    column
        The event-time column of the first one.
    """
    found: list[str] = []

    def look(node: Any, over: list[str]) -> None:
        if name_of(node) == "EventTimeWatermark":
            name = str(node.eventTime().name())
            found.extend(over if name == column else ())
            over = [*over, name]
        for child in children(node):
            look(child, over)

    look(plan, [])
    return found


def fingerprint(frame: DataFrame, *told: str) -> str:
    """A short name that is the same whenever the same program makes the same query, and says the same of it."""
    plan = str(analysed(frame).canonicalized().toString()) if is_classic(frame) else ""
    lines = [*told, frame.schema.json(), _OBJECT.sub("", plan)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
