"""Find which sides of a stream-stream join leave the state, by the printed condition (Spark 4.2, 4.3)."""

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
    """Return the sides whose rows cannot match once the watermark has passed, by the rules of Spark's
    ``StreamingJoinHelper``.

    An equality with a column that has a watermark, of either side, bounds both. A column that is at least one
    of the other side, which has a watermark, bounds only its own side. Spark's checker uses this.
    """
    return frozenset().union(*_bounds(node))


def evicted_sides(node: Node) -> frozenset[str]:
    """Return the sides whose rows leave the state, and are emitted in an outer join if they had no match.

    Of the bounded sides, Spark's ``StreamingSymmetricHashJoinHelper`` (4.2, 4.3) evicts a side that has its
    own watermark, or both sides if the watermark is on a column of an equality.
    """
    columns = map(output_columns, node.children)
    timed = {side for side, own in zip((LEFT, RIGHT), columns, strict=True) if any(map(has_watermark, own))}
    return frozenset().union(*(sides if sides == BOTH else sides & timed for sides in _bounds(node)))


def _bounds(node: Node) -> Iterator[frozenset[str]]:
    """Yield the sides that each part of the condition bounds."""
    sides = _columns(node)
    for part in _conditions(node):
        for sign in (" = ", " >= ", " > ", " <= ", " < "):
            terms = _split_outside(part, sign)
            if len(terms) != 2:
                continue
            where = [_side(term, sides) for term in terms]
            if set(where) != BOTH:
                break
            greater = 0 if ">" in sign else 1
            if sign == " = ":
                if any(_COLUMN.fullmatch(term) for term in terms):
                    yield BOTH
            elif _is_time(terms[greater]) and _is_time(terms[1 - greater], watermark=True):
                yield frozenset((str(where[greater]),))
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
    """Return the column numbers of each side: of its output, since both sides may read the same stream."""
    known = [set(_ATTRIBUTE.findall(" ".join(output_columns(child)))) for child in node.children]
    for column in set(_ATTRIBUTE.findall(node.text)).difference(*known):
        for columns, child in zip(known, node.children, strict=True):
            texts = [(part.text, not part.children) for part in child.walk()]
            # Some relations, such as a range of numbers, are printed without their columns.
            if any(column in _ATTRIBUTE.findall(text) for text, _ in texts) or any(
                leaf and not _ATTRIBUTE.search(text) for text, leaf in texts
            ):
                columns.add(column)
    return known


def _conditions(node: Node) -> Iterator[str]:
    """Yield the parts of a join's condition that must all be true."""
    for condition in (*node.arguments[1:2], *node.filters):
        yield from _conjuncts(condition)


def _conjuncts(condition: str) -> Iterator[str]:
    text = _without_outer_brackets(condition)
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


def _without_outer_brackets(text: str) -> str:
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return _without_outer_brackets(text[1:-1]) if place and place == len(text) - 1 else text
    return text


def _split_outside(text: str, separator: str) -> list[str]:
    """Split a text at the separators outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and place >= start and text.startswith(separator, place):
            parts.append(text[start:place])
            start = place + len(separator)
    return [*parts, text[start:]]


def _side(term: str, sides: list[set[str]]) -> str | None:
    """Return the side that has all columns of a term."""
    columns = set(_ATTRIBUTE.findall(term))
    return next(
        (name for name, known in zip((LEFT, RIGHT), sides, strict=True) if columns and columns <= known), None
    )


def _is_time(term: str, *, watermark: bool = False) -> bool:
    """Whether a term is one column, with or without intervals of a fixed length added to it."""
    columns = list(_ATTRIBUTE.finditer(term))
    plain = set(_CALL.findall(term)) <= {"cast"} and " as date)" not in term
    plain = plain and not _MONTHS.search(term) and not _NOT_A_SUM.search(term)
    return plain and len(columns) == 1 and (not watermark or has_watermark(term[: columns[0].end()]))
