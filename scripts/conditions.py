"""The conditions that the source can raise, and the errors that have them, as far as its text tells.

A condition is written whole (``condition="STORE_TOO_OLD"``), is that of the class, or is put together by a
function that is given its second part: ``unavailable("SLOT_USED", …)``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src/penstock"

ERRORS = SOURCE / "errors.py"


@dataclass(frozen=True)
class Kind:
    """A class of errors."""

    condition: str
    public: str
    """Its name, or that of its base in ``penstock.errors``."""


Kinds = dict[str, Kind]
_Modules = dict[Path, list[ast.AST]]
"""The nodes of each module."""
_Makers = dict[tuple[Path | None, str], str]
_WHOLE = re.compile(r"[A-Z][A-Z_0-9]+(\.[A-Z][A-Z_0-9]+)?")
_PART = re.compile(r"[A-Z][A-Z_0-9]+")
_PIECE = re.compile(r"[A-Z][A-Z_0-9.]*[A-Z_0-9]")


@cache
def raised() -> dict[str, set[str]]:
    """The conditions, each with the names of the errors in ``penstock.errors`` that come with it.

    Raises
    ------
    ValueError
        When a condition is put together of pieces, and only running it tells which.
    """
    modules = {path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(SOURCE.rglob("*.py"))}
    kinds = _kinds(modules)
    of = {kind.condition: kind for kind in reversed(kinds.values())}
    makers = _makers(modules, set(of))
    found: dict[str, set[str]] = {}
    for path, nodes in modules.items():
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            base = _called(makers, path, call)
            if base is not None:
                _require_whole(path, call, call.args)
                for part in _texts(call.args, _PART):
                    found.setdefault(f"{base}.{part}", set()).add(of[base].public)
                continue
            for condition in _told(path, nodes, call, kinds):
                kind = kinds.get(_name(call)) or of[condition.partition(".")[0]]
                found.setdefault(condition, set()).add(kind.public)
        for named in (node for node in nodes if isinstance(node, ast.Attribute)):
            # An error that is recorded rather than raised has the condition of its class.
            if named.attr == "condition" and getattr(named.value, "id", "") in kinds:
                kind = kinds[named.value.id]  # type: ignore[attr-defined]
                found.setdefault(kind.condition, set()).add(kind.public)
    return dict(sorted(found.items()))


def subconditions(conditions: Iterable[str]) -> dict[str, list[str]]:
    """The second parts of conditions, by the first ones."""
    found: dict[str, list[str]] = {}
    for condition in conditions:
        base, _, part = condition.partition(".")
        if part:
            found.setdefault(base, []).append(part)
    return found


def _kinds(modules: _Modules) -> Kinds:
    """The classes of errors; one without a condition of its own has that of its base."""
    classes = [
        (path, node) for path, nodes in modules.items() for node in nodes if isinstance(node, ast.ClassDef)
    ]
    found = {"PenstockError": Kind("PENSTOCK_ERROR", "PenstockError")}
    known = 0
    while known != len(found):
        known = len(found)
        for path, each in classes:
            names = [base.id for base in each.bases if isinstance(base, ast.Name)]
            base = next((found[name] for name in names if name in found), None)
            if base is not None and each.name not in found:
                public = each.name if path == ERRORS else base.public
                found[each.name] = Kind(next(_own(each), base.condition), public)
    return found


def _own(kind: ast.ClassDef) -> Iterator[str]:
    for node in kind.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "condition":
            yield str(ast.literal_eval(node.value))


def _told(path: Path, nodes: list[ast.AST], call: ast.Call, kinds: Kinds) -> set[str]:
    """The conditions of an error that is made here: those that it is given, or that of its class."""
    kind = _name(call)
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "condition"), None)
    if given is None:
        return {kinds[kind].condition} if kind in kinds else set()
    _require_whole(path, call, [given])
    values = [given]
    if kind in kinds and isinstance(given, ast.Name):
        values += [
            node.value
            for node in nodes
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == given.id
        ]
    return _texts(values, _WHOLE)


def _makers(modules: _Modules, known: set[str]) -> _Makers:
    """The functions that put a condition together, and those that hand a parameter of theirs on to one."""
    functions = [
        ((path if node.name.startswith("_") else None, node.name), path, node)
        for path, nodes in modules.items()
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    ]
    found = {key: base for key, _, function in functions for base in _put_together(function, known)}
    for key, path, function in functions:
        names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            handed = {node.id for node in call.args if isinstance(node, ast.Name)}
            base = _called(found, path, call)
            if base is not None and "condition" in names & handed:
                found.setdefault(key, base)
    return found


def _put_together(function: ast.FunctionDef, known: set[str]) -> Iterator[str]:
    """The first parts that a function completes: ``f"FEED_UNAVAILABLE.{condition}"``."""
    for node in ast.walk(function):
        if isinstance(node, ast.JoinedStr) and _beginning(node).removesuffix(".") in known:
            yield _beginning(node).removesuffix(".")


def _called(makers: _Makers, path: Path, call: ast.Call) -> str | None:
    return makers.get((path, _name(call))) or makers.get((None, _name(call)))


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "id", None) or getattr(call.func, "attr", ""))


def _texts(values: Iterable[ast.expr], form: re.Pattern[str]) -> set[str]:
    """The texts of a form among some values, those of a choice between two as well."""
    texts = (node.value for each in values for node in ast.walk(each) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and form.fullmatch(text)}


def _require_whole(path: Path, call: ast.Call, values: Iterable[ast.expr]) -> None:
    pieces = (node for each in values for node in ast.walk(each) if isinstance(node, ast.JoinedStr))
    if any(_PIECE.fullmatch(_beginning(piece)) for piece in pieces):
        raise ValueError(f"{path}:{call.lineno} puts a condition together of pieces: write each one whole")


def _beginning(text: ast.JoinedStr) -> str:
    return str(text.values[0].value) if isinstance(text.values[0], ast.Constant) else ""
