"""The command tree, ``penstock ui``, and running a command line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, TextIO
from urllib.parse import parse_qsl, unquote

import typer
from typer.main import get_command

from penstock.arguments import brief
from penstock.cli.commands import (
    changes,
    checkpoint,
    consumer_lag,
    modes,
    pump,
    query,
    queue_export,
    reconcile,
    store,
    table,
)
from penstock.cli.commands.shared import (
    BROKEN_PIPE,
    FAILED,
    INTERRUPTED,
    MISUSED,
    Common,
    DebugOption,
    JsonOption,
    LogJsonOption,
    Run,
    UrlOption,
    VerboseOption,
    command,
    is_misuse,
    make_output,
    option,
)
from penstock.cli.output import checked_output, discard_output, one_line
from penstock.errors import PenstockError
from penstock.extras import load
from penstock.redaction import redact, without_user_info
from penstock.store.url import CONNECTION_OPTIONS

_URL = re.compile(r"://|%3A%2F%2F|:[^\s?]+\?", re.IGNORECASE)
"""Matches arguments that are a URL of a store or change feed."""
_PASSWORD_KEYWORD = re.compile(r"(?:^|\s|^--url=)(?:ssl)?password\s*=\s*\S", re.IGNORECASE)
"""A password in libpq's keyword form, which is not accepted as a URL, but is visible to other users."""
_MAX_NESTING = 5
app = typer.Typer(
    name="penstock",
    help="Queues in SQLite or PostgreSQL, change feeds, output modes and checkpoints for PySpark streaming.",
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
app.add_typer(queue_export.group, name="queue")
app.add_typer(consumer_lag.group, name="consumer")
app.add_typer(query.group, name="query")
app.add_typer(pump.group, name="pump")
app.add_typer(changes.group, name="changes")
app.add_typer(modes.group, name="modes")
app.add_typer(checkpoint.group, name="checkpoint")
app.add_typer(table.group, name="table")
command(app, "reconcile", *reconcile.EXAMPLES)(reconcile.reconcile)


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _set_common_options(
    context: typer.Context,
    url: UrlOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
    verbose: VerboseOption = 0,
    log_json: LogJsonOption = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    context.obj = Common(url, json, debug, verbose, log_json)


@command(
    app,
    "ui",
    "penstock ui",
    "penstock ui --url 'postgresql://app@db/shop' --checkpoint checkpoints/large --port 8090",
    "PENSTOCK_UI_TOKEN=$(openssl rand -hex 16) penstock ui --host 0.0.0.0",
)
def ui(
    run: Run,
    checkpoints: Annotated[
        list[str] | None,
        option("--checkpoint", "PATH", "Also show this query's checkpoint; can be repeated."),
    ] = None,
    host: Annotated[str, option("--host", "ADDRESS", "The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, option("--port", "PORT", "The port to listen on; 0 chooses a free one.", min=0, max=65535)
    ] = 8080,
    token: Annotated[
        str | None,
        option(
            "--token",
            "TOKEN",
            "The secret that viewers need; required if other machines can reach the page. Set it "
            "in the variable, since other users of this machine can see command lines.",
            envvar="PENSTOCK_UI_TOKEN",
        ),
    ] = None,
    every: Annotated[
        float, option("--every", "SECONDS", "The time between two snapshots.", min=0.1, max=3600)
    ] = 1.0,
) -> None:
    """Serve the monitor page.

    It shows queues, consumers and queries, runs until Ctrl-C, and only reads the store. It needs the extra
    `ui`: pip install 'penstock-spark[ui]'. Prometheus metrics are at /metrics.
    """
    # Load it by name, because neither layer imports the other.
    open_server = load("penstock.ui.server", "open_server", "the page")
    with open_server(
        run.url, checkpoints=checkpoints or [], host=host, port=port, token=token, every=every
    ) as server:
        hint = "" if token is None else " (open it once with ?token=… appended)"
        run.output.done(f"the page is at {server.address}{hint}", {"address": server.address})
        # A program that waits for the address may read the output.
        sys.stdout.flush()
        server.serve_until_ended()


def run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    if sys.stderr is None:
        # Without standard error, print would write to standard output, between the results.
        sys.stderr = _null_stream()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Escape letters that the terminal's encoding does not have.
            stream.reconfigure(errors="backslashreplace")
    try:
        with checked_output():
            code: object = _command_tree()(args=list(arguments), prog_name="penstock", standalone_mode=False)
            # Help and versions are printed by typer, not by a command.
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return BROKEN_PIPE
    except PenstockError as error:
        if sys.stdout is None:
            sys.stdout = _null_stream()
        make_output("", as_json).error(error)
        return FAILED
    except Exception as error:
        if not is_misuse(error):
            raise
        return _print_usage_error(error, as_json=as_json)


@cache
def _command_tree() -> Callable[..., object]:
    # Build it once, because a program may run many commands in one process.
    return get_command(app)


def warn_of_secrets(arguments: Sequence[str]) -> None:
    """Warn if the arguments contain a secret, because every user of the machine can read them."""
    if any(_PASSWORD_KEYWORD.search(word) or (_URL.search(word) and _has_secret(word)) for word in arguments):
        _warn(
            "a password in an argument",
            "leave it out of the URL, and set PGPASSFILE or PGPASSWORD; or set PENSTOCK_URL",
            arguments,
        )
    if any(word.partition("=")[0] == "--token" for word in arguments):
        _warn("a token in an argument", "set PENSTOCK_UI_TOKEN instead", arguments)


def _has_secret(url: str, depth: int = 0) -> bool:
    """Return whether a URL contains a secret, also in URLs among its parameters, such as a feed's store."""
    target, _, query = url.partition("?")
    # A feed's target may be percent-encoded.
    target = target if "://" in target else unquote(target)
    if redact(target) != target or without_user_info(url) != url:
        return True
    return depth < _MAX_NESTING and any(
        redact(f"?{name}=x") != f"?{name}=x" or _has_secret(value, depth + 1)
        for name, value in parse_qsl(query)
        # The location of a password file is not a secret.
        if name not in CONNECTION_OPTIONS
    )


def _warn(secret: str, advice: str, arguments: Sequence[str]) -> None:
    if sys.stderr is not None:
        text = f"warning: every user of this machine can read {secret}: {advice}"
        make_output("", "--json" in arguments).note(text)


def _null_stream() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _print_usage_error(error: Any, *, as_json: bool) -> int:
    """Print a usage error of typer, whose class is private in click; return the exit code."""
    context: typer.Context | None = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        print(context.get_help(), file=sys.stderr)
        return MISUSED
    path = context.command_path if context is not None else "penstock"
    words = redact(str(error.format_message())).split()
    message = one_line(" ".join(map(brief, words)))
    message += "" if message.endswith((".", "?")) else "."
    if as_json:
        misuse = PenstockError(message, condition="USAGE", command=path)
        make_output("", as_json).error(misuse)
    else:
        print(f"error: [USAGE] {message} See {path} --help", file=sys.stderr)
    return int(error.exit_code) or FAILED
