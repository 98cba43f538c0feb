"""Spark's own verdict on a plan and an output mode, without starting anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame

_CHECK = "spark.sql.streaming.unsupportedOperationCheck"


@dataclass(frozen=True)
class Refusal:
    """Why Spark would not start a query."""

    condition: str | None
    message: str


def has_verdict(frame: DataFrame) -> bool:
    """Whether Spark can be asked: only a classic session reaches its checker."""
    return hasattr(frame, "_jdf")


def checks(frame: DataFrame) -> bool:
    """Whether Spark checks plans at all in this session."""
    return str(frame.sparkSession.conf.get(_CHECK, "true")).lower() == "true"


def refusal(frame: DataFrame, mode: str, *, continuous: bool = False) -> Refusal | None:
    """Why Spark would not start a query in an output mode; None when it would.

    ``UnsupportedOperationChecker.checkForStreaming`` and ``checkForContinuous`` of Spark 4.2 and 4.3, which a query's start calls
    with the same plan.
    """
    java: Any = frame
    plan = java._jdf.queryExecution().analyzed()
    jvm = java.sparkSession._jvm
    wanted = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, mode.capitalize())()
    if not checks(frame):
        return None
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        (checker.checkForContinuous if continuous else checker.checkForStreaming)(plan, wanted)
    except AnalysisException as error:
        return Refusal(error.getCondition(), _first_line(str(error)))
    return None


def _first_line(message: str) -> str:
    return message.split(";\n")[0].split(" SQLSTATE")[0].strip()
