"""The user's Spark functions and the session that runs them in a command."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import IO, TYPE_CHECKING, TypeAlias

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError, PenstockError

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession

Function: TypeAlias = "Callable[[DataFrame | SparkSession], DataFrame]"

_STDERR = 2
# A JVM that lives for seconds never earns back the time to compile well.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_QUIET = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_SMALL = _QUIET | {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": _SHORT_LIVED,
    "spark.sql.shuffle.partitions": "1",
}
_ONE_MACHINE = "local[2]"
_PYTHON_LOGS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Make modules of the working directory importable, here and in Spark's workers that start meanwhile."""
    path, variable = sys.path[:], os.environ.get("PYTHONPATH")
    directory = os.getcwd()
    sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, variable]))
    try:
        yield
    finally:
        sys.path[:] = path
        if variable is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = variable


def import_function(target: str) -> Function:
    """Import a function by its name ``module:function``."""
    module_name, _, name = target.partition(":")
    if not module_name or not name or module_name.endswith(".py") or "/" in module_name:
        raise InvalidInputError(
            "a function is written as MODULE:FUNCTION, such as job:totals for totals in job.py, not "
            f"{in_quotes(target)}",
            value=target,
        )
    member: object = _import_module(module_name)
    for part in name.split("."):
        if not hasattr(member, part):
            raise InvalidInputError(
                f"module {in_quotes(module_name)} has no {in_quotes(name)}.{did_you_mean(part, dir(member))}",
                condition="INVALID_INPUT.FUNCTION_NOT_FOUND",
                value=target,
            )
        member = getattr(member, part)
    if not callable(member):
        raise InvalidInputError(
            f"{in_quotes(target)} is a {type(member).__name__}, not a function",
            condition="INVALID_INPUT.FUNCTION_NOT_FOUND",
            value=target,
        )
    return member


def _import_module(name: str) -> ModuleType:
    try:
        with _one_line_errors():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise InvalidInputError(
            f"no module {in_quotes(error.name)} in the working directory or on Python's path",
            condition="INVALID_INPUT.FUNCTION_NOT_FOUND",
            value=name,
        ) from error


def takes_session(function: Function) -> bool:
    """Return whether a function's first parameter is a Spark session, by its annotation or name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return False
    if not parameters:
        name = getattr(function, "__name__", "the function")
        raise InvalidInputError(
            f"{name} takes no parameter: add one, a DataFrame or a Spark session called spark",
            condition="INVALID_INPUT.FUNCTION_PARAMETERS",
        )
    annotation = parameters[0].annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return parameters[0].name == "spark" or text.rpartition(".")[2] == "SparkSession"


@contextmanager
def spark_of_command(*, debug: bool = False, master: str | None = _ONE_MACHINE) -> Iterator[SparkSession]:
    """Provide the active Spark session, or one that is stopped afterwards: by default a small local one, and
    for a ``master`` of None that of ``spark-submit``, or else all of this machine.

    Errors of Spark are raised in one line, with Spark's condition, and without plans and stacks.
    """
    from pyspark.sql import SparkSession

    with _one_line_errors(), _silent_python_logs():
        active = SparkSession.getActiveSession()
        if active is not None:
            yield active
            return
        spark = _start_session(master) if debug else _start_session_quietly(master)
        try:
            yield spark
        finally:
            spark.stop()


@contextmanager
def _silent_python_logs() -> Iterator[None]:
    """Switch off Spark's own loggers, which print in JSON what its errors say too."""
    from pyspark.logger import PySparkLogger

    # They must be of Spark's class, which adds fields to what it logs.
    logs = [PySparkLogger.getLogger(name) for name in _PYTHON_LOGS]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _start_session(master: str | None) -> SparkSession:
    from penstock.spark.session import session

    conf = _SMALL if master == _ONE_MACHINE else _QUIET
    return session("penstock", master=master, stateful=True, conf=conf)


def _start_session_quietly(master: str | None) -> SparkSession:
    """Start a JVM whose standard error goes to a file, which is printed when the start fails."""
    with tempfile.TemporaryFile() as log:
        try:
            with _standard_error_to(log):
                return _start_session(master)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise


@contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect the standard error of this process, and for good that of processes it starts meanwhile."""
    kept = os.dup(_STDERR)
    try:
        os.dup2(file.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        # Only where Spark was imported can the error be one of its own; importing it takes a while.
        if "pyspark.errors" not in sys.modules:
            raise
        from pyspark.errors import PySparkException

        if not isinstance(error, PySparkException):
            raise
        raise _in_one_line(error) from error


class _SparkError(PenstockError):
    """An error with Spark's condition."""

    help_url = None


def _in_one_line(error: PySparkException) -> PenstockError:
    from pyspark.errors import PythonException

    text = str(error)
    condition = error.getCondition() or "SPARK"
    if isinstance(error, PythonException):
        # The last line of the traceback, but for the note of Penstock's errors, is the error itself.
        condition = "PYTHON_EXCEPTION"
        lines = [line.strip() for line in text.splitlines() if line.strip() and "SQLSTATE" not in line]
        message = next(line for line in reversed(lines) if not line.startswith("Help: "))
    else:
        message = text.removeprefix(f"[{condition}] ").split(";\n")[0].split(" SQLSTATE")[0]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return _SparkError(f"{' '.join(message.split())}{notes}", condition=condition)
