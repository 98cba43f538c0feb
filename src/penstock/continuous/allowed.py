"""Which operators and expressions of Spark's plans a continuous query takes: a list, and what is not on it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.continuous.operations import current_time, unsupported

GENERATORS = ("Explode", "PosExplode", "Inline", "JsonTuple")
_MAPS = ("MapInArrow", "MapInPandas")
LOGICAL = ("Project", "Filter", "Generate", "SubqueryAlias", *_MAPS)
PHYSICAL = (
    "Project", "Filter", "Generate", "Range", "ColumnarToRow", "InputAdapter", "WholeStageCodegen",
    *_MAPS, "ArrowEvalPython", "BatchEvalPython",
)  # fmt: skip
_NOW = ("CurrentTimestamp", "CurrentBatchTimestamp", "CurrentDate", "CurrentTime", "LocalTimestamp", "Now")
_SUBQUERIES = (
    "Exists",
    "FunctionTableSubqueryArgumentExpression",
    "InSubquery",
    "LateralSubquery",
    "ListQuery",
    "ScalarSubquery",
)


def children(tree: Any) -> list[Any]:
    """The children of a node of Spark's plan or of an expression."""
    return listed(tree.children())


def listed(sequence: Any) -> list[Any]:
    """A Scala sequence as a list."""
    return [sequence.apply(place) for place in range(sequence.size())]


def walk(tree: Any) -> Iterator[Any]:
    """A node of Spark's plan or an expression, and all below it."""
    yield tree
    for child in children(tree):
        yield from walk(child)


def check_node(node: Any, jvm: Any) -> None:
    """Look at one operator of an analysed plan and its expressions.

    Raises
    ------
    ContinuousRefused
        The operator, or one of its expressions, is not for continuous queries; the error names it.
    """
    name = str(node.nodeName())
    if name not in LOGICAL:
        raise unsupported(name)
    if name in _MAPS:
        return
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    # What a plan has, anywhere below, is known without a look at each expression.
    if node.containsPattern(patterns.CURRENT_LIKE()) or node.containsPattern(patterns.PLAN_EXPRESSION()):
        for expression in listed(node.expressions()):
            _check_expression(expression)
    if name == "Generate" and node.generator().nodeName() not in GENERATORS:
        raise unsupported(str(node.generator().nodeName()))


def _check_expression(expression: Any) -> None:
    for part in walk(expression):
        name = str(part.nodeName())
        if name in _NOW:
            raise current_time(str(part.sql()), name)
        if name in _SUBQUERIES:
            raise unsupported(name)
