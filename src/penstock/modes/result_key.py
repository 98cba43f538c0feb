"""By which columns of its result a query's groups differ."""

from __future__ import annotations

import re

from penstock.spark.internals.operators import Is, of
from penstock.spark.internals.plan_text import Node, grouping, items

_COLUMN = re.compile(r"(.*)#(\d+)L?(?:-T\d+ms)?", re.DOTALL)


def result_key(root: Node, aggregate: Node) -> tuple[str, ...]:
    """The result's columns that an aggregate groups by, by their names; none where one of them is not in the result."""
    if len(aggregate.arguments) < 2:
        return ()
    key = [_made(expression, items(aggregate.arguments[1])) for expression in grouping(aggregate)]
    for node in reversed(_above(root, aggregate)):
        if node.name == "Project":
            columns = items(node.arguments[0])
            key = [column and _made(column, columns) for column in key]
        elif Is.NAMES_KEPT not in of(node.name):
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
