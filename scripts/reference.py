"""Generates the pages under docs/reference and the tables in docs/options.md from the code.

``make docs`` runs it. Griffe reads the source and its docstrings without importing them. Options and error
conditions are read from the code that defines them.
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
"""The page that explains each condition, relative to the pages of the reference."""
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
"""The public names of the package, by topic."""

# Public only for other layers of the package.
INTERNAL = {
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
_FEED_INTERNAL = {"from_url", "describe", "oldest", "newest", "commits", "tasks", "read", "logged"}
_VERDICT = re.compile(r"^\*(.*?)\.\*\n.*?^\*\*Why\.\*\* (.*?\.)(?: |\n)", re.DOTALL | re.MULTILINE)
"""The severity and modes of a problem, and the first sentence of its reason."""
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def main() -> None:
    """Write all generated pages."""
    REFERENCE.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)


def pages() -> dict[Path, str]:
    """Return every generated page by its path."""
    package = griffe.load(
        "penstock", search_paths=[str(SOURCE)], docstring_parser="numpy", resolve_aliases=True
    )
    pages_by_path = {REFERENCE / f"{name}.md": module_page(package[name], name) for name in MODULES}
    pages_by_path[REFERENCE / "penstock.md"] = package_page(package)
    pages_by_path[REFERENCE / "errors.md"] = errors_page(package["errors"])
    pages_by_path[REFERENCE / "problems.md"] = problems_page()
    pages_by_path[REFERENCE / "cli.md"] = command_line_page()
    pages_by_path[OPTIONS] = options_page(OPTIONS.read_text())
    return pages_by_path


def package_page(package: Any) -> str:
    """Return the page of ``import penstock``."""
    lines = [*_head("penstock", "`import penstock`. " + _summary(package)), "", *_contents(GROUPS)]
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += ["", *describe(_final(package[name]), name, "penstock.", level=3)]
    return _joined(lines)


def module_page(module: Any, name: str) -> str:
    """Return the page of a public module."""
    module = _final(module)
    prefix = "penstock.testing." if name == "testing" else f"penstock.{name}."
    lines = _head(f"penstock.{name}", _summary(module))
    for exported in _exported(module):
        lines += ["", *describe(_final(module[exported]), exported, prefix, level=2)]
    return _joined(lines)


def _final(item: Any) -> Any:
    """Resolve an alias to the object that was imported."""
    return item.final_target if item.is_alias else item


def describe(item: Any, name: str, prefix: str, *, level: int) -> Iterator[str]:
    """Describe a class, a function or a constant."""
    yield f"{'#' * level} `{prefix}{name}`"
    yield ""
    if item.is_attribute:
        yield from ("```python", f"{prefix}{name} = {item.value}", "```", "")
        yield from _sections(item)
        return
    if not (item.is_class and not _is_constructed(item)):
        yield from ("```python", _signature(item, f"{prefix}{name}"), "```", "")
    yield from _sections(item)
    if item.is_class:
        yield from _members(item, name, level)


def _members(owner: Any, name: str, level: int) -> Iterator[str]:
    internal = INTERNAL.get(name, set()) | (_FEED_INTERNAL if name.endswith("Feed") else set())
    members = {
        member.name: member
        for base in [*reversed(_own_bases(owner)), owner]
        for member in base.members.values()
        if not member.name.startswith("_") and member.name not in internal and not member.is_alias
    }
    fields = [
        member
        for member in members.values()
        if member.is_attribute and (_is_documented(member, owner) or _is_field(owner, member))
    ]
    if fields:
        yield from ("| attribute | type | |", "|---|---|---|")
        for member in fields:
            description = _one_line(_text(_documented(member, owner)))
            yield f"| `{member.name}` | {_type(member.annotation)} | {description} |"
        yield ""
    for member in members.values():
        if member.is_function and _is_documented(member, owner):
            yield f"{'#' * (level + 1)} `{name}.{member.name}`"
            yield ""
            yield from ("```python", _signature(member, member.name), "```", "")
            yield from _sections(_documented(member, owner))


def _own_bases(owner: Any) -> list[Any]:
    """Return the base classes that belong to Penstock, whose docstrings a class inherits."""
    bases = []
    for base in owner.bases:
        path = getattr(base, "canonical_path", "")
        if path.startswith("penstock."):
            try:
                bases.append(owner.modules_collection[path])
            except KeyError:
                continue
    return bases


def _documented(member: Any, owner: Any) -> Any:
    """Return the member with the docstring: the given one, or that of a base class."""
    if member.docstring is None:
        for base in _own_bases(owner):
            inherited = base.members.get(member.name)
            if inherited is not None and inherited.docstring is not None:
                return inherited
    return member


def _is_documented(member: Any, owner: Any) -> bool:
    return _documented(member, owner).docstring is not None


def _is_field(owner: Any, member: Any) -> bool:
    return (
        "dataclass" in _decorators(owner)
        and member.annotation is not None
        and "ClassVar" not in str(member.annotation)
    )


def _decorators(item: Any) -> str:
    return " ".join(str(decorator.value) for decorator in item.decorators)


def _is_constructed(owner: Any) -> bool:
    """Return whether users construct objects of the class."""
    text = "" if owner.docstring is None else owner.docstring.value
    return bool(owner.parameters) and "----" in text and not re.search(r"[Gg]et one from|[Mm]ade by", text)


def _signature(item: Any, name: str) -> str:
    parameters, star = [], False
    for parameter in item.parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind.value
        if kind == "keyword-only" and not star:
            parameters.append("*")
            star = True
        star = star or kind == "variadic positional"
        lead = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        text = f"{lead}{parameter.name}" + (
            f": {parameter.annotation}" if parameter.annotation is not None else ""
        )
        if parameter.default is not None and not lead:
            text += f"{' = ' if parameter.annotation is not None else '='}{_default(item, parameter.default)}"
        parameters.append(text)
    returned = getattr(item, "returns", None)
    arrow = f" -> {returned}" if returned is not None and not item.is_class else ""
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {text},\n" for text in parameters) + f"){arrow}"


def _default(item: Any, default: Any) -> str:
    """Format a default. The name of a constant is replaced by its value."""
    text = str(default)
    constant = item.module.members.get(text) if re.fullmatch(r"_?[A-Z][A-Z_]+", text) else None
    if constant is not None:
        constant = _final(constant)
        return str(constant.value)
    if "lambda" in text:
        # The factory of a dataclass field.
        return "{}"
    field_call = re.fullmatch(r"field\((.*)\)", text)
    if field_call is None:
        return text
    default_value = re.search(r"default=([^,)]+)", field_call[1])
    return default_value[1] if default_value else "{}"


def _sections(item: Any) -> Iterator[str]:
    if item.docstring is None:
        return
    for section in item.docstring.parsed:
        kind = section.kind.value
        if kind == "text":
            yield from (_text(section.value), "")
        elif kind == "parameters":
            yield from ("| parameter | |", "|---|---|")
            # Names that share a line of the docstring are separate parameters with the same description.
            for description, together in groupby(section.value, key=lambda parameter: parameter.description):
                names = ", ".join(f"`{parameter.name}`" for parameter in together)
                yield f"| {names} | {_one_line(_text(description))} |"
            yield ""
        elif kind == "raises":
            yield "Raises: " + "; ".join(_describe_error(error) for error in section.value) + "."
            yield ""
        elif kind == "returns":
            for returned in section.value:
                yield f"Returns {_type(returned.annotation)}: {_one_line(_text(returned.description))}"
            yield ""


def _describe_error(error: Any) -> str:
    names = ", ".join(f"`{name.strip()}`" for name in str(error.annotation).strip("()").split(","))
    description = _one_line(_text(error.description or "")).rstrip(".")
    if description and not description[:2].isupper():
        description = description[0].lower() + description[1:]
    return f"{names} ({description})" if description else names


def _text(documented: Any) -> str:
    """Return a text, or the text of an object's docstring, as Markdown."""
    if not isinstance(documented, str):
        if documented.docstring is None:
            return ""
        documented = "\n\n".join(
            section.value for section in documented.docstring.parsed if section.kind.value == "text"
        )
    text = "\n\n".join(
        _table(paragraph.splitlines()) if paragraph.startswith("===") else " ".join(paragraph.split())
        for paragraph in documented.split("\n\n")
    )
    return _ROLE.sub(lambda match: f"`{match[1].removeprefix('~')}`", text).replace("``", "`")


def _table(lines: list[str]) -> str:
    """Convert a simple reStructuredText table to Markdown. Lines with an empty first cell continue a row."""
    columns = [match.span() for match in re.finditer("=+", lines[0])]
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
    """Return the names that a module exports according to its source."""
    tree = ast.parse(Path(module.filepath).read_text())
    lazy_names = next((node for node in tree.body if _assigns(node, "_HOMES")), None)
    listed = lazy_names or next(node for node in tree.body if _assigns(node, "__all__"))
    return sorted(ast.literal_eval(listed.value))  # type: ignore[attr-defined]  # an assignment


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets)


# Errors.


def errors_page(module: Any) -> str:
    """Return the page with the tree of errors and their conditions."""
    module = _final(module)
    classes = [error for error in module.members.values() if not error.is_alias and error.is_class]
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
    raised = conditions.raised_conditions()
    parts = conditions.subconditions(raised)
    class_conditions = {str(error.members["condition"].value).strip("'\""): error for error in classes}
    for condition, error in class_conditions.items():
        cell = _link(condition) if condition in {*raised, *parts} else f"`{condition}`"
        lines.append(f"| {cell} | `{error.name}` | {_one_line(_text(error).partition('. ')[0])} |")
    lines += ["", "Other conditions, and the class of the error that has them:", ""]
    lines += ["| condition | error |", "|---|---|"]
    for condition, names in raised.items():
        if condition not in class_conditions and "." not in condition:
            lines.append(f"| {_link(condition)} | {', '.join(f'`{name}`' for name in sorted(names))} |")
    lines += [
        "",
        "## Sub-conditions",
        "",
        "Some conditions have a second part, which names the cause.",
        "",
    ]
    lines += ["| condition | sub-conditions |", "|---|---|"]
    for condition, subconditions in parts.items():
        lines.append(f"| {_link(condition)} | {', '.join(f'`{part}`' for part in subconditions)} |")
    lines += ["", "The problems of output modes have [codes](problems.md), too."]
    return _joined(lines)


def _link(condition: str) -> str:
    """Return a link to the description of a condition and its sub-conditions."""
    return f"[`{condition}`]({PAGE}#{condition.lower()})"


# Problems of output modes.


def problems_page() -> str:
    """Return the page with the codes that `penstock.modes.check` reports, each linked to its section."""
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
            verdict = _VERDICT.search(section)
            assert verdict is not None, code
            target = f"../modes/problems/{path.name}#{code.lower().replace('.', '')}"
            lines.append(f"| [`{code}`]({target}) | {verdict[1]} | {_one_line(verdict[2])} |")
    return _joined(lines)


# Options.


def options_page(text: str) -> str:
    """Return the page of options with its tables replaced."""
    for name, lines in tables().items():
        text = _replace_table(text, name, lines)
    return text


def _replace_table(text: str, name: str, lines: list[str]) -> str:
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
        links = []
        for name in names:
            # GitHub numbers headings that differ only in case.
            number = seen[name.lower()]
            links.append(f"[`{name}`](#penstock{name.lower()}{f'-{number}' if number else ''})")
            seen[name.lower()] += 1
        lines.append(f"| {group} | {', '.join(links)} |")
    return lines


def _summary(module: Any) -> str:
    return _text(module).partition("\n\n")[0]


def _joined(lines: list[str]) -> str:
    text = "\n".join(lines).rstrip().replace("|  |", "| |") + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    main()
