"""``modes.check``: what append, update and complete mode will do, before a query starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from pyspark.sql import DataFrame

from penstock.arguments import in_quotes, require
from penstock.errors import InvalidInput
from penstock.modes.checking.emits import predict_emits
from penstock.modes.checking.plan import Plan
from penstock.modes.checking.report import MODES, REFUSED, UNSAFE, ModeReport, Problem, Report
from penstock.modes.checking.rules.aggregates import aggregates, deduplications
from penstock.modes.checking.rules.continuous import (
    PENSTOCK_CONTINUOUS,
    penstock_continuous,
    spark_continuous,
    spark_continuous_sources,
)
from penstock.modes.checking.rules.functions import functions, missing_requirements
from penstock.modes.checking.rules.joins import joins
from penstock.modes.checking.rules.operators import operators, sorts_and_limits, stateful_chains
from penstock.modes.checking.rules.real_time import ALLOW_LIST, VERSION, real_time, real_time_plans
from penstock.modes.checking.rules.state import state, unfinished_groups, watermarks
from penstock.modes.checking.sinks import KNOWN_FROM, Sink, sink_of, sink_problems, table_refusals, unchecked
from penstock.spark.internals.output_mode_checker import Refusal, refusal
from penstock.spark.internals.plan_text import tree_of
from penstock.spark.internals.sessions import is_classic

Rule = Callable[[Plan, str], Iterator[Problem]]
_RULES: tuple[Rule, ...] = (
    operators, aggregates, sorts_and_limits, functions, joins, stateful_chains, deduplications, state, watermarks,
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
# The words in Spark's message (4.2, 4.3) by which it is known which of the problems Spark tells; conditions do not tell them apart.
_SAYS = {
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
    """Tell what append, update and complete mode will do with a streaming DataFrame, without starting anything.

    In a classic session Spark's own checker says whether a mode is allowed; on Spark Connect Penstock's rules do, and the report
    says what was not looked at.

    Parameters
    ----------
    df
        The streaming DataFrame, as it would be written.
    sink
        Where it would go: a format such as ``"parquet"``, ``"foreach"``, ``"foreachBatch"``, a ``ps.QueueSink`` or a
        ``ps.TableSink``; sinks are not looked at when None.
    trigger
        A ``ps.Trigger``, or the arguments of Spark's ``trigger`` such as ``{"continuous": "1 second"}``. A
        ``ps.Trigger.continuous`` with a sink that is an object of Penstock's is Penstock's own engine, anything else Spark's.

    Returns
    -------
    Report
        For each mode whether it is ``allowed`` and ``safe``, what it ``emits``, and all ``problems``.

    Raises
    ------
    InvalidInput
        When an argument is of another kind.
    """
    require("df", df, DataFrame, "a streaming DataFrame")
    found = sink_of(df, sink)
    kind = PENSTOCK_CONTINUOUS if _is_penstocks(found, trigger) else _trigger(trigger)
    conf = df.sparkSession.conf
    settings = {name: str(conf.get(name)) for name in _SETTINGS}
    plan = Plan(tree_of(df), settings | {VERSION: df.sparkSession.version})
    modes = tuple(_mode(df, plan, mode, found, kind) for mode in MODES)
    if found is None:
        return Report(modes, _not_run(df), trigger=kind)
    return Report(modes, (*_not_run(df), *unchecked(found)), found.name, kind, KNOWN_FROM.get(found.name))


def _is_penstocks(sink: Sink | None, trigger: object) -> bool:
    """Whether a pipeline into this sink is run by Penstock's own engine."""
    return sink is not None and sink.given is not None and getattr(trigger, "kind", None) == "continuous"


def _trigger(trigger: object) -> str:
    given = trigger.arguments() if hasattr(trigger, "arguments") else trigger
    if given is None:
        return "processing time"
    if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in _TRIGGERS:
        raise InvalidInput(
            f"a trigger is a ps.Trigger, or one argument of Spark's trigger ({', '.join(_TRIGGERS)}) with its value, such as "
            f"{{'availableNow': True}}, not {in_quotes(trigger)}"
        )
    return _TRIGGERS[next(iter(given))]


def _not_run(df: DataFrame) -> tuple[str, ...]:
    if is_classic(df):
        return ()
    return (
        "Spark's own checker, which a Spark Connect session does not reach: what is allowed is told by Penstock's rules alone",
        "the sinks' own capabilities, of formats that Penstock does not know",
    )


def _mode(df: DataFrame, plan: Plan, mode: str, sink: Sink | None, trigger: str) -> ModeReport:
    if sink is not None and trigger == PENSTOCK_CONTINUOUS:
        told = [*penstock_continuous(plan, mode, sink)]
        told += table_refusals(df, sink.given, mode, continuous=True) if mode != "complete" else ()
        return ModeReport(mode, tuple(told), None if told else predict_emits(plan, mode))
    rules = (*_RULES, *_RULES_OF.get(trigger, ()))
    problems = [problem for rule in rules for problem in rule(plan, mode)]
    problems += unfinished_groups(plan, mode, trigger)
    if is_classic(df):
        checked = plan.settings.get(_CHECK) != "false"
        refused = refusal(df, mode, trigger) if checked else None
        problems = list(_agreed(problems, refused, checked=checked))
    problems += [
        *missing_requirements(plan),
        *(spark_continuous_sources(plan) if trigger == "continuous" else ()),
    ]
    problems += real_time_plans(plan, sink) if trigger == "real time" else ()
    runs = not any(problem.severity == REFUSED for problem in problems)
    emits = predict_emits(plan, mode) if runs else None
    if sink is not None:
        problems += sink_problems(sink, mode, trigger, emits)
        problems += table_refusals(df, sink.given, mode)
        if any(problem.severity == REFUSED for problem in problems):
            emits = None
    order = (REFUSED, UNSAFE)
    problems.sort(key=lambda each: order.index(each.severity) if each.severity in order else len(order))
    return ModeReport(mode, tuple(problems), emits)


def _agreed(problems: Iterable[Problem], told: Refusal | None, *, checked: bool) -> Iterator[Problem]:
    """The problems as Spark sees them: what it does not refuse is not refused, and what it says is among them."""
    known = False
    for problem in problems:
        if problem.severity != REFUSED:
            yield problem
        elif told is None:
            if not checked:
                yield replace(problem, severity=UNSAFE)
        elif not known and _SAYS.get(problem.code, "\0").lower() in told.message.lower():
            known = True
            yield replace(problem, spark=told.message, condition=told.condition)
        else:
            yield problem
    if told is not None and not known:
        yield Problem(
            told.condition or "PENSTOCK_REFUSED_BY_SPARK",
            told.message,
            spark=told.message,
            condition=told.condition,
        )
