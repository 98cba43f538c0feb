"""The Spark session of a command: the one that is there, or a small local one; and Spark's errors in one line."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from penstock.errors import MissingDependency, PenstockError

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

_STDERR = 2
# Of a JVM that lives for seconds: what it would spend on compiling well it never gets back.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SMALL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": _SHORT_LIVED,
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_PYTHON_LOGS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")


@contextmanager
def session_of_command(*, debug: bool = False) -> Iterator[SparkSession]:
    """A session; one that was started for it is stopped afterwards.

    Parameters
    ----------
    debug
        Whether Spark's log is shown; else an error says what there is to say.

    Raises
    ------
    MissingDependency
        When PySpark is not installed.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"this command runs Spark and needs {error.name}: pip install 'penstock[spark]'",
            package=error.name,
        ) from error
    with _silent(_PYTHON_LOGS):
        running = SparkSession.getActiveSession()
        if running is not None:
            yield running
            return
        spark = _started() if debug else _started_quietly()
        try:
            yield spark
        finally:
            spark.stop()


@contextmanager
def _silent(names: Sequence[str]) -> Iterator[None]:
    """Spark's own loggers, which say in JSON beforehand what an error says."""
    from pyspark.logger import PySparkLogger

    # They are of a class of Spark's, which adds fields to what it logs: made as others they would fail.
    logs = [PySparkLogger.getLogger(name) for name in names]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _started() -> SparkSession:
    from penstock.spark.session import session

    return session("penstock", master="local[2]", stateful=True, conf=_SMALL)


def _started_quietly() -> SparkSession:
    """Start a JVM whose standard error goes to a file, which is shown where the start fails."""
    with tempfile.TemporaryFile() as log:
        try:
            with _standard_error_to(log):
                return _started()
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise


@contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """Of this process, and of what it starts meanwhile for good."""
    kept = os.dup(_STDERR)
    try:
        os.dup2(file.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


@contextmanager
def sparks_errors_in_one_line() -> Iterator[None]:
    """What Spark raises becomes an error with Spark's condition, without plans and stacks."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        # Late: a command that has not come to Spark does not wait for its import.
        from pyspark.errors import PySparkException

        if not isinstance(error, PySparkException):
            raise
        raise _told(error) from error


def _told(error: PySparkException) -> PenstockError:
    from pyspark.errors import PythonException

    text = str(error)
    condition = error.getCondition() or "SPARK"
    if isinstance(error, PythonException):
        # The last line of the traceback is the error itself.
        condition = "PYTHON_EXCEPTION"
        lines = [line.strip() for line in text.splitlines() if line.strip() and "SQLSTATE" not in line]
        message = lines[-1]
    else:
        message = text.removeprefix(f"[{condition}] ").split(";\n")[0].split(" SQLSTATE")[0]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return PenstockError(f"{' '.join(message.split())}{notes}", condition=condition)
