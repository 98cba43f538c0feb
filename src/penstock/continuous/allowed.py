"""Which operators and expressions of Spark's plans a continuous query takes: a list, and what is not on it is refused."""

from __future__ import annotations

import re

from penstock.continuous.operations import current_time, unsupported
from penstock.spark.internals.logical import Expression, Operator
from penstock.spark.internals.operators import Is, of

GENERATORS = ("Explode", "PosExplode", "Inline", "JsonTuple")
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
    if Is.CONTINUOUS not in of(name):
        raise unsupported(name)
    if name in _MAPS:
        return
    # What a plan has, anywhere below, is known without a look at each expression.
    if operator.has_time_or_subquery() or _MAY_BE_SPECIAL.search(operator.expressions_text()):
        for expression in operator.expressions():
            _check_expression(expression)
    if name == "Generate" and operator.generator() not in GENERATORS:
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
