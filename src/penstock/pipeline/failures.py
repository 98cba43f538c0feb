"""The original error behind a failure that Spark reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import AnalysisException

from penstock.errors import QueryFailed, error_class
from penstock.spark.internals.sessions import JvmError, JvmException

# One line of a Python traceback: the error's class, its condition, its message.
_OURS = re.compile(r"^[ \t]*(?:Caused by: )?penstock\.([\w.]+): \[([A-Z_0-9.]+)\] (.*)$", re.MULTILINE)


# What a micro-batch fails with when its Spark context ends under it (4.2, 4.3).
_SHUT_DOWN = re.compile(
    r"SparkContext was shut down|stopped SparkContext|SparkContext\.dagScheduler\(\)\" is null"
)


def original_error(error: Exception) -> Exception:
    """Return Penstock's error in what Spark reports; Spark's own error without one."""
    text = "\n".join(_messages(error))
    matches = _OURS.findall(text)
    if not matches:
        return _shut_down() if _has_jvm_ended(error) or _SHUT_DOWN.search(text) else error
    name, condition, message = matches[-1]
    kind = error_class(name.rpartition(".")[2]) or QueryFailed
    return kind(message.strip(), condition=condition)


@contextmanager
def raising_original_errors() -> Iterator[None]:
    """Raise Penstock's errors in what Spark raises while it analyses a plan."""
    try:
        yield
    except AnalysisException as error:
        raise original_error(error) from None


def _messages(error: BaseException | None) -> Iterator[str]:
    """Yield the messages of an error and of its causes.

    Spark's own may be just "Writing job failed" if an abort fails as well.
    """
    while error is not None:
        yield str(error)
        error = getattr(error, "_cause", None) or error.__cause__


def _has_jvm_ended(error: Exception) -> bool:
    """Return whether the JVM did not answer; an error that it raised is an answer."""
    return isinstance(error, JvmError | ConnectionError) and not isinstance(error, JvmException)


def _shut_down() -> QueryFailed:
    return QueryFailed(
        "Spark was shut down in the middle of a micro-batch, which the next run repeats. A signal to the "
        "whole process group, as from timeout or systemd's KillMode=control-group, ends Spark's JVM at once: "
        "send it to the driver alone (timeout --foreground, KillMode=mixed), which then finishes the "
        "micro-batch",
        condition="QUERY_FAILED.SPARK_SHUT_DOWN",
    )
