"""What the rules look at: a query's plan, settings, sink and trigger."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import (
    Node,
    grouping_expressions,
    groups_by_session,
    has_watermark,
    list_items,
    without_ids,
)

_NO_TIME = ("NoTimeout", "NoTime")
_WINDOW = re.compile(r"window#\d+")
_WATERMARK = re.compile(r"(?:[0-9a-f-]{36}, )?(.+?)#\d+L?(?:-T\d+ms)?(?:: [^,]+)?, (.+)$")


@dataclass(frozen=True)
class Watermark:
    """A ``withWatermark`` of the query."""

    node: Node
    column: str
    delay: str
    source: str
    """What is read below it."""


@dataclass(frozen=True)
class Plan:
    """A streaming query before it starts."""

    root: Node
    settings: Mapping[str, str] = field(default_factory=dict)
    """Spark's settings that change what a mode does."""

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.root.walk())

    def streaming(self, *names: str) -> list[Node]:
        """The streaming operators of some names, from the top."""
        return [node for node in self.nodes if node.streaming and node.name in names]

    def streaming_that(self, properties: Trait) -> list[Node]:
        """The streaming operators with some properties, from the top."""
        return [node for node in self.nodes if node.streaming and properties in traits_of(node.name)]

    @cached_property
    def aggregates(self) -> list[Node]:
        return self.streaming("Aggregate")

    @cached_property
    def functions(self) -> list[Node]:
        return self.streaming_that(Trait.FUNCTION)

    @cached_property
    def deduplications(self) -> list[Node]:
        return self.streaming_that(Trait.DEDUPLICATION)

    @cached_property
    def joins(self) -> list[Node]:
        """Joins of two streams."""
        return [node for node in self.streaming("Join") if all(child.streaming for child in node.children)]

    @cached_property
    def limits(self) -> list[Node]:
        return self.streaming("GlobalLimit")

    @cached_property
    def stateful(self) -> list[Node]:
        """All operators that keep state, from the top."""
        found = [*self.aggregates, *self.functions, *self.deduplications, *self.joins, *self.limits]
        return sorted(found, key=lambda node: node.number)

    @cached_property
    def watermarks(self) -> list[Watermark]:
        return [_watermark(node) for node in self.streaming("EventTimeWatermark")]


def _watermark(node: Node) -> Watermark:
    match = _WATERMARK.match(node.text)
    column, delay = (match[1], match[2]) if match else (node.text, "")
    return Watermark(node, column, delay, _source(node))


def _source(node: Node) -> str:
    leaf = next((each for each in node.walk() if each.streaming and not each.children), node)
    return source_of(leaf)


def source_of(leaf: Node) -> str:
    """What a relation reads, as it is called."""
    # The arguments are the provider, its name, ...; of the older kind the source, such as FileSource[folder], ...
    place = 1 if leaf.name == "StreamingRelationV2" else 0
    return leaf.arguments[place] if len(leaf.arguments) > place else leaf.name


def names(expressions: list[str]) -> tuple[str, ...]:
    """Columns and expressions as people write them."""
    return tuple(without_ids(expression) for expression in expressions)


def expires(node: Node) -> bool:
    """Whether what an aggregate or deduplication groups by has a watermark."""
    return any(has_watermark(expression) for expression in grouping_expressions(node))


def by_window(node: Node) -> bool:
    """Whether an aggregate groups by windows of time, or of sessions."""
    return any(_WINDOW.match(expression) for expression in grouping_expressions(node)) or groups_by_session(
        node
    )


def join_type(node: Node) -> str:
    return node.arguments[0] if node.arguments else "Inner"


def above_aggregation(node: Node) -> bool:
    """Whether a streaming aggregation is below an operator."""
    return any(each.name == "Aggregate" and each.streaming for each in node.below())


def own_mode(node: Node) -> str | None:
    """The output mode that a stateful function was given, in lower case."""
    known = {"Append": "append", "Update": "update", "Complete": "complete"}
    return next((known[argument] for argument in node.arguments if argument in known), None)


def keeps_for_ever(node: Node) -> bool:
    """Whether nothing but a stateful function itself ever takes away what it keeps: it has no time-out, timer or time to live."""
    return any(argument in _NO_TIME for argument in node.arguments)


def is_map_groups(node: Node) -> bool:
    """Whether a stateful function of the JVM is ``mapGroupsWithState``."""
    arguments = list(node.arguments)
    places = [place for place, argument in enumerate(arguments) if argument in ("Append", "Update")]
    return bool(places) and arguments[places[0] + 1 : places[0] + 2] == ["true"]


def path_to(node: Node, below: Node) -> Iterator[Node]:
    """The operators between two, from the top."""
    for child in node.children:
        if below in child.walk():
            if child is not below:
                yield child
                yield from path_to(child, below)
            return


# ---- result_key: By which columns of its result a query's groups differ.

_COLUMN = re.compile(r"(.*)#(\d+)L?(?:-T\d+ms)?", re.DOTALL)


def result_key(root: Node, aggregate: Node) -> tuple[str, ...]:
    """The result's columns that an aggregate groups by, by their names; none where one of them is not in the result."""
    if len(aggregate.arguments) < 2:
        return ()
    key = [
        _made(expression, list_items(aggregate.arguments[1]))
        for expression in grouping_expressions(aggregate)
    ]
    for node in reversed(_above(root, aggregate)):
        if node.name == "Project":
            columns = list_items(node.arguments[0])
            key = [column and _made(column, columns) for column in key]
        elif Trait.NAMES_KEPT not in traits_of(node.name):
            return ()
    found = [column and _COLUMN.fullmatch(column) for column in key]
    return tuple(match[1] for match in found if match) if all(found) else ()


def _above(root: Node, node: Node) -> list[Node]:
    """The operators between the result and one of them, from the top."""
    return [each for each in root.walk() if each is not node and any(below is node for below in each.below())]


def _made(expression: str, columns: list[str]) -> str | None:
    """The column of a list that is an expression, by its own name or another, without what was before."""
    for column in columns:
        if column == expression:
            return column
        if column.startswith(f"{expression} AS "):
            return column[len(expression) + len(" AS ") :]
    return None
