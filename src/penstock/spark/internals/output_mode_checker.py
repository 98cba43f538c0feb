"""Spark's own check of a plan in an output mode, without starting anything (``UnsupportedOperationChecker``, Spark 4.2 and 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException
from pyspark.sql import DataFrame

from penstock.spark.internals.catalyst import analysed
from penstock.spark.internals.sessions import JvmError


@dataclass(frozen=True)
class Refusal:
    """Why Spark would not start a query."""

    condition: str | None
    message: str


def check_output_mode(frame: DataFrame, mode: str, trigger: str = "processing time") -> Refusal | None:
    """Why Spark would not start a query of a classic session in an output mode; None when it would.

    A query's start calls ``checkForStreaming``, ``checkForContinuous`` and ``checkAdditionalRealTimeModeConstraints`` with the same plan.

    Parameters
    ----------
    trigger
        What it would be started with: ``continuous`` and ``real time`` have checks of their own.
    """
    java: Any = frame
    checker, modes = _checker(java.sparkSession._jvm)
    plan = analysed(frame)
    try:
        if trigger == "continuous":
            checker.checkForContinuous(plan, modes[mode])
        else:
            checker.checkForStreaming(plan, modes[mode])
        if trigger == "real time":
            checker.checkAdditionalRealTimeModeConstraints(plan, modes[mode])
    except (AnalysisException, IllegalArgumentException) as error:
        return Refusal(error.getCondition(), _first_line(error.getMessage()))
    return None


def refusal_of_error(error: Exception) -> Refusal:
    """What an error of Spark's says, also one of a kind that PySpark has no class for."""
    if isinstance(error, PySparkException):
        return Refusal(error.getCondition(), _first_line(error.getMessage() or str(error)))
    thrown = getattr(error, "java_exception", None)
    if thrown is None:
        return Refusal(None, _first_line(str(error)))
    try:
        condition = str(thrown.getCondition())
    except JvmError:
        # It has none.
        condition = None
    return Refusal(condition, _first_line(str(thrown.getMessage())))


@lru_cache(maxsize=1)
def _checker(jvm: Any) -> tuple[Any, dict[str, Any]]:
    """The checker's class and the output modes: each step to them by name is a call of its own."""
    sql = jvm.org.apache.spark.sql
    modes = sql.streaming.OutputMode
    known = {"append": modes.Append(), "update": modes.Update(), "complete": modes.Complete()}
    return sql.catalyst.analysis.UnsupportedOperationChecker, known


def _first_line(message: str) -> str:
    return message.split(";\n")[0].split(" SQLSTATE")[0].strip()
