"""Penstock's errors across the boundary to Spark.

Where Spark calls Penstock, errors are raised without their traceback, which would hide the message in Spark's
report. On the driver, the original error is recovered from that report.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from pyspark.errors import AnalysisException, PySparkException

from penstock.errors import ContinuousFailedError, PenstockError, QueryFailedError, error_class
from penstock.spark.internals.python_workers import freeze_imports
from penstock.spark.internals.sessions import JvmError, JvmException, cause_of

Class = TypeVar("Class", bound=type)
T = TypeVar("T")
P = ParamSpec("P")

# A line of a Python traceback with an error's class, condition and message.
_PENSTOCK_ERROR = re.compile(
    r"^[ \t]*(?:Caused by: )?penstock\.([\w.]+): \[([A-Z_0-9.]+)\] (.*)$", re.MULTILINE
)
# Errors of a micro-batch whose Spark context is stopped (4.2, 4.3).
_SHUT_DOWN_MESSAGE = re.compile(
    r"SparkContext was shut down|stopped SparkContext|SparkContext\.dagScheduler\(\)\" is null"
)
# What PySpark and Spark add before the message of a job's error, and a stack frame of the JVM (4.2, 4.3).
_BEFORE_MESSAGE = re.compile(
    r"\A(?:An error occurred while calling \S+\n: )?(?:[\w.$]+: )?(?:Job aborted due to stage failure: .*?"
    r"(?:finished unsuccessfully\.\s+|\(executor [^)]*\): )(?:[\w.$]+: )?)?",
    re.DOTALL,
)
_JVM_FRAME = re.compile(r"^\s+(?:at [^\s(]+\(.*|\.\.\. \d+ more)\n?", re.MULTILINE)
_TRACEBACK = re.compile(r"^.*?(Traceback \(most recent call last\):.*?)\s*(?:SQLSTATE: 38000|\Z)", re.DOTALL)


def without_tracebacks(cls: Class) -> Class:
    """Decorate a class so that its public methods raise Penstock's errors without tracebacks."""
    for name, method in list(vars(cls).items()):
        if callable(method) and not name.startswith("_"):
            setattr(cls, name, _callback(method))
    return cls


def without_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it raises Penstock's errors without tracebacks.

    This includes errors of its Spark jobs, which Spark reports after the tracebacks of the driver and the
    task.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return function(*arguments, **named)
        except PenstockError as error:
            raise error.with_traceback(None) from None
        except (PySparkException, JvmException) as error:
            reported = _reported_error(error)
            if reported is None:
                raise
            raise reported from None

    return call


def _callback(method: Callable[P, T]) -> Callable[P, T | Iterator[object]]:
    @functools.wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> T | Iterator[object]:
        # Using without_traceback here would add a frame to the traceback.
        try:
            result = method(*arguments, **named)
        except PenstockError as error:
            raise error.with_traceback(None) from None
        return iterate_in_worker(result) if isinstance(result, Iterator) else result

    return call


def iterate_in_worker(rows: Iterator[T]) -> Iterator[T]:
    """Yield the rows of a task in one of Spark's Python workers.

    Penstock's errors are raised without tracebacks, and the worker's garbage collection after the task skips
    imported modules.
    """
    freeze_imports()
    try:
        yield from rows
    except PenstockError as error:
        raise error.with_traceback(None) from None


def original_error(error: Exception) -> Exception:
    """Return the Penstock error in Spark's report, or else the error itself."""
    reported = _reported_error(error)
    if reported is None and (_has_jvm_ended(error) or _SHUT_DOWN_MESSAGE.search(_report(error))):
        return _shut_down_error()
    return reported or error


def job_failure(error: Exception) -> Exception:
    """Return the error of a Spark job without stack frames of the JVM.

    It is Penstock's own error, or what a user's function or expression has raised. Other errors, and the
    shutdown of Spark, are returned unchanged.
    """
    if not isinstance(error, PySparkException | JvmException | ContinuousFailedError):
        return error
    report = _report(error)
    reported = _reported_error(error)
    if reported is not None or isinstance(error, ContinuousFailedError) or _SHUT_DOWN_MESSAGE.search(report):
        return reported or error
    return ContinuousFailedError(f"a task of the query failed: {_cause(report)}")


def _cause(report: str) -> str:
    """Return the message of a job's error, followed by the traceback if a Python function raised it."""
    text = _BEFORE_MESSAGE.sub("", _JVM_FRAME.sub("", report), count=1).strip()
    traceback = _TRACEBACK.match(text)
    if traceback is None:
        return text
    lines = traceback[1].rstrip().splitlines()
    last_frame = max(number for number, line in enumerate(lines) if line.startswith((" ", "Traceback")))
    return "\n".join([*lines[last_frame + 1 :], *lines])


def _reported_error(error: Exception) -> PenstockError | None:
    """Return the last Penstock error in Spark's report, or the one that the writer of a continuous query
    reports, which is in the first two lines: a traceback may follow, with earlier errors.
    """
    report = _report(error)
    if isinstance(error, ContinuousFailedError):
        report = "\n".join(report.splitlines()[:2])
    matches = _PENSTOCK_ERROR.findall(report)
    if not matches:
        return None
    name, condition, message = matches[-1]
    error_type = error_class(name.rpartition(".")[2]) or QueryFailedError
    return error_type(message.strip(), condition=condition)


@contextmanager
def raising_original_errors() -> Iterator[None]:
    """Raise the Penstock error that is inside an analysis error of Spark."""
    try:
        yield
    except AnalysisException as error:
        raise original_error(error) from None


def _report(error: BaseException | None) -> str:
    """Return the messages of an error and its causes; Spark's own may be just "Writing job failed"."""
    messages = []
    while error is not None:
        messages.append(str(error))
        error = cause_of(error)
    return "\n".join(messages)


def _has_jvm_ended(error: Exception) -> bool:
    """Return whether the JVM did not answer; an exception that it raised is an answer."""
    return isinstance(error, JvmError | ConnectionError) and not isinstance(error, JvmException)


def _shut_down_error() -> QueryFailedError:
    return QueryFailedError(
        "Spark was shut down during a micro-batch or epoch, which the next run repeats. To stop a query, "
        "send the signal only to the driver's process, not to its process group "
        "(timeout --foreground, systemd's KillMode=mixed)",
        condition="QUERY_FAILED.SPARK_SHUT_DOWN",
    )
