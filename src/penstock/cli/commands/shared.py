"""Common parts of commands: options, output, log, store, and turning errors into exit codes."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import JsonOutput, Output, discard_output, json_text
from penstock.errors import InvalidInputError, MissingDependencyError, PenstockError, StoreNotFoundError
from penstock.extras import instead
from penstock.logs import JsonFormatter

if TYPE_CHECKING:
    from types import FrameType

    from penstock.queue.store import Store
    from penstock.ui.unreadable import UnreadableRecords

URL_VARIABLE = "PENSTOCK_URL"
DEFAULT_URL = "sqlite:///penstock.db"
FAILED, MISUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def option(name: str, metavar: str, help: str, *other_names: str, **settings: Any) -> Any:
    """Return an option that takes a value."""
    return typer.Option(name, *other_names, metavar=metavar, help=help, **settings)


def argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help)


UrlOption = Annotated[
    str | None,
    option(
        "--url",
        "URL",
        f"The store: sqlite:///FILE or postgresql://USER@HOST/DATABASE. [{URL_VARIABLE}, or else "
        f"{DEFAULT_URL}]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print results and errors as JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Log what happens; -vv logs each step."
    ),
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", help="Print the log as lines of JSON, on standard error.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


@dataclass(frozen=True)
class Common:
    """The options that every command takes."""

    url: UrlOption = None
    json: JsonOption = False
    debug: DebugOption = False
    verbose: VerboseOption = 0
    log_json: LogJsonOption = False

    def over(self, other: Common | None) -> Common:
        """Combine these options with options before the command; these take precedence."""
        if other is None:
            return self
        return Common(
            other.url if self.url is None else self.url,
            self.json or other.json,
            self.debug or other.debug,
            max(self.verbose, other.verbose),
            self.log_json or other.log_json,
        )


class Run:
    """One run of a command."""

    def __init__(self, common: Common) -> None:
        # An empty option is refused, since it may come from an unset variable of a shell script.
        chosen_url = common.url if common.url is not None else os.environ.get(URL_VARIABLE) or None
        self.url, self._is_named = DEFAULT_URL if chosen_url is None else chosen_url, chosen_url is not None
        self.debug = common.debug
        self.json = common.json
        self.output = make_output(self.url, common.json)
        self.log = CommandLog(self.output, common.verbose, as_json=common.log_json)

    def connect(self, *, create: bool = False) -> Store:
        """Open the store, which must exist unless ``create`` is set."""
        from penstock.queue.store import connect

        try:
            return connect(self.url, create=create)
        except StoreNotFoundError as error:
            if self._is_named:
                raise
            message = f"{error.message}; to use another store, set --url or the variable {URL_VARIABLE}"
            raise StoreNotFoundError(message, condition=error.condition, **error.parameters) from None

    def confirm(self, question: str, yes: bool) -> None:
        """Ask for confirmation before something is lost."""
        if yes:
            return
        if self.json or not _is_interactive():
            raise InvalidInputError(f"{question} Repeat it with --yes", condition="CONFIRMATION_NEEDED")
        if not typer.confirm(question, err=True):
            raise InvalidInputError("nothing was done", condition="NOT_CONFIRMED")

    def guard(self, work: Callable[[], None]) -> None:
        """Run a command's work; print an error in one line and turn it into the exit code."""
        try:
            work()
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            # The reader of the output stopped early, as `head` does.
            discard_output()
            raise typer.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if is_misuse(error):
                raise
            if self.debug:
                print(self.output.redact(traceback.format_exc()), file=sys.stderr, end="")
            self.output.error(_as_penstock_error(error, self.debug))
            raise typer.Exit(FAILED) from None


def _is_interactive() -> bool:
    # Python sets stdin to None when its descriptor was closed.
    return sys.stdin is not None and sys.stdin.isatty()


def is_misuse(error: BaseException) -> bool:
    """Return whether an error is one of typer's, about the way a command was called."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _as_penstock_error(error: Exception, debug: bool) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("penstock"):
        missing = instead(error, "this command")
        if isinstance(missing, PenstockError):
            return missing
        return MissingDependencyError(
            f"{error.name} is not installed: pip install {error.name}", package=error.name
        )
    hint = "" if debug else "; run it again with --debug to see where"
    return PenstockError(
        f"{type(error).__name__}: {error}{hint}", condition="UNEXPECTED", type=type(error).__name__
    )


def make_output(url: str, json: bool) -> Output:
    if json:
        return JsonOutput(url)
    from penstock.cli.text_output import TextOutput

    return TextOutput(url)


MAX_LISTED = 5_000
"""The maximum number of rows of a list; programs that can write to the store can write many records."""


def note_missing(
    output: Output, unreadable: UnreadableRecords, omitted: int, kind: str, listed_records: str
) -> None:
    """Print notes about the records that are not in a list: those that cannot be read, and how many were
    left out.

    ``kind`` is the plural of what the list has, and ``listed_records`` says which ones it has.
    """
    for note in unreadable.notes:
        output.note(note)
    if omitted:
        output.note(f"{kind} that are not listed: {omitted:,}. The list has {listed_records}")


class CommandLog(logging.Handler):
    """Log handler that prints on standard error in the command's format; use it as a context manager."""

    def __init__(self, output: Output, verbose: int = 0, *, as_json: bool = False) -> None:
        super().__init__(_LEVELS[min(verbose, len(_LEVELS) - 1)])
        self._output, self._as_json = output, as_json
        self._json_formatter = JsonFormatter()
        self._logger = logging.getLogger("penstock")
        self._level_before = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        if self._as_json:
            fields = self._output.redact_json(self._json_formatter.fields(record))
            print(json_text(fields, ascii_only=True), file=sys.stderr)
        # Retries matter only to users who wait at a terminal.
        elif getattr(record, "action", None) != "store_retry" or sys.stderr.isatty():
            self._output.note(f"{record.levelname.lower()}: {record.getMessage()}")

    def __enter__(self) -> None:
        self._level_before = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(self.level)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)


Command = Callable[..., None]


def command(group: typer.Typer, name: str, *examples: str) -> Callable[[Command], Command]:
    """Return a decorator that adds a function to a group as a command.

    The function's first parameter is the :class:`Run`; typer fills in the others. The options of
    :class:`Common` are added.
    """
    epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)

    def add(function: Command) -> Command:
        group.command(name, epilog=epilog)(_with_common_options(function))
        return function

    return add


def _with_common_options(function: Command) -> Command:
    own_parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    common_parameters = list(inspect.signature(Common, eval_str=True).parameters.values())

    @functools.wraps(function)
    def call(**values: Any) -> None:
        context: typer.Context = values.pop("context")
        options = Common(**{option.name: values.pop(option.name) for option in common_parameters})
        run = Run(options.over(context.find_object(Common)))
        with run.log:
            run.guard(lambda: function(run, **values))

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [
        context,
        *(
            option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for option in [*own_parameters, *common_parameters]
        ),
    ]
    # typer reads both.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


@contextmanager
def until_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGINT or SIGTERM during the block; the second one interrupts it."""
    signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            # The command may be waiting for a server or a lock.
            raise KeyboardInterrupt
        stop()

    previous_handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
