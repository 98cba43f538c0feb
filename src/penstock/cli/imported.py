"""Functions of the user's own modules, named as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInput


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Let modules of the working directory be imported, here and by Spark's workers that start meanwhile."""
    path, variable = sys.path[:], os.environ.get("PYTHONPATH")
    here = os.getcwd()
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, variable]))
    try:
        yield
    finally:
        sys.path[:] = path
        if variable is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = variable


def imported(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Raises
    ------
    InvalidInput
        There is no such module or function. What the module itself raises comes through.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name or module_name.endswith(".py") or "/" in module_name:
        raise InvalidInput(
            f"a function is written as MODULE:FUNCTION, such as job:totals for totals in job.py, not {in_quotes(target)}",
            value=target,
        )
    found: Any = _module(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidInput(
                f"module {in_quotes(module_name)} has no {in_quotes(name)}.{did_you_mean(part, dir(found))}",
                value=target,
            )
        found = getattr(found, part)
    if not callable(found):
        raise InvalidInput(f"{in_quotes(target)} is no function, but a {type(found).__name__}", value=target)
    return found  # type: ignore[no-any-return]  # callable, as was just seen


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise InvalidInput(
            f"there is no module {in_quotes(error.name)}: modules are looked for in the working directory and where Python "
            "looks",
            value=name,
        ) from error


def takes_session(function: Callable[..., Any]) -> bool:
    """Whether a function's first parameter is a Spark session: by its annotation, or by the name ``spark``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return False
    if not parameters:
        raise InvalidInput(
            f"{function.__name__} takes no parameter: give it one, a DataFrame or a Spark session called spark"
        )
    noted = parameters[0].annotation
    words = noted if isinstance(noted, str) else getattr(noted, "__name__", "")
    return parameters[0].name == "spark" or words.rpartition(".")[2] == "SparkSession"
