"""Finds the error conditions that the source can raise, and the error classes that have them.

A condition is a literal (``condition="STORE_TOO_OLD"``), the condition of the class, or the result of a
function that completes a second part: ``unavailable("SLOT_USED", …)``.
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
class ErrorClass:
    """Error class."""

    condition: str
    public: str
    """The name of the class, or of its base class in ``penstock.errors``."""


ErrorClasses = dict[str, ErrorClass]
_Modules = dict[Path, list[ast.AST]]
"""The AST nodes of each module."""
_Completers = dict[tuple[Path | None, str], str]
_CONDITION = re.compile(r"[A-Z][A-Z_0-9]+(\.[A-Z][A-Z_0-9]+)?")
_PART = re.compile(r"[A-Z][A-Z_0-9]+")
_PREFIX = re.compile(r"[A-Z][A-Z_0-9.]*[A-Z_0-9]")


@cache
def raised_conditions() -> dict[str, set[str]]:
    """Return the conditions, each with the names of the errors in ``penstock.errors`` that have it.

    Raises
    ------
    ValueError
        If a condition is concatenated, so that only running the code shows it.
    """
    modules = {path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(SOURCE.rglob("*.py"))}
    classes = _find_error_classes(modules)
    class_by_condition = {error_class.condition: error_class for error_class in reversed(classes.values())}
    completers = _find_completers(modules, set(class_by_condition))
    conditions: dict[str, set[str]] = {}
    for path, nodes in modules.items():
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            base = _completed_part(completers, path, call)
            if base is not None:
                _require_literal(path, call, call.args)
                for part in _matching_strings(call.args, _PART):
                    conditions.setdefault(f"{base}.{part}", set()).add(class_by_condition[base].public)
                continue
            for condition in _conditions_of_call(path, nodes, call, classes):
                error_class = classes.get(_name(call)) or class_by_condition[condition.partition(".")[0]]
                conditions.setdefault(condition, set()).add(error_class.public)
        for attribute in (node for node in nodes if isinstance(node, ast.Attribute)):
            # An error that is logged instead of raised has the condition of its class.
            if attribute.attr == "condition" and getattr(attribute.value, "id", "") in classes:
                error_class = classes[attribute.value.id]  # type: ignore[attr-defined]
                conditions.setdefault(error_class.condition, set()).add(error_class.public)
    return dict(sorted(conditions.items()))


def subconditions(conditions: Iterable[str]) -> dict[str, list[str]]:
    """Return the second parts of conditions by their first part."""
    parts: dict[str, list[str]] = {}
    for condition in conditions:
        base, _, part = condition.partition(".")
        if part:
            parts.setdefault(base, []).append(part)
    return parts


def _find_error_classes(modules: _Modules) -> ErrorClasses:
    """Return the error classes. A class without a condition has that of its base class."""
    definitions = [
        (path, node) for path, nodes in modules.items() for node in nodes if isinstance(node, ast.ClassDef)
    ]
    classes = {"PenstockError": ErrorClass("PENSTOCK_ERROR", "PenstockError")}
    count = 0
    while count != len(classes):
        count = len(classes)
        for path, definition in definitions:
            names = [base.id for base in definition.bases if isinstance(base, ast.Name)]
            base = next((classes[name] for name in names if name in classes), None)
            if base is not None and definition.name not in classes:
                public = definition.name if path == ERRORS else base.public
                classes[definition.name] = ErrorClass(
                    next(_own_condition(definition), base.condition), public
                )
    return classes


def _own_condition(definition: ast.ClassDef) -> Iterator[str]:
    for node in definition.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "condition":
            yield str(ast.literal_eval(node.value))


def _conditions_of_call(path: Path, nodes: list[ast.AST], call: ast.Call, classes: ErrorClasses) -> set[str]:
    """Return the conditions of an error that a call creates: the given ones, or that of its class."""
    class_name = _name(call)
    argument = next((keyword.value for keyword in call.keywords if keyword.arg == "condition"), None)
    if argument is None:
        return {classes[class_name].condition} if class_name in classes else set()
    _require_literal(path, call, [argument])
    values = [argument]
    if class_name in classes and isinstance(argument, ast.Name):
        values += [
            node.value
            for node in nodes
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == argument.id
        ]
    return _matching_strings(values, _CONDITION)


def _find_completers(modules: _Modules, known: set[str]) -> _Completers:
    """Return functions that complete a condition, and those that pass a parameter to such a function."""
    functions = [
        ((path if node.name.startswith("_") else None, node.name), path, node)
        for path, nodes in modules.items()
        for node in nodes
        if isinstance(node, ast.FunctionDef)
    ]
    completers = {
        key: base for key, _, function in functions for base in _completed_prefixes(function, known)
    }
    for key, path, function in functions:
        names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            passed = {node.id for node in call.args if isinstance(node, ast.Name)}
            base = _completed_part(completers, path, call)
            if base is not None and "condition" in names & passed:
                completers.setdefault(key, base)
    return completers


def _completed_prefixes(function: ast.FunctionDef, conditions: set[str]) -> Iterator[str]:
    """Yield the first parts that a function completes, as in ``f"FEED_UNAVAILABLE.{condition}"``."""
    for node in ast.walk(function):
        if isinstance(node, ast.JoinedStr) and _literal_prefix(node).removesuffix(".") in conditions:
            yield _literal_prefix(node).removesuffix(".")


def _completed_part(completers: _Completers, path: Path, call: ast.Call) -> str | None:
    return completers.get((path, _name(call))) or completers.get((None, _name(call)))


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "id", None) or getattr(call.func, "attr", ""))


def _matching_strings(values: Iterable[ast.expr], pattern: re.Pattern[str]) -> set[str]:
    """Return the strings in some expressions that match a pattern, including conditional ones."""
    strings = (node.value for value in values for node in ast.walk(value) if isinstance(node, ast.Constant))
    return {string for string in strings if isinstance(string, str) and pattern.fullmatch(string)}


def _require_literal(path: Path, call: ast.Call, values: Iterable[ast.expr]) -> None:
    formatted_strings = (
        node for value in values for node in ast.walk(value) if isinstance(node, ast.JoinedStr)
    )
    if any(_PREFIX.fullmatch(_literal_prefix(formatted)) for formatted in formatted_strings):
        raise ValueError(f"{path}:{call.lineno} concatenates a condition: write each one as a literal")


def _literal_prefix(formatted: ast.JoinedStr) -> str:
    return str(formatted.values[0].value) if isinstance(formatted.values[0], ast.Constant) else ""
