"""Check a continuous query's plan against the list of supported operators, and find its Python stages.

An operator that is not on the list is refused by Spark's name for it.
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

OPERATORS = {
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
"""Spark's operator behind each method that is refused."""

PROPERTIES = ("write", "writeStream", "rdd", "stat", "storageLevel", "executionInfo", "plot", "sql_ctx")
"""Properties of a DataFrame that are refused."""

_MAPS = ("MapInArrow", "MapInPandas")
PHYSICAL = (
    "Project", "Filter", "Generate", "Range", "ColumnarToRow", "InputAdapter", "WholeStageCodegen",
    *_MAPS, "ArrowEvalPython", "BatchEvalPython",
)  # fmt: skip
_NOW = ("CurrentTimestamp", "CurrentBatchTimestamp", "CurrentDate", "CurrentTime", "LocalTimestamp", "Now")
# Spark (SpecialDatetimeValues) replaces these texts by the time when the query is planned.
_SPECIAL = ("now", "today", "tomorrow", "yesterday")
_MAY_BE_SPECIAL = re.compile(rf"cast\( *({'|'.join(_SPECIAL)})\b[^()#]*as (date|timestamp)", re.IGNORECASE)
_SUBQUERIES = (
    "Exists", "FunctionTableSubqueryArgumentExpression", "InSubquery", "LateralSubquery", "ListQuery",
    "ScalarSubquery",
)  # fmt: skip
_STAGES = {"MapInArrow": "mapInArrow", "MapInPandas": "mapInPandas", "BatchEvalPython": "pickled UDF"}
_SLOW = {
    "pandas UDF": "A pandas UDF holds each row back for tens of milliseconds; an Arrow UDF for a few.",
    "pickled UDF": "A pickled Python UDF holds each row back for most of a second; an Arrow UDF for a few "
    "milliseconds.",
}
BATCH_ROWS = 64
"""Rows in a batch for Python (``spark.sql.execution.arrow.maxRecordsPerBatch``); small, for low latency."""


@dataclass(frozen=True)
class CheckedPlan:
    """The plan that Spark runs between a continuous query's reader and its writer."""

    python_stages: tuple[str, ...]
    """The stages that send rows through a separate Python worker, in order. UDFs that Spark runs together are
    one stage."""

    @property
    def filler_rows(self) -> int:
        """The number of rows that push the rows before them through all stages."""
        # The JVM reads one more row before it closes a batch, and another row pushes out the last bytes.
        return BATCH_ROWS * (1 + len(self.python_stages)) + 2

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the latency of this plan for the user."""
        return tuple(_SLOW[stage] for stage in dict.fromkeys(self.python_stages) if stage in _SLOW)

    def require_pipelined(self, pipelined: bool, version: str) -> None:
        """Refuse Python stages if Spark would run them one by one, each waiting for the end of its input."""
        old = parse_version(version) < (4, 3)
        if self.python_stages and (old or not pipelined):
            stages = ", ".join(dict.fromkeys(self.python_stages))
            fix = f"make it with penstock.session(pipelined=True), or set {PIPELINED}=true when it starts"
            raise ContinuousRefusedError(
                f"the query has Python stages ({stages}), and this session holds rows back in such stages"
                + (f", as Spark {version} always does: use Spark 4.3" if old else f": {fix}"),
                condition="CONTINUOUS_REFUSED.NOT_PIPELINED",
                stages=self.python_stages,
            )


def check_plan(carried: DataFrame) -> CheckedPlan:
    """Check all operators of a continuous query, which begins with the reader, against the list."""
    for operator in _operators(analysed_plan(carried)):
        if operator.name != "Range":
            check_operator(operator)
    stages: list[str] = []
    for operator in _operators(executed_plan(carried)):
        # The name of generated code ends with a number.
        name = operator.name.partition(" ")[0]
        if name not in PHYSICAL:
            raise unsupported(name)
        if name == "ArrowEvalPython":
            stages.append(f"{operator.udf_kind()} UDF")
        elif name in _STAGES:
            stages.append(_STAGES[name])
    # The last is the reader.
    return CheckedPlan(tuple(reversed(stages[:-1])))


def _operators(operator: Operator) -> Iterator[Operator]:
    """Yield the operators of a plan without branches, from the top."""
    below = [operator]
    while below:
        if len(below) > 1:
            raise unsupported(operator.name)
        (operator,) = below
        yield operator
        below = operator.children()


def check_operator(operator: Operator) -> None:
    """Check one operator of an analysed plan and its expressions."""
    name = operator.name
    if Trait.CONTINUOUS not in traits_of(name):
        raise unsupported(name)
    if name in _MAPS:
        return
    # One call to the JVM checks the whole operator, instead of one for each expression.
    if operator.has_time_or_subquery() or _MAY_BE_SPECIAL.search(operator.expressions_text()):
        for part in operator.expressions():
            if part.name in _NOW or _is_special(part):
                raise current_time(part.sql, part.name)
            if part.name in _SUBQUERIES:
                raise unsupported(part.name)
    if name == "Generate" and operator.generator() not in CONTINUOUS_GENERATORS:
        raise unsupported(operator.generator())


def _is_special(expression: Expression) -> bool:
    """Return whether an expression casts a text that means the current time."""
    cast = expression.cast_text()
    if cast is None or not cast[1].startswith(("date", "timestamp")):
        return False
    words = cast[0].split()
    return bool(words) and words[0].lower() in _SPECIAL


def unsupported(operation: str, **values: object) -> ContinuousRefusedError:
    """Return the error for an operator, by Spark's name."""
    return ContinuousRefusedError(
        f"continuous processing does not support {operation} operations, only those on single rows, such "
        f"as select, where and withColumn: {OTHER_TRIGGER}",
        condition="CONTINUOUS_REFUSED.UNSUPPORTED_OPERATION",
        operation=operation,
        **values,
    )


def current_time(expression: str, operation: str) -> ContinuousRefusedError:
    return ContinuousRefusedError(
        f"continuous processing does not support current time operations, and {expression} is one: it would "
        "keep the time when the query started. Use a time that comes with the rows or a Python function, or "
        f"{OTHER_TRIGGER}",
        condition="CONTINUOUS_REFUSED.CURRENT_TIME",
        operation=operation,
        expression=expression,
    )


def no_method(name: str) -> ContinuousRefusedError:
    """Return the error for a DataFrame method that is not an operation on rows, such as an action."""
    return ContinuousRefusedError(
        f"continuous processing does not support DataFrame.{name}, because the DataFrame only describes what "
        "is done to rows that have not arrived yet: write with the pipeline's write(), or "
        f"{OTHER_TRIGGER}",
        condition="CONTINUOUS_REFUSED.UNSUPPORTED_METHOD",
        operation=name,
    )
