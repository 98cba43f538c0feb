"""Check of a continuous query's plan: only listed operators are supported.

The error for another operator has Spark's name for it. The check also finds the plan's Python stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ContinuousRefusedError
from penstock.spark.internals.operators import CONTINUOUS_GENERATORS, Trait, traits_of
from penstock.spark.internals.plans import (
    Expression,
    Operator,
    analysed_plan,
    executed_plan,
)
from penstock.spark.internals.sessions import parse_version
from penstock.spark.session import PIPELINED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OTHER_TRIGGER = "run the pipeline with trigger=penstock.Trigger.processing_time(...)"

OPERATORS_OF_METHODS = {
    "groupBy": "Aggregate", "groupby": "Aggregate", "agg": "Aggregate", "rollup": "Aggregate",
    "cube": "Aggregate", "groupingSets": "Aggregate",
    "distinct": "Deduplicate", "dropDuplicates": "Deduplicate", "drop_duplicates": "Deduplicate",
    "dropDuplicatesWithinWatermark": "DeduplicateWithinWatermark",
    "join": "Join", "crossJoin": "Join", "lateralJoin": "LateralJoin", "nearestByJoin": "Join", "zip": "Zip",
    "union": "Union", "unionAll": "Union", "unionByName": "Union",
    "intersect": "Intersect", "intersectAll": "Intersect", "subtract": "Except", "exceptAll": "Except",
    "sort": "Sort", "orderBy": "Sort", "sortWithinPartitions": "Sort",
    "limit": "GlobalLimit", "offset": "Offset", "tail": "Tail",
    "sample": "Sample", "sampleBy": "Sample", "randomSplit": "Sample",
    "repartition": "Repartition", "coalesce": "Repartition",
    "repartitionByRange": "RepartitionByExpression", "repartitionById": "RepartitionByExpression",
    "unpivot": "Unpivot", "melt": "Unpivot", "transpose": "Transpose",
    "withWatermark": "EventTimeWatermark", "observe": "CollectMetrics", "hint": "ResolvedHint",
    "zipWithIndex": "Window",
    "describe": "Aggregate", "summary": "Aggregate", "approxQuantile": "Aggregate", "corr": "Aggregate",
    "cov": "Aggregate", "crosstab": "Aggregate", "freqItems": "Aggregate",
    "scalar": "ScalarSubquery", "exists": "Exists", "asTable": "TableArg",
}  # fmt: skip
"""Spark's operator for each refused method."""

PROPERTIES = ("write", "writeStream", "rdd", "stat", "storageLevel", "executionInfo", "plot", "sql_ctx")
"""Refused properties of a DataFrame."""

_MAP_OPERATORS = ("MapInArrow", "MapInPandas")
_PHYSICAL_OPERATORS = (
    "Project", "Filter", "Generate", "Range", "ColumnarToRow", "InputAdapter", "WholeStageCodegen",
    *_MAP_OPERATORS, "ArrowEvalPython", "BatchEvalPython",
)  # fmt: skip
_TIME_FUNCTIONS = (
    "CurrentTimestamp",
    "CurrentBatchTimestamp",
    "CurrentDate",
    "CurrentTime",
    "LocalTimestamp",
    "Now",
)
# Spark (SpecialDatetimeValues) replaces these texts with the time when the query is planned.
_SPECIAL_TIMES = ("now", "today", "tomorrow", "yesterday")
_SPECIAL_TIME_CAST = re.compile(
    rf"cast\( *({'|'.join(_SPECIAL_TIMES)})\b[^()#]*as (date|timestamp)", re.IGNORECASE
)
_SUBQUERIES = (
    "Exists", "FunctionTableSubqueryArgumentExpression", "InSubquery", "LateralSubquery", "ListQuery",
    "ScalarSubquery",
)  # fmt: skip
_PYTHON_STAGES = {"MapInArrow": "mapInArrow", "MapInPandas": "mapInPandas", "BatchEvalPython": "pickled UDF"}
_LATENCY_NOTES = {
    "pandas UDF": "A pandas UDF holds each row back for tens of milliseconds; an Arrow UDF for a few.",
    "pickled UDF": "A pickled Python UDF holds each row back for most of a second; an Arrow UDF for a few "
    "milliseconds.",
}
BATCH_ROWS = 64
"""The rows of a batch for Python (``spark.sql.execution.arrow.maxRecordsPerBatch``); few, for low latency."""


@dataclass(frozen=True)
class CheckedPlan:
    """The plan that Spark runs between a continuous query's reader and its writer."""

    python_stages: tuple[str, ...]
    """The stages that send rows through a separate Python worker, in order. UDFs that Spark runs together
    form one stage."""

    @property
    def filler_rows(self) -> int:
        """The number of filler rows that push the rows before them through all stages."""
        # The JVM reads one more row before it closes a batch; another row pushes out the last bytes.
        return BATCH_ROWS * (1 + len(self.python_stages)) + 2

    @property
    def latency_notes(self) -> tuple[str, ...]:
        """Sentences for the user about slow stages of this plan."""
        return tuple(
            _LATENCY_NOTES[stage] for stage in dict.fromkeys(self.python_stages) if stage in _LATENCY_NOTES
        )

    def require_pipelined(self, pipelined: bool, version: str) -> None:
        """Refuse Python stages if each would wait for the end of its input."""
        never_pipelines = parse_version(version) < (4, 3)
        if self.python_stages and (never_pipelines or not pipelined):
            stages = ", ".join(dict.fromkeys(self.python_stages))
            advice = (
                f"create it with penstock.session(pipelined=True), or set {PIPELINED}=true when it starts"
            )
            raise ContinuousRefusedError(
                f"the query has Python stages ({stages}), and this session holds rows back in such stages"
                + (f", as Spark {version} always does: use Spark 4.3" if never_pipelines else f": {advice}"),
                condition="CONTINUOUS_REFUSED.NOT_PIPELINED",
                stages=self.python_stages,
            )


def check_plan(frame: DataFrame) -> CheckedPlan:
    """Check all operators of a continuous query, which starts with the reader."""
    for operator in _operators(analysed_plan(frame)):
        if operator.name != "Range":
            check_operator(operator)
    stages: list[str] = []
    for operator in _operators(executed_plan(frame)):
        # The names of generated code end with a number.
        name = operator.name.partition(" ")[0]
        if name not in _PHYSICAL_OPERATORS:
            raise unsupported_error(name)
        if name == "ArrowEvalPython":
            stages.append(f"{operator.udf_kind()} UDF")
        elif name in _PYTHON_STAGES:
            stages.append(_PYTHON_STAGES[name])
    # The last stage is the reader.
    return CheckedPlan(tuple(reversed(stages[:-1])))


def _operators(operator: Operator) -> Iterator[Operator]:
    """Yield the operators of a plan without branches, from the top."""
    children = [operator]
    while children:
        if len(children) > 1:
            raise unsupported_error(operator.name)
        (operator,) = children
        yield operator
        children = operator.children()


def check_operator(operator: Operator) -> None:
    """Check an operator of an analysed plan, and its expressions."""
    name = operator.name
    if Trait.CONTINUOUS not in traits_of(name):
        raise unsupported_error(name)
    if name in _MAP_OPERATORS:
        return
    # One call to the JVM checks the whole operator, instead of one call for each expression.
    if operator.has_time_or_subquery() or _SPECIAL_TIME_CAST.search(operator.expressions_text()):
        for expression in operator.expressions():
            if expression.name in _TIME_FUNCTIONS or _is_special_time(expression):
                raise current_time_error(expression.sql, expression.name)
            if expression.name in _SUBQUERIES:
                raise unsupported_error(expression.name)
    if name == "Generate" and operator.generator() not in CONTINUOUS_GENERATORS:
        raise unsupported_error(operator.generator())


def _is_special_time(expression: Expression) -> bool:
    """Return whether an expression casts a text that stands for the current time."""
    cast_text = expression.cast_text()
    if cast_text is None or not cast_text[1].startswith(("date", "timestamp")):
        return False
    words = cast_text[0].split()
    return bool(words) and words[0].lower() in _SPECIAL_TIMES


def unsupported_error(operation: str, **values: object) -> ContinuousRefusedError:
    """Return the error for an operator with this name in Spark."""
    return ContinuousRefusedError(
        f"continuous processing does not support {operation} operations, only those on single rows, such "
        f"as select, where and withColumn: {OTHER_TRIGGER}",
        condition="CONTINUOUS_REFUSED.UNSUPPORTED_OPERATION",
        operation=operation,
        **values,
    )


def current_time_error(expression: str, operation: str) -> ContinuousRefusedError:
    return ContinuousRefusedError(
        f"continuous processing does not support current time operations such as {expression}, which would "
        "keep the time when the query started: use a time from the rows, or a Python function, or "
        f"{OTHER_TRIGGER}",
        condition="CONTINUOUS_REFUSED.CURRENT_TIME",
        operation=operation,
        expression=expression,
    )


def unsupported_method_error(name: str) -> ContinuousRefusedError:
    """Return the error for a DataFrame method that does not transform rows, such as an action."""
    return ContinuousRefusedError(
        f"continuous processing does not support DataFrame.{name}, because the DataFrame only describes "
        "how to transform rows that arrive later: write with the pipeline's write(), or "
        f"{OTHER_TRIGGER}",
        condition="CONTINUOUS_REFUSED.UNSUPPORTED_METHOD",
        operation=name,
    )
