"""Which operators and expressions of Spark's plans a continuous query takes: a list, and what is not on it is refused."""

from __future__ import annotations

import re
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
# Texts that Spark (SpecialDatetimeValues) takes for the time at which the query is planned.
_SPECIAL = ("now", "today", "tomorrow", "yesterday")
_MAY_BE_SPECIAL = re.compile(rf"cast\( *({'|'.join(_SPECIAL)})\b[^()#]*as (date|timestamp)", re.IGNORECASE)
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
    if (
        node.containsPattern(patterns.CURRENT_LIKE())
        or node.containsPattern(patterns.PLAN_EXPRESSION())
        or _MAY_BE_SPECIAL.search(str(node.expressions().mkString(" ")))
    ):
        for expression in listed(node.expressions()):
            _check_expression(expression)
    if name == "Generate" and node.generator().nodeName() not in GENERATORS:
        raise unsupported(str(node.generator().nodeName()))


def _check_expression(expression: Any) -> None:
    for part in walk(expression):
        name = str(part.nodeName())
        if name in _NOW or (name == "Cast" and _is_special(part)):
            raise current_time(str(part.sql()), name)
        if name in _SUBQUERIES:
            raise unsupported(name)


def _is_special(cast: Any) -> bool:
    """Whether a cast is of a text that stands for the current time."""
    child = cast.child()
    if child.nodeName() != "Literal" or not str(cast.dataType().typeName()).startswith(("date", "timestamp")):
        return False
    words = str(child.value()).split()
    return bool(words) and words[0].lower() in _SPECIAL
