"""``modes.check``: checks a query in append, update and complete mode before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from pyspark.sql import DataFrame

from penstock.arguments import in_quotes, require
from penstock.errors import InvalidInputError
from penstock.modes.checking.emits import predict_emits
from penstock.modes.checking.plan import Plan
from penstock.modes.checking.report import MODES, REFUSED, UNSAFE, ModeReport, Problem, Report
from penstock.modes.checking.rules.joins import joins
from penstock.modes.checking.rules.operators import operators, sorts_and_limits, stateful_chains
from penstock.modes.checking.rules.state import state, unfinished_groups, watermarks
from penstock.modes.checking.rules.stateful import aggregates, deduplications, functions, missing_requirements
from penstock.modes.checking.rules.triggers import (
    ALLOW_LIST,
    PENSTOCK_CONTINUOUS,
    VERSION,
    penstock_continuous,
    real_time,
    real_time_plans,
    spark_continuous,
    spark_continuous_sources,
)
from penstock.modes.checking.sinks import KNOWN_FROM, Sink, sink_of, sink_problems, table_refusals, unchecked
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.query_start import Refusal, check_output_mode
from penstock.spark.internals.sessions import is_classic

Rule = Callable[[Plan, str], Iterator[Problem]]
_RULES: tuple[Rule, ...] = (
    operators, aggregates, sorts_and_limits, functions, joins, stateful_chains, deduplications, state,
    watermarks,
)  # fmt: skip
_RULES_OF: dict[str, tuple[Rule, ...]] = {"continuous": (spark_continuous,), "real time": (real_time,)}
_CHECK = "spark.sql.streaming.unsupportedOperationCheck"
_SETTINGS = (
    _CHECK,
    "spark.sql.streaming.noDataMicroBatches.enabled",
    "spark.sql.streaming.multipleWatermarkPolicy",
    "spark.sql.streaming.statefulOperator.checkCorrectness.enabled",
    "spark.sql.streaming.stateStore.providerClass",
    ALLOW_LIST,
)
_TRIGGERS = {
    "processingTime": "processing time",
    "availableNow": "available now",
    "once": "once",
    "continuous": "continuous",
    "realTime": "real time",
}
# Text of Spark's message (4.2, 4.3) for each problem, since several problems share one condition.
_SPARK_TEXT = {
    "PENSTOCK_COMPLETE_WITHOUT_AGGREGATION": "no streaming aggregations",
    "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK": "aggregations without watermark",
    "PENSTOCK_EVENT_TIME_LOST": "aggregations without watermark",
    "PENSTOCK_WATERMARK_NOT_IN_GROUPING": "aggregations without watermark",
    "PENSTOCK_SESSION_WINDOW_IN_UPDATE": "session window",
    "PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK": "dropDuplicatesWithinWatermark is not",
    "PENSTOCK_DISTINCT_AGGREGATE": "Distinct aggregations",
    "PENSTOCK_OFFSET": "Offset is not",
    "PENSTOCK_SAMPLE": "Sampling is not",
    "PENSTOCK_INTERSECT": "Intersect of",
    "NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING": "NON_TIME_WINDOW",
    "PENSTOCK_EXPRESSION": "Expression(s)",
    "PENSTOCK_UNION_WITH_BATCH": "Union between",
    "PENSTOCK_EXCEPT_STREAM": "Except on",
    "PENSTOCK_SORT": "Sorting is not",
    "PENSTOCK_LIMIT_IN_UPDATE": "Limits are not",
    "PENSTOCK_ANTI_JOIN": "LeftAnti join",
    "PENSTOCK_JOIN_MODE": "output mode, only in",
    "PENSTOCK_OUTER_JOIN_WITHOUT_TIME": "without a watermark in the join keys",
    "PENSTOCK_JOIN_WITH_BATCH": "static DataFrame",
    "PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS": "Multiple ",
    "PENSTOCK_MAP_GROUPS_MODE": "mapGroupsWithState is not",
    "PENSTOCK_FUNCTION_AFTER_AGGREGATION": "aggregation on a streaming",
    "PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION": "with aggregation on a streaming",
    "PENSTOCK_FUNCTION_MODE": "output mode on a streaming",
    "PENSTOCK_STATEFUL_AFTER_STATEFUL": "Detected pattern",
    "PENSTOCK_NOT_CONTINUOUS": "Continuous processing does not support",
    "PENSTOCK_CONTINUOUS_NOW": "current time",
    "STREAMING_REAL_TIME_MODE.OUTPUT_MODE_NOT_SUPPORTED": "The output mode",
    "STREAMING_REAL_TIME_MODE.STATEFUL_OPERATORS_BEFORE_UNION_NOT_SUPPORTED": "before a union",
    "PENSTOCK_NOT_STREAMING": "without streaming sources",
}


def check(df: DataFrame, sink: object = None, trigger: object = None) -> Report:
    """Check what append, update and complete mode would do with a streaming DataFrame, without starting a
    query.

    In a classic session Spark's own checker decides whether a mode is allowed; on Spark Connect Penstock's
    rules do, and the report lists what was not checked.

    Parameters
    ----------
    df
        The streaming DataFrame, as it would be written.
    sink
        Where it would go: a format such as ``"parquet"``, ``"foreach"``, ``"foreachBatch"``, a ``QueueSink``
        or a ``TableSink``; sinks are not checked when None.
    trigger
        A ``Trigger``, or the arguments of Spark's ``trigger`` such as ``{"continuous": "1 second"}``. A
        ``Trigger.continuous`` with a sink object of Penstock runs on Penstock's own engine, anything else on
        Spark's.

    Returns
    -------
    Report
        For each mode whether it is ``allowed`` and ``safe``, what it ``emits``, and all ``problems``.

    Raises
    ------
    InvalidInputError
        When an argument has the wrong type.
    """
    require("df", df, DataFrame, "a streaming DataFrame")
    known = sink_of(df, sink)
    kind = PENSTOCK_CONTINUOUS if _is_penstock_continuous(known, trigger) else _trigger(trigger)
    conf = df.sparkSession.conf
    settings = {name: str(conf.get(name)) for name in _SETTINGS}
    plan = Plan(plan_tree(df), settings | {VERSION: df.sparkSession.version})
    modes = tuple(_mode(df, plan, mode, known, kind) for mode in MODES)
    if known is None:
        return Report(modes, _not_run(df), trigger=kind)
    return Report(modes, (*_not_run(df), *unchecked(known)), known.name, kind, KNOWN_FROM.get(known.name))


def _is_penstock_continuous(sink: Sink | None, trigger: object) -> bool:
    """Whether Penstock's own engine would run a pipeline to this sink."""
    return sink is not None and sink.instance is not None and getattr(trigger, "kind", None) == "continuous"


def _trigger(trigger: object) -> str:
    arguments = trigger.arguments() if hasattr(trigger, "arguments") else trigger
    if arguments is None:
        return "processing time"
    if not isinstance(arguments, Mapping) or len(arguments) != 1 or next(iter(arguments)) not in _TRIGGERS:
        raise InvalidInputError(
            f"a trigger is a Trigger, or one argument of Spark's trigger ({', '.join(_TRIGGERS)}) with its "
            f"value, such as {{'availableNow': True}}, not {in_quotes(trigger)}"
        )
    return _TRIGGERS[next(iter(arguments))]


def _not_run(df: DataFrame) -> tuple[str, ...]:
    if is_classic(df):
        return ()
    return (
        "Spark's own checker, which Spark Connect does not reach: Penstock's rules decide what is allowed",
        "the capabilities of sinks in formats that Penstock does not know",
    )


def _mode(df: DataFrame, plan: Plan, mode: str, sink: Sink | None, trigger: str) -> ModeReport:
    if sink is not None and trigger == PENSTOCK_CONTINUOUS:
        refusals = [*penstock_continuous(plan, mode, sink)]
        refusals += table_refusals(df, sink.instance, mode, continuous=True) if mode != "complete" else ()
        return ModeReport(mode, tuple(refusals), None if refusals else predict_emits(plan, mode))
    rules = (*_RULES, *_RULES_OF.get(trigger, ()))
    problems = [problem for rule in rules for problem in rule(plan, mode)]
    problems += unfinished_groups(plan, mode, trigger)
    if is_classic(df):
        checked = plan.settings.get(_CHECK) != "false"
        refused = check_output_mode(df, mode, trigger) if checked else None
        problems = list(_with_spark_verdict(problems, refused, checked=checked))
    problems += [
        *missing_requirements(plan),
        *(spark_continuous_sources(plan) if trigger == "continuous" else ()),
    ]
    problems += real_time_plans(plan, sink) if trigger == "real time" else ()
    runs = not any(problem.severity == REFUSED for problem in problems)
    emits = predict_emits(plan, mode) if runs else None
    if sink is not None:
        problems += sink_problems(sink, mode, trigger, emits)
        problems += table_refusals(df, sink.instance, mode)
        if any(problem.severity == REFUSED for problem in problems):
            emits = None
    order = (REFUSED, UNSAFE)
    problems.sort(key=lambda problem: (*order, problem.severity).index(problem.severity))
    return ModeReport(mode, tuple(problems), emits)


def _with_spark_verdict(
    problems: Iterable[Problem], refused: Refusal | None, *, checked: bool
) -> Iterator[Problem]:
    """Keep refusals only where Spark refuses too, and add Spark's message to its problem, or as a problem."""
    known = False
    for problem in problems:
        if problem.severity != REFUSED:
            yield problem
        elif refused is None:
            if not checked:
                yield replace(problem, severity=UNSAFE)
        elif not known and _SPARK_TEXT.get(problem.code, "\0").lower() in refused.message.lower():
            known = True
            yield replace(problem, spark=refused.message, condition=refused.condition)
        else:
            yield problem
    if refused is not None and not known:
        yield Problem(
            refused.condition or "PENSTOCK_REFUSED_BY_SPARK",
            refused.message,
            spark=refused.message,
            condition=refused.condition,
        )
