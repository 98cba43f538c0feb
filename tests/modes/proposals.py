"""The codes of the problems for which Penstock's rules propose a fix, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_MADE = {"Problem": (0, None), "at": (1, None), "_Refusal": (0, 2)}
"""What makes a problem: the places of its code and of its fix among the arguments."""


def codes_with_a_fix(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _MADE and len(node.args) > _MADE[name][0] and _has_a_fix(node, _MADE[name][1]):
            yield from _texts(node.args[_MADE[name][0]], constants)


def _has_a_fix(node: ast.Call, place: int | None) -> bool:
    named = any(keyword.arg == "fix" for keyword in node.keywords)
    given = node.args[place] if place is not None and len(node.args) > place else None
    return named or (given is not None and not (isinstance(given, ast.Constant) and given.value is None))


def _texts(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.Name) and node.id in constants:
        yield from _texts(constants[node.id], constants)
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body, constants)
        yield from _texts(node.orelse, constants)
