"""The one place where errors become exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import typer

from penstock.cli.output.protocol import Output
from penstock.cli.output.standard_output import silence
from penstock.errors import MissingDependency, PenstockError
from penstock.extras import instead

FAILED, MISUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def guard(output: Output, debug: bool, work: Callable[[], None]) -> None:
    """Do the work of a command; what goes wrong is said in one line and becomes the exit code.

    Raises
    ------
    typer.Exit
        With the code, when it is not 0.
    """
    try:
        work()
        sys.stdout.flush()
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        # Whoever read our output has had enough, as `head` has.
        silence()
        raise typer.Exit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if is_misuse(error):
            raise
        if debug:
            print(output.redact(traceback.format_exc()), file=sys.stderr, end="")
        output.error(_expected(error, debug))
        raise typer.Exit(FAILED) from None


def is_misuse(error: BaseException) -> bool:
    """Whether an error is typer's own, about how a command was called."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _expected(error: Exception, debug: bool) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("penstock"):
        found = instead(error, "this command")
        if isinstance(found, PenstockError):
            return found
        return MissingDependency(
            f"{error.name} is not installed: pip install {error.name}", package=error.name
        )
    hint = "" if debug else "; run it again with --debug to see where"
    return PenstockError(
        f"{type(error).__name__}: {error}{hint}", condition="UNEXPECTED", type=type(error).__name__
    )
