"""Parser for printed analysed plans, into a tree of nodes (Spark 4.2, 4.3).

Classic and Spark Connect sessions print a plan with one call. Walking the JVM's objects takes several calls
per node, and the plan's JSON does not show which columns have a watermark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, cast

from py4j.java_gateway import JavaObject
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plans import analysed, children, explained, node_name, optimized
from penstock.spark.internals.sessions import JvmException, is_classic

if TYPE_CHECKING:
    from pyspark.sql.connect.dataframe import DataFrame as ConnectDataFrame

_LINE = re.compile(r"^((?:[:|] {2}| {3})*)([:+]- )?(['!~]*)([A-Z]\w*)(?:$|(?= ))(.*)$")
ANALYSIS_FAILED = "NotPlanned"
"""The name of the node that stands for a plan that a Spark Connect server could not analyse."""
_MAX_FIELDS = 2**31 - 1
_OPTIMIZED = re.compile(r"== Optimized Logical Plan ==\n(.*?)\n?\n== Physical", re.DOTALL)
_ANALYZED = re.compile(r"== Analyzed Logical Plan ==\n.*?\n(.*?)\n?\n== Optimized", re.DOTALL)
# A physical operator, after the mark of generated code; its arguments may follow without a space.
_PHYSICAL = re.compile(r"^([:| +-]*)(?:\*(?:\(\d+\))? )?([A-Z]\w*)", re.MULTILINE)
# A printed attribute ends with its id, an L for a bigint, and the watermark's delay.
_WATERMARKED = re.compile(r"#\d+L?-T\d+ms$")
_ID = re.compile(r"#\d+L?(-T\d+ms)?")
_MAX_LINE = 200
# Spark prints these without the mark of a streaming operator.
_UNMARKED_STREAMS = ("StreamingRelation", "StreamingExecutionRelation")


@dataclass(frozen=True, eq=False)
class Node:
    """An operator of the plan; nodes are compared by identity."""

    name: str
    text: str
    """The printed arguments."""
    streaming: bool
    number: int
    """The position in the plan, from the top."""
    children: tuple[Node, ...]
    filters: tuple[str, ...] = ()
    """For an inner join: the filters above it, which Spark's optimizer turns into join conditions."""

    def walk(self) -> Iterator[Node]:
        yield self
        yield from self.descendants()

    def descendants(self) -> Iterator[Node]:
        for child in self.children:
            yield from child.walk()

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        return tuple(split_list(self.text))

    @property
    def line(self) -> str:
        """Return the operator's line in the plan, shortened for display."""
        text = without_ids(f"{self.name} {self.text}".strip())
        return text if len(text) <= _MAX_LINE else f"{text[: _MAX_LINE - 1]}…"


def plan_tree(frame: DataFrame) -> Node:
    """Return the analysed plan of a DataFrame, classic or Spark Connect."""
    if not is_classic(frame):
        return _connect_tree(cast("ConnectDataFrame", frame))
    plan = analysed(frame)
    tree = parse(str(plan.treeString(True, False, _MAX_FIELDS, False, False)))
    leaves = sum(not node.children for node in tree.walk())
    # A literal in the query may look like a line of the plan.
    return with_filters(tree if leaves == plan.collectLeaves().size() else _jvm_tree(plan, count()))


def optimized_tree(frame: DataFrame) -> Node | None:
    """Return the optimized plan of a DataFrame; None if Spark does not print it."""
    if is_classic(frame):
        try:
            text = str(optimized(frame).treeString(True, False, _MAX_FIELDS, False, False))
        except JvmException:
            # The query itself reports the problem.
            return None
    else:
        try:
            match = _OPTIMIZED.search(cast("ConnectDataFrame", frame)._explain_string(extended=True))
        except PySparkException:
            return None
        text = "" if match is None else match.group(1)
    return parse(text) if text else None


def physical_tree(frame: DataFrame) -> Node | None:
    """Return the physical plan of a streaming DataFrame in append mode; None if Spark cannot plan it."""
    try:
        text = (
            explained(frame)
            if is_classic(frame)
            else cast("ConnectDataFrame", frame)._explain_string(extended=False)
        )
    except (JvmException, PySparkException):
        # Other rules report why.
        return None
    return parse(_PHYSICAL.sub(r"\1\2 ", text.partition("\n")[2]))


def _connect_tree(frame: ConnectDataFrame) -> Node:
    """Return the plan over Spark Connect, which prints all phases, and shortens long lists of columns."""
    try:
        match = _ANALYZED.search(frame._explain_string(extended=True))
    except PySparkException as error:
        return Node(ANALYSIS_FAILED, str(error).splitlines()[0], True, 0, ())
    return with_filters(parse("" if match is None else match.group(1)))


def _jvm_tree(plan: JavaObject, numbers: Iterator[int]) -> Node:
    """Build the tree from the JVM's objects, with several calls for each node."""
    number, name = next(numbers), node_name(plan)
    text = str(plan.simpleString(_MAX_FIELDS)).lstrip("'!~").removeprefix(name).strip()
    child_nodes = tuple(_jvm_tree(child, numbers) for child in children(plan))
    return Node(name, text, plan.isStreaming(), number, child_nodes)


def parse(text: str) -> Node:
    lines: list[tuple[int, str, str, bool]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        depth = 0 if match is None else (len(match[1]) + len(match[2] or "")) // 3
        if match is None or (lines and (not match[2] or depth > lines[-1][0] + 1)):
            # The rest of a literal with a line break.
            if lines:
                lines[-1] = (*lines[-1][:2], f"{lines[-1][2]}\n{line}", lines[-1][3])
            continue
        lines.append((depth, match[4], match[5].strip(), "~" in match[3] or match[4] in _UNMARKED_STREAMS))
    return _build_node(lines, 0)[0] if lines else Node("", "", True, 0, ())


def _build_node(lines: list[tuple[int, str, str, bool]], index: int) -> tuple[Node, int]:
    """Build the node of a line and its children; return it with the index of the next line."""
    depth, name, text, streaming = lines[index]
    children, next_index = [], index + 1
    while next_index < len(lines) and lines[next_index][0] > depth:
        child, next_index = _build_node(lines, next_index)
        children.append(child)
    return Node(name, text, streaming, index, tuple(children)), next_index


def split_list(text: str) -> Iterator[str]:
    """Split a printed list at commas that are not inside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth <= 0:
            yield text[start:position].strip()
            start = position + 1
    if text[start:].strip():
        yield text[start:].strip()


def list_items(argument: str) -> list[str]:
    inner = argument[1:-1] if argument.startswith("[") and argument.endswith("]") else argument
    return list(split_list(inner))


def with_filters(node: Node, filters: tuple[str, ...] = ()) -> Node:
    """Return the plan with the conditions of filters and inner joins added to inner joins below them."""
    filters_below: tuple[str, ...] = ()
    if node.name == "Filter":
        filters_below = (*filters, node.text)
    elif node.name in ("Project", "SubqueryAlias", "View"):
        filters_below = filters
    elif node.name == "Join" and node.arguments[0] == "Inner":
        filters_below = (*filters, *node.arguments[1:2])
    else:
        filters = ()
    children = tuple(with_filters(child, filters_below) for child in node.children)
    return replace(node, children=children, filters=filters if node.name == "Join" else ())


def has_watermark(expression: str) -> bool:
    return _WATERMARKED.search(expression) is not None


def without_ids(expression: str) -> str:
    return _ID.sub("", expression)


def first_gathering_operator(frame: DataFrame) -> str | None:
    """Return the first operator that may change the tasks of a repeated micro-batch, if one is known."""
    if not is_classic(frame):
        return None
    names = (node.name for node in plan_tree(frame).walk())
    return next((name for name in names if Trait.GATHERING in traits_of(name)), None)


def keeps_state(frame: DataFrame) -> bool:
    """Return whether a streaming query is known to keep state."""
    if not is_classic(frame):
        return False
    stateful = [node for node in plan_tree(frame).walk() if Trait.STATEFUL in traits_of(node.name)]
    # A join with a table keeps no state.
    return any(
        node.streaming and (node.name != "Join" or all(child.streaming for child in node.children))
        for node in stateful
    )


def may_retain_rows(frame: DataFrame) -> bool:
    """Return whether rows are known to wait in a state store for a watermark."""
    if not is_classic(frame):
        return False
    names = {node.name for node in plan_tree(frame).walk()}
    return "EventTimeWatermark" in names and any(Trait.STATEFUL in traits_of(name) for name in names)
