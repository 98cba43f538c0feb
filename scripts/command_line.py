"""Generates the reference page of the command line from the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from typer.main import get_command

from penstock.cli.app import app
from penstock.cli.commands.shared import FAILED, INTERRUPTED, MISUSED

_HEAD = """\
<!-- Made by `make docs` from the commands: change those. -->

# Command line

`penstock` works with stores, change feeds, output modes and checkpoints from a shell. Install it with
`pip install 'penstock-spark[cli]'`. `penstock COMMAND --help` prints what this page says.

## Options of every command

They may come before or after the command.
"""
_CODES = f"""\
| exit code | |
|---|---|
| 0 | success |
| {FAILED} | the command failed; standard error has one line with the reason |
| {MISUSED} | the command line is wrong |
| {INTERRUPTED} | interrupted with Ctrl-C |

With `--json` standard output has nothing but JSON, and errors are JSON too."""
_COMMON = {"url", "json", "debug", "verbose", "log_json"}


def command_line_page() -> str:
    """Return the page with the description, arguments, options and examples of every command."""
    root = get_command(app)
    commands = list(_walk_commands(root, "penstock"))
    common = [parameter for parameter in root.params if parameter.name in {*_COMMON, "version"}]
    lines = [_HEAD, *_options(common), "", _CODES, "", "## Commands", "", "| command | |", "|---|---|"]
    for path, command in commands:
        lines.append(f"| [`{path}`](#{path.replace(' ', '-')}) | {_one_line(_paragraphs(command.help)[0])} |")
    for path, command in commands:
        lines += ["", f"## {path}", "", *_describe(path, command)]
    text = "\n".join(lines).rstrip() + "\n"
    return re.sub(r"\|  (?=\|)", "| ", re.sub(r"\n{3,}", "\n\n", text))


def _walk_commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _walk_commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _describe(path: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name not in _COMMON
    ]
    options = [option for option in options if not option.hidden]
    usage = [f"{path} [OPTIONS]" if options else path, *(_argument(argument) for argument in arguments)]
    yield from ("```text", " ".join(usage), "```", "")
    for paragraph in _paragraphs(command.help):
        yield from (paragraph, "")
    if arguments:
        yield from ("| argument | |", "|---|---|")
        for argument in arguments:
            yield f"| `{_name(argument)}` | {_one_line(argument.help or '')} |"
        yield ""
    if options:
        yield from (*_options(options), "")
    examples = (command.epilog or "").partition("Examples:\n")[2]
    if examples:
        yield from ("```sh", *(line.removeprefix("  ") for line in examples.rstrip().splitlines()), "```", "")


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name).strip("{}").upper()


def _argument(argument: Any) -> str:
    name = _name(argument) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _options(options: list[Any]) -> Iterator[str]:
    yield from ("| option | value | default | |", "|---|---|---|---|")
    for option in options:
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
        repeated = " (may be repeated)" if option.multiple and "repeated" not in (option.help or "") else ""
        yield (
            f"| {names} | {_value(option)} | {_default(option)} | {_one_line(option.help or '')}{repeated} |"
        )


def _value(option: Any) -> str:
    if option.is_flag or option.count:
        return ""
    value_type = option.type_descriptor.annotation
    if isinstance(value_type, type) and issubclass(value_type, Enum):
        return ", ".join(f"`{member.value}`" for member in value_type)
    return f"`{option.metavar or getattr(value_type, '__name__', 'text').upper()}`"


def _default(option: Any) -> str:
    default = option.default
    if option.is_flag or option.count or option.required or callable(default):
        return "required" if option.required else ""
    if default is None or default == [] or default == ():
        return ""
    return f"`{getattr(default, 'value', default)}`"


def _paragraphs(text: str | None) -> list[str]:
    plain_text = re.sub(r"^\s*\x08$", "", text or "", flags=re.MULTILINE).replace("``", "`")
    return [" ".join(text.split()) for text in plain_text.split("\n\n") if text.strip()]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
