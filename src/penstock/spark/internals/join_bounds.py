"""Sides of a stream-stream join whose rows leave the state, from the printed condition (Spark 4.2, 4.3)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.spark.internals.plan_nodes import join_type, output_columns
from penstock.spark.internals.plan_text import Node, has_watermark, split_list

LEFT, RIGHT = "left", "right"
BOTH = frozenset((LEFT, RIGHT))
_UNMATCHED = {
    "LeftOuter": frozenset((LEFT,)),
    "RightOuter": frozenset((RIGHT,)),
    "FullOuter": BOTH,
}
_ATTRIBUTE = re.compile(r"#(\d+)L?(?:-T\d+ms)?\b")
_COLUMN = re.compile(r"[^()]*#\d+L?-T\d+ms")
_CALL = re.compile(r"(\w+)\(")
_BETWEEN = "between("
_MONTHS = re.compile(r"INTERVAL '[^']*' (?:YEAR|MONTH)\b|\b\d+ (?:years|months)\b")
_NOT_A_SUM = re.compile(r" (?:[*/%&|^]|div) ")


def unmatched_sides(node: Node) -> frozenset[str]:
    """Return the sides whose unmatched rows a join emits."""
    return _UNMATCHED.get(join_type(node), frozenset())


def bounded_sides(node: Node) -> frozenset[str]:
    """Return the sides whose rows can no longer match once the watermark has passed.

    An equality of columns, one of which has a watermark, bounds both sides. If a column is at least as large
    as a column of the other side with a watermark, it bounds only its own side. These are the rules of
    Spark's ``StreamingJoinHelper``, which Spark's checker uses.
    """
    return frozenset().union(*_bounds(node))


def evicted_sides(node: Node) -> frozenset[str]:
    """Return the sides whose rows leave the state; an outer join emits those without a match.

    Of the bounded sides, Spark's ``StreamingSymmetricHashJoinHelper`` (4.2, 4.3) evicts a side that has its
    own watermark, or both sides if the watermark is on a column of an equality.
    """
    outputs = map(output_columns, node.children)
    watermarked_sides = {
        side
        for side, side_columns in zip((LEFT, RIGHT), outputs, strict=True)
        if any(map(has_watermark, side_columns))
    }
    return frozenset().union(
        *(sides if sides == BOTH else sides & watermarked_sides for sides in _bounds(node))
    )


def _bounds(node: Node) -> Iterator[frozenset[str]]:
    """Yield, for each part of the condition, the sides that it bounds."""
    sides = _columns(node)
    for part in _conditions(node):
        for sign in (" = ", " >= ", " > ", " <= ", " < "):
            terms = _split_outside(part, sign)
            if len(terms) != 2:
                continue
            term_sides = [_side(term, sides) for term in terms]
            if set(term_sides) != BOTH:
                break
            greater_term = 0 if ">" in sign else 1
            if sign == " = ":
                if any(_COLUMN.fullmatch(term) for term in terms):
                    yield BOTH
            elif _is_time(terms[greater_term]) and _is_time(terms[1 - greater_term], watermark=True):
                yield frozenset((str(term_sides[greater_term]),))
            break


def may_have_equality(node: Node) -> bool:
    """Whether Spark's planner may find an equality between the sides, such as one in each part of an OR."""
    conditions = (*node.arguments[1:2], *node.filters)
    return has_equality(node) or any(" OR " in condition for condition in conditions)


def has_months(node: Node) -> bool:
    """Whether a join's condition has an interval of months or years, whose length is not fixed."""
    return any(_MONTHS.search(condition) for condition in (node.text, *node.filters))


def has_equality(node: Node) -> bool:
    """Whether a join's condition has an equality between its sides."""
    sides = _columns(node)
    pairs = [_split_outside(part, sign) for part in _conditions(node) for sign in (" = ", " <=> ")]
    return any(len(terms) == 2 and {_side(term, sides) for term in terms} == BOTH for terms in pairs)


def _columns(node: Node) -> list[set[str]]:
    """Return the ids of each side's output columns; both sides may read the same stream."""
    columns_of_sides = [set(_ATTRIBUTE.findall(" ".join(output_columns(child)))) for child in node.children]
    for column in set(_ATTRIBUTE.findall(node.text)).difference(*columns_of_sides):
        for columns, child in zip(columns_of_sides, node.children, strict=True):
            texts = [(part.text, not part.children) for part in child.walk()]
            # Some relations, such as a range of numbers, are printed without their columns.
            if any(column in _ATTRIBUTE.findall(text) for text, _ in texts) or any(
                leaf and not _ATTRIBUTE.search(text) for text, leaf in texts
            ):
                columns.add(column)
    return columns_of_sides


def _conditions(node: Node) -> Iterator[str]:
    """Yield the parts of a join's condition that must all be true."""
    for condition in (*node.arguments[1:2], *node.filters):
        yield from _conjuncts(condition)


def _conjuncts(condition: str) -> Iterator[str]:
    text = _strip_outer_brackets(condition)
    parts = _split_outside(text, " AND ")
    if len(parts) > 1:
        for part in parts:
            yield from _conjuncts(part)
    elif text.startswith(_BETWEEN) and text.endswith(")"):
        value, *ends = split_list(text[len(_BETWEEN) : -1])
        for sign, end in zip((" >= ", " <= "), ends, strict=False):
            yield f"{value}{sign}{end}"
    else:
        yield text


def _strip_outer_brackets(text: str) -> str:
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return _strip_outer_brackets(text[1:-1]) if position and position == len(text) - 1 else text
    return text


def _split_outside(text: str, separator: str) -> list[str]:
    """Split a text at separators that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and position >= start and text.startswith(separator, position):
            parts.append(text[start:position])
            start = position + len(separator)
    return [*parts, text[start:]]


def _side(term: str, sides: list[set[str]]) -> str | None:
    """Return the side that has all columns of a term."""
    columns = set(_ATTRIBUTE.findall(term))
    return next(
        (
            name
            for name, side_columns in zip((LEFT, RIGHT), sides, strict=True)
            if columns and columns <= side_columns
        ),
        None,
    )


def _is_time(term: str, *, watermark: bool = False) -> bool:
    """Whether a term is a column, possibly plus intervals of a fixed length."""
    columns = list(_ATTRIBUTE.finditer(term))
    is_sum = set(_CALL.findall(term)) <= {"cast"} and " as date)" not in term
    is_sum = is_sum and not _MONTHS.search(term) and not _NOT_A_SUM.search(term)
    return is_sum and len(columns) == 1 and (not watermark or has_watermark(term[: columns[0].end()]))
