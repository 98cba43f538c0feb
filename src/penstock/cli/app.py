"""The command tree, and how a run of it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer

from penstock.arguments import brief
from penstock.cli.boundary import BROKEN_PIPE, FAILED, INTERRUPTED, MISUSED, is_misuse
from penstock.cli.commands import (
    changes,
    checkpoint,
    consumer,
    modes,
    peek,
    preview,
    put,
    queue,
    store,
    ui,
)
from penstock.cli.commands.shared import (
    Common,
    DebugOption,
    JsonOption,
    LogJsonOption,
    UrlOption,
    VerboseOption,
    make_output,
)
from penstock.cli.output.protocol import one_line, redact
from penstock.cli.output.standard_output import checked, silence
from penstock.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Durable queues with consumers, in SQLite or PostgreSQL; change feeds; output modes; and checkpoints.",
    epilog=(
        "\b\nExamples:\n"
        "  penstock store init\n"
        "  penstock queue create orders --schema 'id bigint not null, amount decimal(10,2)'\n"
        "  penstock queue put orders orders.jsonl\n"
        "  penstock queue peek orders\n"
        "  penstock consumer create billing\n"
        "  penstock consumer register billing orders --vital\n"
        "  penstock consumer lag billing"
    ),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
app.add_typer(store.group, name="store")
app.add_typer(queue.group, name="queue")
app.add_typer(consumer.group, name="consumer")
app.add_typer(changes.group, name="changes")
app.add_typer(modes.group, name="modes")
app.add_typer(checkpoint.group, name="checkpoint")
put.add_to(queue.group)
peek.add_to(queue.group)
preview.add_to(modes.group)
ui.add_to(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _before_every_command(
    context: typer.Context,
    url: UrlOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    verbose: VerboseOption = 0,
    log_json: LogJsonOption = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, show_default=False, help="Show the version."
        ),
    ] = False,
) -> None:
    context.obj = Common(url, json, debug, verbose, log_json)


def run(words: Sequence[str]) -> int:
    """Run a command line; the exit code."""
    as_json = "--json" in words
    if sys.stderr is None:
        # What is printed to none goes to standard output, between the results.
        sys.stderr = _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A name that the terminal's encoding does not have is shown with escapes.
            stream.reconfigure(errors="backslashreplace")
    try:
        with checked():
            return _run(words)
    except typer.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        silence()
        return BROKEN_PIPE
    except PenstockError as error:
        return _failed(error, as_json=as_json)
    except Exception as error:
        if not is_misuse(error):
            raise
        return _misused(error, as_json=as_json)


def _run(words: Sequence[str]) -> int:
    code: Any = app(args=list(words), prog_name="penstock", standalone_mode=False)
    # Of help and versions, which no command prints.
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _failed(error: PenstockError, *, as_json: bool) -> int:
    if sys.stdout is None:
        sys.stdout = _nowhere()
    make_output("", as_json).error(error)
    return FAILED


def _misused(error: Any, *, as_json: bool) -> int:
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help(), file=sys.stderr)
        return MISUSED
    path = context.command_path if context is not None else "penstock"
    words = redact(str(error.format_message())).split()
    message = one_line(" ".join(map(brief, words)))
    message += "" if message.endswith((".", "?")) else "."
    if as_json:
        import json

        line = {"error": "USAGE", "message": message, "parameters": {"command": path}}
        print(json.dumps(line), file=sys.stderr)
    else:
        print(f"error: [USAGE] {message} See {path} --help", file=sys.stderr)
    return int(error.exit_code) or FAILED
