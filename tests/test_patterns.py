"""Regular expressions behave the same in every supported version of Python.

Before 3.11.5, a possessive or atomic group stays behind the first characters of a repetition that fails later
(CPython issue 106052). An alternative that never matches, as the last one of the group, makes it go back.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]  # Python's own parser has no public name
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent
_NEVER = str(parser.parse("(?!)")[0])
_POSSESSIVE_GROUP = re.compile(r"\)(?:[*+?]|\{\d*,?\d*\})\+|\(\?>")


def modules() -> list[str]:
    """The modules whose text has such a group."""
    found = [path for path in PACKAGE.rglob("*.py") if _POSSESSIVE_GROUP.search(path.read_text())]
    return [".".join(["penstock", *path.relative_to(PACKAGE).with_suffix("").parts]) for path in found]


def patterns(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from patterns(each)


def groups(node: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the bodies of possessive and atomic groups, and whether they always go back."""
    if isinstance(node, parser.SubPattern):
        for code, argument in node:
            if code is codes.ATOMIC_GROUP or (code is codes.POSSESSIVE_REPEAT and not is_one(argument[2])):
                body = argument if code is codes.ATOMIC_GROUP else argument[2]
                yield body, goes_back(body)
            yield from groups(argument)
    elif isinstance(node, list | tuple):
        for each in node:
            yield from groups(each)


def is_one(body: Any) -> bool:
    """Whether a body is a single character, or a class of them."""
    simple = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
    return len(body) == 1 and body[0][0] in simple


def goes_back(body: Any) -> bool:
    code, argument = body[0]
    if code is codes.SUBPATTERN and len(body) == 1:
        return goes_back(argument[-1])
    if code is not codes.BRANCH or len(body) != 1:
        return False
    last = argument[1][-1]
    return len(last) == 1 and str(last[0]) == _NEVER


@pytest.mark.parametrize("name", modules())
def test_possessive_groups_go_back_in_every_version_of_python(name: str) -> None:
    found = [each for value in vars(importlib.import_module(name)).values() for each in patterns(value)]
    for pattern in found:
        for body, always in groups(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)):
            assert always, (pattern.pattern, str(body))


def test_there_are_such_groups() -> None:
    assert "penstock.secret_patterns" in modules()


@pytest.mark.parametrize("pattern", ["(?:ab?c)*+", "(?:a|bc)++d", "(?>ab|cd)e"])
def test_a_group_that_may_stay_behind_is_found(pattern: str) -> None:
    assert [always for _, always in groups(parser.parse(pattern))] == [False]
