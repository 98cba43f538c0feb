"""Importing a user's Spark functions, and the session that runs them in a command."""

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
# For a JVM that runs only for seconds, optimizing compilation does not pay off.
_SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_QUIET_CONF = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_SMALL_CONF = _QUIET_CONF | {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": _SHORT_LIVED_JVM,
    "spark.sql.shuffle.partitions": "1",
}
_LOCAL_MASTER = "local[2]"
_PYTHON_LOGS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Make modules of the working directory importable, here and in Spark workers that start meanwhile."""
    saved_path, saved_variable = sys.path[:], os.environ.get("PYTHONPATH")
    directory = os.getcwd()
    sys.path.insert(0, directory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [directory, saved_variable]))
    try:
        yield
    finally:
        sys.path[:] = saved_path
        if saved_variable is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = saved_variable


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
            f"{name} takes no parameters: add one, for a DataFrame, or for a Spark session, called spark",
            condition="INVALID_INPUT.FUNCTION_PARAMETERS",
        )
    annotation = parameters[0].annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return parameters[0].name == "spark" or text.rpartition(".")[2] == "SparkSession"


@contextmanager
def command_session(*, debug: bool = False, master: str | None = _LOCAL_MASTER) -> Iterator[SparkSession]:
    """Provide the active Spark session, or start one that is stopped afterwards.

    By default, this is a small local session. If ``master`` is None, it is that of ``spark-submit``, or else
    one that uses all cores of this machine. Errors of Spark are raised in one line with Spark's condition,
    without plans and stack traces.
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
    """Disable Spark's own loggers, which print as JSON what the errors already say."""
    from pyspark.logger import PySparkLogger

    # The loggers must have Spark's class, which adds fields to records.
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

    conf = _SMALL_CONF if master == _LOCAL_MASTER else _QUIET_CONF
    return session("penstock", master=master, stateful=True, conf=conf)


def _start_session_quietly(master: str | None) -> SparkSession:
    """Start a JVM whose standard error goes to a file, which is printed if the start fails."""
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
    """Redirect standard error of this process, and permanently that of processes started meanwhile."""
    saved = os.dup(_STDERR)
    try:
        os.dup2(file.fileno(), _STDERR)
        yield
    finally:
        os.dup2(saved, _STDERR)
        os.close(saved)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        # The error can only be Spark's if Spark has been imported. Importing it here would take a while.
        if "pyspark.errors" not in sys.modules:
            raise
        from pyspark.errors import PySparkException

        if not isinstance(error, PySparkException):
            raise
        raise _to_spark_error(error) from error


class _SparkError(PenstockError):
    """An error with Spark's condition."""

    help_url = None


def _to_spark_error(error: PySparkException) -> PenstockError:
    from pyspark.errors import PythonException

    text = str(error)
    condition = error.getCondition() or "SPARK"
    if isinstance(error, PythonException):
        # The last line of the traceback is the error itself, except for the note of Penstock's errors.
        condition = "PYTHON_EXCEPTION"
        lines = [line.strip() for line in text.splitlines() if line.strip() and "SQLSTATE" not in line]
        message = next(line for line in reversed(lines) if not line.startswith("Help: "))
    else:
        message = text.removeprefix(f"[{condition}] ").split(";\n")[0].split(" SQLSTATE")[0]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return _SparkError(f"{' '.join(message.split())}{notes}", condition=condition)
