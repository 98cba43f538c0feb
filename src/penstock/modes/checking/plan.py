"""The plan and settings of a query, and properties of its operators that several rules use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pyspark.sql import DataFrame

from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_nodes import grouping_expressions, source_below, watermark_of
from penstock.spark.internals.plan_text import Node, has_watermark, optimized_tree, physical_tree, without_ids
from penstock.spark.internals.plans import python_aggregates
from penstock.spark.internals.sessions import is_classic

CHECK_SETTING = "spark.sql.streaming.unsupportedOperationCheck"
MULTIPLE_SETTING = "spark.sql.streaming.statefulOperator.allowMultiple"
"""Whether each operator has a watermark of its own, rather than one for the whole query."""
PROVIDER_SETTING = "spark.sql.streaming.stateStore.providerClass"


@dataclass(frozen=True)
class Watermark:
    """A ``withWatermark`` of the query."""

    node: Node
    column: str
    delay: str
    source: str
    """The queue or source below the watermark."""


@dataclass(frozen=True)
class Plan:
    """The plan of a streaming query before it starts."""

    root: Node
    settings: Mapping[str, str] = field(default_factory=dict)
    """Spark settings that affect output modes."""
    frame: DataFrame | None = None
    """The DataFrame; None if only the printed plan is available."""

    @cached_property
    def optimized(self) -> Plan | None:
        """The plan that Spark's optimizer passes to the planner; None if it is unknown."""
        root = None if self.frame is None else optimized_tree(self.frame)
        return None if root is None else Plan(root, self.settings)

    @cached_property
    def physical(self) -> Node | None:
        """The physical plan in append mode; None if it is unknown."""
        return None if self.frame is None else physical_tree(self.frame)

    @cached_property
    def python_aggregates(self) -> frozenset[str] | None:
        """The printed calls of Python aggregate functions; None if only the printed plan is available."""
        if self.frame is None or not is_classic(self.frame):
            return None
        return python_aggregates(self.frame)

    @property
    def keeps_state_in_rocksdb(self) -> bool:
        return self.settings.get(PROVIDER_SETTING, "").endswith("RocksDBStateStoreProvider")

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.root.walk())

    def streaming(self, *names: str) -> list[Node]:
        """Return the streaming operators with some names, from the top."""
        return [node for node in self.nodes if node.streaming and node.name in names]

    def streaming_with(self, properties: Trait) -> list[Node]:
        """Return the streaming operators with some properties, from the top."""
        return [node for node in self.nodes if node.streaming and properties in traits_of(node.name)]

    @cached_property
    def aggregates(self) -> list[Node]:
        return self.streaming_with(Trait.AGGREGATION)

    @cached_property
    def checked_aggregate(self) -> Node | None:
        """The only aggregation that Spark's checker requires to suit the output mode: the topmost one."""
        is_checked = self.settings.get(CHECK_SETTING, "true") == "true"
        return self.aggregates[0] if is_checked and self.aggregates else None

    @cached_property
    def functions(self) -> list[Node]:
        return self.streaming_with(Trait.FUNCTION)

    @cached_property
    def deduplications(self) -> list[Node]:
        return self.streaming_with(Trait.DEDUPLICATION)

    @cached_property
    def joins(self) -> list[Node]:
        """Joins of two streams."""
        return [node for node in self.streaming("Join") if all(child.streaming for child in node.children)]

    @cached_property
    def excepts(self) -> list[Node]:
        """Operators that subtract a batch from a stream."""
        nodes = self.streaming("Except")
        return [node for node in nodes if [child.streaming for child in node.children] == [True, False]]

    @cached_property
    def reads(self) -> list[Node]:
        """The sources of the query."""
        return [node for node in self.nodes if Trait.STREAMING_READ in traits_of(node.name)]

    @cached_property
    def limits(self) -> list[Node]:
        return self.streaming("GlobalLimit")

    @cached_property
    def stateful(self) -> list[Node]:
        """All operators that keep state, from the top."""
        operators = [*self.aggregates, *self.functions, *self.deduplications, *self.joins, *self.limits]
        operators += self.excepts
        return sorted(operators, key=lambda node: node.number)

    @cached_property
    def watermarks(self) -> list[Watermark]:
        return [
            Watermark(node, *watermark_of(node), source_below(node))
            for node in self.streaming("EventTimeWatermark")
        ]


def keys_of(node: Node) -> str:
    """Format the grouping expressions of an aggregation, or the keys of a deduplication."""
    return ", ".join(map(without_ids, grouping_expressions(node)))


def expires(node: Node) -> bool:
    """Return whether a grouping column of an aggregation or deduplication has a watermark."""
    return any(has_watermark(expression) for expression in grouping_expressions(node))


def above_aggregation(node: Node) -> bool:
    """Return whether a streaming aggregation is below an operator."""
    return any(child.streaming and Trait.AGGREGATION in traits_of(child.name) for child in node.descendants())


def operators_between(node: Node, below: Node) -> Iterator[Node]:
    """Return the operators between two operators, from the top."""
    for child in node.children:
        if below in child.walk():
            if child is not below:
                yield child
                yield from operators_between(child, below)
            return
