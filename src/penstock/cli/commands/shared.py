"""What every command shares: its options, its store, its output and its way to fail."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.boundary import guard
from penstock.cli.command_log import CommandLog
from penstock.cli.output.protocol import Output
from penstock.errors import InvalidInput, StoreNotFound

if TYPE_CHECKING:
    from penstock.queue.store import Store

URL_VARIABLE = "PENSTOCK_URL"
DEFAULT_URL = "sqlite:///penstock.db"

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        show_default=False,
        help=f"The store: sqlite:///FILE or postgresql://USER@HOST/DATABASE. [{URL_VARIABLE}, or else {DEFAULT_URL}]",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", show_default=False, help="Results and errors as JSON, for programs.")
]
DebugOption = Annotated[
    bool, typer.Option("--debug", show_default=False, help="Show where an error comes from.")
]
VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Say what happens; -vv says each step."
    ),
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", show_default=False, help="The log as lines of JSON, on standard error.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", show_default=False, help="Do not ask.")]


_COMMON = {
    "url": (UrlOption, None),
    "json": (JsonOption, False),
    "debug": (DebugOption, False),
    "verbose": (VerboseOption, 0),
    "log_json": (LogJsonOption, False),
}


@dataclass(frozen=True)
class Common:
    """The options that every command has."""

    url: str | None = None
    json: bool = False
    debug: bool = False
    verbose: int = 0
    log_json: bool = False

    def over(self, other: Common | None) -> Common:
        """These options, and those given before the command where they are not given here."""
        if other is None:
            return self
        return Common(
            self.url or other.url,
            self.json or other.json,
            self.debug or other.debug,
            max(self.verbose, other.verbose),
            self.log_json or other.log_json,
        )


class Run:
    """One run of a command."""

    def __init__(self, common: Common) -> None:
        given = common.url or os.environ.get(URL_VARIABLE)
        self.url, self._is_named = given or DEFAULT_URL, bool(given)
        self.debug = common.debug
        self.json = common.json
        self.output = make_output(self.url, common.json)
        self.log = CommandLog(self.output, common.verbose, as_json=common.log_json)

    def connect(self, *, create: bool = False) -> Store:
        """Open the store; without ``create`` it has to be there."""
        from penstock.queue.store import connect

        try:
            return connect(self.url, create=create)
        except StoreNotFound as error:
            if self._is_named:
                raise
            told = f"{error.message}; no other one is named, by --url or the variable {URL_VARIABLE}"
            raise StoreNotFound(told, condition=error.condition, **error.parameters) from None

    def confirm(self, question: str, yes: bool) -> None:
        """Ask before something is lost.

        Raises
        ------
        InvalidInput
            There is nobody to ask, or the answer is no.
        """
        if yes:
            return
        if self.json or not _is_asked():
            raise InvalidInput(f"{question} Repeat it with --yes", condition="CONFIRMATION_NEEDED")
        if not typer.confirm(question, err=True):
            raise InvalidInput("nothing was done", condition="NOT_CONFIRMED")


def _is_asked() -> bool:
    # Python has none where its descriptor was closed.
    return sys.stdin is not None and sys.stdin.isatty()


def make_output(url: str, json: bool) -> Output:
    if json:
        from penstock.cli.output.json import JsonOutput

        return JsonOutput(url)
    from penstock.cli.output.text import TextOutput

    return TextOutput(url)


Command = Callable[..., None]


def command(
    group: typer.Typer, name: str, *, examples: Sequence[str] = (), **settings: Any
) -> Callable[[Command], Command]:
    """Make a function a command of a group.

    Its first parameter is the :class:`Run`, the others are as for typer; the options of :class:`Common` are added.

    Parameters
    ----------
    examples
        Lines that are shown under the help.
    settings
        Passed on to typer.
    """

    def add(function: Command) -> Command:
        group.command(name, epilog=_examples(examples), **settings)(_with_common_options(function))
        return function

    return add


def _examples(lines: Sequence[str]) -> str | None:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) if lines else None


def _with_common_options(function: Command) -> Command:
    signature = inspect.signature(function, eval_str=True)
    own = list(signature.parameters.values())[1:]

    @functools.wraps(function)
    def call(**values: Any) -> None:
        context: typer.Context = values.pop("context")
        common = Common(**{name: values.pop(name) for name in _COMMON})
        run = Run(common.over(context.find_object(Common)))
        with run.log:
            guard(run.output, run.debug, lambda: function(run, **values))

    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
            for name, (option, default) in _COMMON.items()
        ),
    ]
    # typer reads both.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # a function takes any attribute
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
