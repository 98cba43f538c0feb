"""What a DataFrame can do and a continuous query cannot, by the names that Spark has for it, and what is said about it."""

from __future__ import annotations

import re
from typing import Any

from penstock.errors import ContinuousRefused
from penstock.spark.internals.catalyst import Expression, Operator
from penstock.spark.internals.operators import CONTINUOUS_GENERATORS, Trait, traits_of

OTHER_TRIGGER = "run the pipeline with trigger=ps.Trigger.processing_time(...)"

OPERATORS = {
    "groupBy": "Aggregate", "groupby": "Aggregate", "agg": "Aggregate", "rollup": "Aggregate", "cube": "Aggregate",
    "groupingSets": "Aggregate",
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
    "describe": "Aggregate", "summary": "Aggregate", "approxQuantile": "Aggregate", "corr": "Aggregate", "cov": "Aggregate",
    "crosstab": "Aggregate", "freqItems": "Aggregate",
    "scalar": "ScalarSubquery", "exists": "Exists", "asTable": "TableArg",
}  # fmt: skip
"""Spark's operator behind each method that is refused."""

PROPERTIES = ("write", "writeStream", "rdd", "stat", "storageLevel", "executionInfo", "plot", "sql_ctx")
"""What a DataFrame gives without a call, and a continuous query does not."""


def unsupported(operation: str, **values: Any) -> ContinuousRefused:
    """The refusal of an operator, in Spark's words.

    Parameters
    ----------
    operation
        The operator by Spark's name.
    """
    return ContinuousRefused(
        f"Continuous processing does not support {operation} operations. It takes rows one by one: "
        f"select, where, withColumn and the like; for anything else {OTHER_TRIGGER}.",
        condition="CONTINUOUS_REFUSED.UNSUPPORTED_OPERATION",
        operation=operation,
        **values,
    )


def current_time(expression: str, operation: str) -> ContinuousRefused:
    """The refusal of an expression that asks for the time."""
    return ContinuousRefused(
        f"Continuous processing does not support current time operations, and {expression} is one: it would stay at the "
        f"time at which the query started. Use a time that comes with the rows or a Python function, or {OTHER_TRIGGER}.",
        condition="CONTINUOUS_REFUSED.CURRENT_TIME",
        operation=operation,
        expression=expression,
    )


def no_method(name: str) -> ContinuousRefused:
    """The refusal of a DataFrame's method that is no operator on rows, such as an action."""
    return ContinuousRefused(
        f"Continuous processing does not support DataFrame.{name}: the frame stands for rows that are still to come, "
        f"and only says what is done to each. Write with the pipeline's write(), or {OTHER_TRIGGER}.",
        condition="CONTINUOUS_REFUSED.UNSUPPORTED_METHOD",
        operation=name,
    )


# ---- allowed: Which operators and expressions of Spark's plans a continuous query takes: a list, and what is not on it is refused.

_MAPS = ("MapInArrow", "MapInPandas")
PHYSICAL = (
    "Project", "Filter", "Generate", "Range", "ColumnarToRow", "InputAdapter", "WholeStageCodegen",
    *_MAPS, "ArrowEvalPython", "BatchEvalPython",
)  # fmt: skip
_NOW = ("CurrentTimestamp", "CurrentBatchTimestamp", "CurrentDate", "CurrentTime", "LocalTimestamp", "Now")
# Texts that Spark (SpecialDatetimeValues) takes for the time at which the query is planned.
_SPECIAL = ("now", "today", "tomorrow", "yesterday")
_MAY_BE_SPECIAL = re.compile(rf"cast\( *({'|'.join(_SPECIAL)})\b[^()#]*as (date|timestamp)", re.IGNORECASE)
_SUBQUERIES = (
    "Exists",
    "FunctionTableSubqueryArgumentExpression",
    "InSubquery",
    "LateralSubquery",
    "ListQuery",
    "ScalarSubquery",
)


def check_operator(operator: Operator) -> None:
    """Look at one operator of an analysed plan and its expressions.

    Raises
    ------
    ContinuousRefused
        The operator, or one of its expressions, is not for continuous queries; the error names it.
    """
    name = operator.name
    if Trait.CONTINUOUS not in traits_of(name):
        raise unsupported(name)
    if name in _MAPS:
        return
    # What a plan has, anywhere below, is known without a look at each expression.
    if operator.has_time_or_subquery() or _MAY_BE_SPECIAL.search(operator.expressions_text()):
        for expression in operator.expressions():
            _check_expression(expression)
    if name == "Generate" and operator.generator() not in CONTINUOUS_GENERATORS:
        raise unsupported(operator.generator())


def _check_expression(expression: Expression) -> None:
    for part in expression.walk():
        name = part.name
        if name in _NOW or _is_special(part):
            raise current_time(part.sql, name)
        if name in _SUBQUERIES:
            raise unsupported(name)


def _is_special(expression: Expression) -> bool:
    """Whether it is a cast of a text that stands for the current time."""
    found = expression.cast_text()
    if found is None or not found[1].startswith(("date", "timestamp")):
        return False
    words = found[0].split()
    return bool(words) and words[0].lower() in _SPECIAL
