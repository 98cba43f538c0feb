"""What the code can write to the log, read from its source.

``python -m tests.logs.records`` writes it into the docs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs/logging.md"
LEVELS = ("debug", "info", "warning", "error")
_CALLED = {"exception": "error"}
_BEGIN, _END = "<!-- records: python -m tests.logs.records -->\n", "<!-- end of records -->\n"
DIRECTIVE = re.compile(r"%(?:\.\d+)?[a-z]")


@dataclass(frozen=True)
class Record:
    """One call that writes to the log."""

    module: str
    line: int
    logger: str
    levels: tuple[str, ...]
    message: str | None
    """None when it is not plain text."""
    arguments: int | None
    """How many values the message is given; None when that is not seen."""
    action: str | None
    """None when there is none, or it is not plain text."""
    fields: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"{self.module}:{self.line}"


def loggers(tree: ast.Module) -> dict[str, str]:
    """The module's loggers by the name of their variable."""
    return {
        target.id: _text(node.value.args[0]) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func) == "logging.getLogger"
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@cache
def modules(word: str = "") -> tuple[tuple[str, ast.Module], ...]:
    """The modules whose source contains a word, by default all of them."""
    texts = ((path, path.read_text()) for path in sorted(SOURCE.rglob("*.py")))
    return tuple(
        (".".join(path.relative_to(SOURCE).with_suffix("").parts), ast.parse(text))
        for path, text in texts
        if word in text
    )


def records() -> list[Record]:
    """All calls that write to the log."""
    return [record for module, tree in modules("getLogger") for record in _of(module, tree, loggers(tree))]


def _of(module: str, tree: ast.Module, found: dict[str, str]) -> Iterator[Record]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        variable = node.func.value
        if not isinstance(variable, ast.Name) or variable.id not in found or node.func.attr == "isEnabledFor":
            continue
        levels, rest = (_CALLED.get(node.func.attr, node.func.attr),), node.args
        if node.func.attr == "log":
            levels, rest = _levels(node.args[0]), node.args[1:]
        extra = next((each.value for each in node.keywords if each.arg == "extra"), None)
        action, fields = _fields(tree, extra)
        starred = any(isinstance(each, ast.Starred) for each in rest)
        yield Record(
            module,
            node.lineno,
            found[variable.id],
            levels,
            _text(rest[0]),
            None if starred else len(rest) - 1,
            action,
            fields,
        )


def _levels(node: ast.expr) -> tuple[str, ...]:
    found = [each.attr.lower() for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    return tuple(level for level in LEVELS if level in found)


def _fields(tree: ast.Module, extra: ast.expr | None) -> tuple[str | None, tuple[str, ...]]:
    if not isinstance(extra, ast.Dict):
        return None, ()
    pairs = list(_pairs(tree, extra))
    action = next((_text(value) for key, value in pairs if key == "action"), None)
    return action, tuple(dict.fromkeys(key for key, _ in pairs if key != "action"))


def _pairs(tree: ast.Module, fields: ast.Dict) -> Iterator[tuple[str, ast.expr]]:
    for key, value in zip(fields.keys, fields.values, strict=True):
        if key is None:
            yield from _pairs(tree, _named(tree, ast.unparse(value).removeprefix("self.").partition("(")[0]))
        else:
            yield _text(key) or "?", value


def _named(tree: ast.Module, name: str) -> ast.Dict:
    """The dict that a variable, a property or a function of the module stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Dict)
            return node.value
        if isinstance(node, ast.FunctionDef) and node.name == name:
            (returned,) = (each.value for each in node.body if isinstance(each, ast.Return))
            assert isinstance(returned, ast.Dict)
            return returned
    raise AssertionError(f"there is no dict {name}")


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def table() -> str:
    """The records as the docs have them."""
    lines = {(record.logger, record.action or "", _row(record)) for record in records()}
    head = "| logger | level | action | what it says | fields |\n|---|---|---|---|---|\n"
    return head + "".join(f"{line}\n" for *_, line in sorted(lines))


def _row(record: Record) -> str:
    says = DIRECTIVE.sub("…", record.message or "")
    fields = ", ".join(f"`{name}`" for name in record.fields)
    return (
        f"| `{record.logger}` | {'/'.join(record.levels).upper()} | `{record.action}` | {says} | {fields} |"
    )


def shown() -> str:
    """What stands between the marks in the docs."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].strip("\n") + "\n"


def _write() -> None:
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{table()}\n{_END}{rest.partition(_END)[2]}")


if __name__ == "__main__":
    _write()
