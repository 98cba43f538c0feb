"""Writes the pages under docs/reference, and the tables in docs/options.md, from the code.

``make docs`` runs it. Griffe reads the source and its docstrings without importing anything; the options and
the conditions of errors are taken from where the code has them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe

from scripts import conditions
from scripts.command_line import command_line_page
from scripts.option_tables import tables

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
REFERENCE = ROOT / "docs/reference"
OPTIONS = ROOT / "docs/options.md"
PROBLEMS = ROOT / "docs/modes/problems"
PAGE = "../problems.md"
"""What each condition means, as the reference's pages see it."""
MODULES = ("changes", "limits", "logs", "modes", "state", "testing")

GROUPS = {
    "Stores, queues and consumers": (
        "connect", "Store", "Queue", "QueueInfo", "AppendResult", "Retention", "Consumer", "Pull", "Lag",
        "Producer", "AppendBuffer", "NumberedAppendBuffer", "compact", "QueueExport", "ExportStatus",
    ),
    "Sessions": ("session", "register", "monitor", "log_progress"),
    "Pipelines": ("stream", "Stream", "Pipeline", "Trigger", "Query", "ContinuousQuery"),
    "Sources and sinks": (
        "QueueSource", "RateSource", "QueueSink", "TableSink", "ConsoleSink", "FunctionSink", "exactly_once",
        "compact_table", "TableCompaction",
    ),
    "Sources and sinks of your own": ("Source", "Sink", "BatchSink", "MicroBatch", "WriteSettings"),
    "Change feeds": (
        "ChangeContract", "QueueFeed", "PostgresFeed", "DeltaFeed", "IcebergFeed", "SnapshotFeed",
        "DebeziumFeed", "Pump", "PumpStatus",
    ),
    "Comparison of a copy": ("reconcile", "Reconciliation", "DifferingRange", "DifferingRow"),
    "Rows in a notebook": ("take", "take_sample", "TakeResult"),
    "Errors": ("PenstockError",),
}  # fmt: skip
"""The names of the package itself, by what they are for."""

# Public for other layers of the package, and of no use to anybody else.
INNER = {
    "Store": {"schedule_maintenance", "database"},
    "Queue": {
        "after_append",
        "append_with",
        "conformed",
        "current_placement",
        "record",
        "rows_to_append",
        "segments_of",
        "retry_placement",
    },
    "Consumer": {"refuse_when_owned"},
    "Retention": {"of"},
    "Stream": {"row_limit", "key_limit"},
    "QueueSource": {"given"},
    "RateSource": {"given"},
    "QueueSink": {"given", "format"},
    "ConsoleSink": {"given", "format", "width"},
    "FunctionSink": {"format"},
    "TableSink": {"format", "check", "writer", "prepared", "resolve_url"},
    "TakeResult": {"of"},
    "Problem": {"at", "lines"},
    "MemoryStream": set(),
}
_FEED_INNER = {"from_url", "describe", "oldest", "newest", "commits", "tasks", "read", "logged"}
_VERDICT = re.compile(r"^\*(.*?)\.\*\n.*?^\*\*Why\.\*\* (.*?\.)(?: |\n)", re.DOTALL | re.MULTILINE)
"""The severity and modes of a problem, and the first sentence of why it is one."""
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def main() -> None:
    """Write all of it."""
    REFERENCE.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Every generated page, by its path."""
    package = griffe.load(
        "penstock", search_paths=[str(SOURCE)], docstring_parser="numpy", resolve_aliases=True
    )
    found = {REFERENCE / f"{name}.md": module_page(package[name], name) for name in MODULES}
    found[REFERENCE / "penstock.md"] = package_page(package)
    found[REFERENCE / "errors.md"] = errors_page(package["errors"])
    found[REFERENCE / "problems.md"] = problems_page()
    found[REFERENCE / "cli.md"] = command_line_page()
    found[OPTIONS] = options_page(OPTIONS.read_text())
    return found


def package_page(package: Any) -> str:
    """``import penstock``."""
    lines = [*_head("penstock", "`import penstock`. " + _summary(package)), "", *_contents(GROUPS)]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += ["", *described(_final(package[name]), name, "penstock.", level=3)]
    return _joined(lines)


def module_page(module: Any, name: str) -> str:
    """One of the public modules."""
    module = _final(module)
    prefix = "penstock.testing." if name == "testing" else f"penstock.{name}."
    lines = _head(f"penstock.{name}", _summary(module))
    for each in _exported(module):
        lines += ["", *described(_final(module[each]), each, prefix, level=2)]
    return _joined(lines)


def _final(thing: Any) -> Any:
    """What a name stands for, wherever it was imported from."""
    return thing.final_target if thing.is_alias else thing


def described(thing: Any, name: str, prefix: str, *, level: int) -> Iterator[str]:
    """A class, a function or a constant."""
    yield f"{'#' * level} `{prefix}{name}`"
    yield ""
    if thing.is_attribute:
        yield from ("```python", f"{prefix}{name} = {thing.value}", "```", "")
        yield from _sections(thing)
        return
    if not (thing.is_class and not _constructed(thing)):
        yield from ("```python", _signature(thing, f"{prefix}{name}"), "```", "")
    yield from _sections(thing)
    if thing.is_class:
        yield from _members(thing, name, level)


def _members(owner: Any, name: str, level: int) -> Iterator[str]:
    inner = INNER.get(name, set()) | (_FEED_INNER if name.endswith("Feed") else set())
    members = {
        each.name: each
        for base in [*reversed(_penstocks_bases(owner)), owner]
        for each in base.members.values()
        if not each.name.startswith("_") and each.name not in inner and not each.is_alias
    }
    fields = [
        each
        for each in members.values()
        if each.is_attribute and (_is_told(each, owner) or _is_field(owner, each))
    ]
    if fields:
        yield from ("| attribute | type | |", "|---|---|---|")
        for each in fields:
            yield f"| `{each.name}` | {_type(each.annotation)} | {_one_line(_text(_told(each, owner)))} |"
        yield ""
    for each in members.values():
        if each.is_function and _is_told(each, owner):
            yield f"{'#' * (level + 1)} `{name}.{each.name}`"
            yield ""
            yield from ("```python", _signature(each, each.name), "```", "")
            yield from _sections(_told(each, owner))


def _penstocks_bases(owner: Any) -> list[Any]:
    """The base classes that are Penstock's own, for the docstrings that a class takes over."""
    found = []
    for base in owner.bases:
        path = getattr(base, "canonical_path", "")
        if path.startswith("penstock."):
            try:
                found.append(owner.modules_collection[path])
            except KeyError:
                continue
    return found


def _told(each: Any, owner: Any) -> Any:
    """Where a member's docstring is: with itself, or with the base's."""
    if each.docstring is None:
        for base in _penstocks_bases(owner):
            there = base.members.get(each.name)
            if there is not None and there.docstring is not None:
                return there
    return each


def _is_told(each: Any, owner: Any) -> bool:
    return _told(each, owner).docstring is not None


def _is_field(owner: Any, each: Any) -> bool:
    return (
        "dataclass" in _decorators(owner)
        and each.annotation is not None
        and "ClassVar" not in str(each.annotation)
    )


def _decorators(thing: Any) -> str:
    return " ".join(str(decorator.value) for decorator in thing.decorators)


def _constructed(owner: Any) -> bool:
    """Whether people make objects of the class themselves."""
    text = "" if owner.docstring is None else owner.docstring.value
    return bool(owner.parameters) and "----" in text and not re.search(r"[Gg]et one from|[Mm]ade by", text)


def _signature(thing: Any, name: str) -> str:
    words, star = [], False
    for parameter in thing.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind.value
        if kind == "keyword-only" and not star:
            words.append("*")
            star = True
        star = star or kind == "variadic positional"
        lead = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        text = f"{lead}{parameter.name}" + (
            f": {parameter.annotation}" if parameter.annotation is not None else ""
        )
        if parameter.default is not None and not lead:
            text += (
                f"{' = ' if parameter.annotation is not None else '='}{_default(thing, parameter.default)}"
            )
        words.append(text)
    returned = getattr(thing, "returns", None)
    arrow = f" -> {returned}" if returned is not None and not thing.is_class else ""
    line = f"{name}({', '.join(words)}){arrow}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"


def _default(thing: Any, default: Any) -> str:
    """A default, with the value of a constant in the place of its name."""
    text = str(default)
    constant = thing.module.members.get(text) if re.fullmatch(r"_?[A-Z][A-Z_]+", text) else None
    if constant is not None:
        constant = _final(constant)
        return str(constant.value)
    if "lambda" in text:
        # The factory of a dataclass's field.
        return "{}"
    made = re.fullmatch(r"field\((.*)\)", text)
    if made is None:
        return text
    plain = re.search(r"default=([^,)]+)", made[1])
    return plain[1] if plain else "{}"


def _sections(thing: Any) -> Iterator[str]:
    if thing.docstring is None:
        return
    for section in thing.docstring.parsed:
        kind = section.kind.value
        if kind == "text":
            yield from (_text(section.value), "")
        elif kind == "parameters":
            yield from ("| parameter | |", "|---|---|")
            # Names that share a line of the docstring come one by one, with the same description.
            for description, together in groupby(section.value, key=lambda each: each.description):
                names = ", ".join(f"`{each.name}`" for each in together)
                yield f"| {names} | {_one_line(_text(description))} |"
            yield ""
        elif kind == "raises":
            yield "Raises: " + "; ".join(_raised(each) for each in section.value) + "."
            yield ""
        elif kind == "returns":
            for each in section.value:
                yield f"Returns {_type(each.annotation)}: {_one_line(_text(each.description))}"
            yield ""


def _raised(each: Any) -> str:
    names = ", ".join(f"`{name.strip()}`" for name in str(each.annotation).strip("()").split(","))
    told = _one_line(_text(each.description or "")).rstrip(".")
    if told and not told[:2].isupper():
        told = told[0].lower() + told[1:]
    return f"{names} ({told})" if told else names


def _text(told: Any) -> str:
    """A docstring's text as Markdown; of a thing, its summary paragraph by paragraph."""
    if not isinstance(told, str):
        if told.docstring is None:
            return ""
        told = "\n\n".join(section.value for section in told.docstring.parsed if section.kind.value == "text")
    text = "\n\n".join(
        _table(paragraph.splitlines()) if paragraph.startswith("===") else " ".join(paragraph.split())
        for paragraph in told.split("\n\n")
    )
    return _ROLE.sub(lambda found: f"`{found[1].removeprefix('~')}`", text).replace("``", "`")


def _table(lines: list[str]) -> str:
    """A simple table of reStructuredText as Markdown; a line with an empty first cell continues its row."""
    columns = [found.span() for found in re.finditer("=+", lines[0])]
    columns[-1] = columns[-1][0], max(map(len, lines))
    rows: list[list[str]] = []
    for line in lines[1:]:
        cells = [line[start:end].strip() for start, end in columns]
        if line.startswith("==="):
            continue
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(both).strip() for both in zip(rows[-1], cells, strict=True)]
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(columns) + "|", *rest])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(annotation: Any) -> str:
    return "" if annotation is None else f"`{annotation}`".replace("|", "\\|")


def _exported(module: Any) -> list[str]:
    """The names that a module gives out, as its source lists them."""
    tree = ast.parse(Path(module.filepath).read_text())
    homes = next((node for node in tree.body if _assigns(node, "_HOMES")), None)
    listed = homes or next(node for node in tree.body if _assigns(node, "__all__"))
    return sorted(ast.literal_eval(listed.value))  # type: ignore[attr-defined]  # an assignment


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets)


# Errors.


def errors_page(module: Any) -> str:
    """The tree of errors and their conditions."""
    module = _final(module)
    classes = [each for each in module.members.values() if not each.is_alias and each.is_class]
    tree = re.search(r"::\n\n(.*?)\n\nEach", module.docstring.value, re.DOTALL)
    assert tree is not None
    lines = _head(
        "penstock.errors",
        "The errors that Penstock raises. Each has a `condition` (a stable name to test "
        "for), `parameters` (the values it is about) and a message that says what happened, with which "
        "value, and what to do.",
    )
    lines += ["", "```text", *(line.removeprefix("    ") for line in tree[1].splitlines()), "```", ""]
    lines += [
        "```python",
        "try:",
        '    store.queue("orders")',
        "except penstock.errors.QueueNotFoundError as error:",
    ]
    lines += ["    print(error.condition, error.parameters)", "```", "", "## Conditions", ""]
    lines += [f"[Errors, by code]({PAGE}) explains each condition and what to do.", ""]
    lines += ["| condition | error | |", "|---|---|---|"]
    found = conditions.raised()
    parts = conditions.subconditions(found)
    own = {str(each.members["condition"].value).strip("'\""): each for each in classes}
    for condition, each in own.items():
        told = _way(condition) if condition in {*found, *parts} else f"`{condition}`"
        lines.append(f"| {told} | `{each.name}` | {_one_line(_text(each).partition('. ')[0])} |")
    lines += ["", "Other conditions, and the class of the error that has them:", ""]
    lines += ["| condition | error |", "|---|---|"]
    for condition, names in found.items():
        if condition not in own and "." not in condition:
            lines.append(f"| {_way(condition)} | {', '.join(f'`{name}`' for name in sorted(names))} |")
    lines += [
        "",
        "## Sub-conditions",
        "",
        "Some conditions have a second part, which names the cause.",
        "",
    ]
    lines += ["| condition | sub-conditions |", "|---|---|"]
    for condition, under in parts.items():
        lines.append(f"| {_way(condition)} | {', '.join(f'`{part}`' for part in under)} |")
    lines += ["", "The problems of output modes have [codes](problems.md), too."]
    return _joined(lines)


def _way(condition: str) -> str:
    """A link to what is said of a condition, and of those below it."""
    return f"[`{condition}`]({PAGE}#{condition.lower()})"


# Problems of output modes.


def problems_page() -> str:
    """The codes that `penstock.modes.check` reports, each with a link to its section."""
    lines = _head(
        "Problems of output modes",
        "What `penstock.modes.check` and `penstock modes check` may report about a query. **Refused**: Spark "
        "does not start the query. **Unsafe**: it does, and rows may be lost or repeated, or state grows "
        "forever. **Warning**: it works, and there is something to know.",
    )
    for path in sorted(PROBLEMS.glob("*.md")):
        head, *sections = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)
        title = head.partition("\n")[0].removeprefix("# ")
        lines += ["", f"## [{title}](../modes/problems/{path.name})", "", "| code | | |", "|---|---|---|"]
        for section in sections:
            code = section.partition("\n")[0]
            found = _VERDICT.search(section)
            assert found is not None, code
            way = f"../modes/problems/{path.name}#{code.lower().replace('.', '')}"
            lines.append(f"| [`{code}`]({way}) | {found[1]} | {_one_line(found[2])} |")
    return _joined(lines)


# Options.


def options_page(text: str) -> str:
    """The page of options, with its tables written between their marks."""
    for name, lines in tables().items():
        text = _between(text, name, lines)
    return text


def _between(text: str, name: str, lines: list[str]) -> str:
    begin, end = f"<!-- {name}: made by `make docs` -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"docs/options.md lacks the marks of {name!r}"
    return "\n".join([before + begin, "", *lines, "", end]) + after


# Pages.


def _head(title: str, text: str) -> list[str]:
    return ["<!-- Made by `make docs` from the docstrings: change those. -->", "", f"# {title}", "", text]


def _contents(groups: dict[str, tuple[str, ...]]) -> list[str]:
    lines, seen = ["| | |", "|---|---|"], Counter[str]()
    for group, names in groups.items():
        ways = []
        for name in names:
            # GitHub numbers headings that differ in their case alone.
            number = seen[name.lower()]
            ways.append(f"[`{name}`](#penstock{name.lower()}{f'-{number}' if number else ''})")
            seen[name.lower()] += 1
        lines.append(f"| {group} | {', '.join(ways)} |")
    return lines


def _summary(module: Any) -> str:
    return _text(module).partition("\n\n")[0]


def _joined(lines: list[str]) -> str:
    text = "\n".join(lines).rstrip().replace("|  |", "| |") + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    main()
