"""Which side of a join of two streams leaves the state, told from the printed condition (Spark 4.2, 4.3)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.modes.checking.plan import join_type
from penstock.spark.internals.plan_text import Node, marked, split

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


def unmatched_sides(node: Node) -> frozenset[str]:
    """The sides of which a join gives rows without a match."""
    return _UNMATCHED.get(join_type(node), frozenset())


def bounded_sides(node: Node) -> frozenset[str]:
    """The sides whose rows have no match any more once the watermark has passed, by the rules of Spark's ``StreamingJoinHelper``.

    An equality with a column that has a watermark, of either side, bounds both. A column that is at least one of the other side,
    which has a watermark, bounds its own side only. This is what Spark's checker goes by.
    """
    return frozenset().union(*_bounds(node))


def evicted_sides(node: Node) -> frozenset[str]:
    """The sides whose rows leave the state, and in an outer join come out if they had no match.

    Of the sides that are bounded, Spark's ``StreamingSymmetricHashJoinHelper`` (4.2, 4.3) takes one that has a watermark of its
    own, or both where the watermark is on a column of an equality.
    """
    timed = {name for name, child in zip((LEFT, RIGHT), node.children, strict=True) if _has_watermark(child)}
    return frozenset().union(*(sides if sides == BOTH else sides & timed for sides in _bounds(node)))


def _has_watermark(node: Node) -> bool:
    return any(each.name == "EventTimeWatermark" for each in node.walk())


def _bounds(node: Node) -> Iterator[frozenset[str]]:
    """For each part of the condition, the sides that it bounds."""
    sides = _columns(node)
    for part in _conjuncts(node.arguments[1]) if len(node.arguments) > 1 else ():
        for sign in (" = ", " >= ", " > ", " <= ", " < "):
            terms = _outside(part, sign)
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


def has_equality(node: Node) -> bool:
    """Whether a join's condition has an equality between its sides."""
    sides = _columns(node)
    pairs = (
        [_outside(part, " = ") for part in _conjuncts(node.arguments[1])] if len(node.arguments) > 1 else []
    )
    return any(len(terms) == 2 and {_side(term, sides) for term in terms} == BOTH for terms in pairs)


def _columns(node: Node) -> list[set[str]]:
    """The numbers of the columns of each side."""
    known = [set(_ATTRIBUTE.findall(" ".join(each.text for each in child.walk()))) for child in node.children]
    # Some relations, such as a range of numbers, are printed without their columns.
    others = set(_ATTRIBUTE.findall(node.text)).difference(*known)
    return [
        columns | (others if any(_shows_nothing(each) for each in child.walk()) else set())
        for columns, child in zip(known, node.children, strict=True)
    ]


def _shows_nothing(node: Node) -> bool:
    return not node.children and _ATTRIBUTE.search(node.text) is None


def _conjuncts(condition: str) -> Iterator[str]:
    text = _unwrapped(condition)
    parts = _outside(text, " AND ")
    if len(parts) > 1:
        for part in parts:
            yield from _conjuncts(part)
    elif text.startswith(_BETWEEN) and text.endswith(")"):
        value, *ends = split(text[len(_BETWEEN) : -1])
        for sign, end in zip((" >= ", " <= "), ends, strict=False):
            yield f"{value}{sign}{end}"
    else:
        yield text


def _unwrapped(text: str) -> str:
    """A text without the brackets around the whole of it."""
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return _unwrapped(text[1:-1]) if place and place == len(text) - 1 else text
    return text


def _outside(text: str, separator: str) -> list[str]:
    """The parts of a text, at the separators that are in no brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and place >= start and text.startswith(separator, place):
            parts.append(text[start:place])
            start = place + len(separator)
    return [*parts, text[start:]]


def _side(term: str, sides: list[set[str]]) -> str | None:
    """The side that all columns of a term are of."""
    columns = set(_ATTRIBUTE.findall(term))
    return next(
        (name for name, known in zip((LEFT, RIGHT), sides, strict=True) if columns and columns <= known), None
    )


def _is_time(term: str, *, watermark: bool = False) -> bool:
    """Whether a term is one column, later or earlier by an interval."""
    columns = list(_ATTRIBUTE.finditer(term))
    plain = set(_CALL.findall(term)) <= {"cast"} and " as date)" not in term
    return plain and len(columns) == 1 and (not watermark or marked(term[: columns[0].end()]))
