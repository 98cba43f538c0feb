"""Find columns that a plan's operators get, whatever Spark's optimizer removes (Spark 4.2, 4.3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from penstock.spark.internals.join_bounds import condition_columns
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_nodes import grouping_expressions, output_columns, without_expression
from penstock.spark.internals.plan_text import Node, has_watermark, list_items

_COLUMN = re.compile(r".*#(\d+)L?(?:-T\d+ms)?", re.DOTALL)
_READ = re.compile(r"#(\d+)L?(?:-T\d+ms)?\b")
_PASSED_ON = ("View", "CollectMetrics", "Generate", "Expand", "ResolvedHint", "RebalancePartitions")
"""Operators that keep the ids of their input columns, besides those that keep their names."""

Ids = frozenset[str]


def event_times_of_inputs(root: Node) -> Iterator[tuple[Node, list[str]]]:
    """Yield each input of each operator, as the operator and the event-time columns that it certainly gets.

    The optimizer removes columns that no operator above reads, and rewrites expressions. So a column counts
    only if it is itself in the result, a key, an argument of a function or a term of a join's condition.
    """
    yield from _below(root, frozenset(_ids(output_columns(root))))


def _below(node: Node, kept: Ids) -> Iterator[tuple[Node, list[str]]]:
    for child, ids in zip(node.children, _kept_of_inputs(node, kept), strict=True):
        timed = filter(has_watermark, output_columns(child))
        yield node, list(dict.fromkeys(column for column in timed if ids.issuperset(_ids([column]))))
        yield from _below(child, ids)


def _kept_of_inputs(node: Node, kept: Ids) -> list[Ids]:
    """Return the columns of each input that an operator reads or passes on, if some of its output is kept."""
    own = [_ids(output_columns(child)) for child in node.children]
    if node.name == "Union":
        places = [place for place, number in enumerate(own[0]) if number in kept]
        return [frozenset(ids[place] for place in places if place < len(ids)) for ids in own]
    read = kept | condition_columns(node) if node.name == "Join" else _of_one_input(node, kept)
    return [read.intersection(ids) for ids in own]


def _of_one_input(node: Node, kept: Ids) -> Ids:
    traits = traits_of(node.name)
    if Trait.DEDUPLICATION in traits:
        reads_times = node.name == "DeduplicateWithinWatermark"
        timed = filter(has_watermark, output_columns(node) if reads_times else ())
        return kept.union(_ids(grouping_expressions(node)), _ids(timed))
    if Trait.AGGREGATION in traits or node.name == "Except":
        return frozenset(_ids(grouping_expressions(node)))
    if node.name == "Project":
        return frozenset(_read_by_name(node, kept))
    if Trait.NEW_COLUMNS in traits and (Trait.FUNCTION not in traits or Trait.PYTHON_STATE in traits):
        # A Python function is printed with its arguments, which are all columns.
        return frozenset(_READ.findall(node.text))
    return kept if Trait.NAMES_KEPT in traits or node.name in _PASSED_ON else frozenset()


def _read_by_name(node: Node, kept: Ids) -> Iterator[str]:
    """Yield the columns that a projection returns as they are, or with another name."""
    own = set(_ids(output_columns(node.children[0])))
    for item in list_items(node.arguments[0]):
        column = without_expression(item)
        expression = item.removesuffix(column).removesuffix(" AS ") or column
        read = _ids([expression])
        if read and own.issuperset(_READ.findall(expression)) and kept.issuperset(_ids([column])):
            yield read[0]


def _ids(columns: Iterable[str]) -> list[str]:
    return [match[1] for match in map(_COLUMN.fullmatch, columns) if match]
