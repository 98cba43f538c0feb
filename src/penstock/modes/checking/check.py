"""``modes.check``: checks a query in append, update and complete mode before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from pyspark.sql import DataFrame

from penstock.arguments import in_quotes, require
from penstock.errors import InvalidInputError
from penstock.modes.checking.emits import predict_emits
from penstock.modes.checking.plan import CHECK_SETTING, MULTIPLE_SETTING, PROVIDER_SETTING, Plan
from penstock.modes.checking.report import (
    MODES,
    REFUSED,
    UNSAFE,
    WARNING,
    ModeReport,
    Problem,
    Report,
    spark_reports,
)
from penstock.modes.checking.rules.joins import joins
from penstock.modes.checking.rules.operators import (
    operators,
    rows_beside_groups,
    sorts_and_limits,
    stateful_chains,
)
from penstock.modes.checking.rules.planner import planning
from penstock.modes.checking.rules.stateful import (
    aggregates,
    deduplications,
    functions,
    missing_requirements,
    planned_aggregates,
    unfinished_groups,
    watermarks,
)
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
    operators, aggregates, rows_beside_groups, sorts_and_limits, functions, joins, stateful_chains,
    deduplications, watermarks,
)  # fmt: skip
_TRIGGER_RULES: dict[str, tuple[Rule, ...]] = {"continuous": (spark_continuous,), "real time": (real_time,)}
_WORST_FIRST = (REFUSED, UNSAFE, WARNING)
_SETTINGS = (
    CHECK_SETTING,
    "spark.sql.streaming.noDataMicroBatches.enabled",
    "spark.sql.streaming.multipleWatermarkPolicy",
    "spark.sql.streaming.statefulOperator.checkCorrectness.enabled",
    PROVIDER_SETTING,
    MULTIPLE_SETTING,
    ALLOW_LIST,
)
_TRIGGERS = {
    "processingTime": "processing time",
    "availableNow": "available now",
    "once": "once",
    "continuous": "continuous",
    "realTime": "real time",
}
_NOT_RUN_ON_CONNECT = (
    "Spark's own checker, which is not available over Spark Connect: Penstock's rules decide what is allowed",
    "the capabilities of sinks in formats that Penstock does not know",
)


def check(df: DataFrame, sink: object = None, trigger: object = None) -> Report:
    """Check what append, update and complete mode would do with a streaming DataFrame, without starting a
    query.

    In a classic session, Spark's own checker decides whether a mode is allowed. Over Spark Connect,
    Penstock's rules decide, and the report lists what was not checked.

    Parameters
    ----------
    df
        The streaming DataFrame, as it would be written.
    sink
        Where it would be written: a format such as ``"parquet"``, ``"foreach"``, ``"foreachBatch"``, a
        ``QueueSink`` or a ``TableSink``. If None, sinks are not checked.
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
    resolved_sink = sink_of(df, sink)
    trigger_name = _trigger_name(trigger, resolved_sink)
    conf = df.sparkSession.conf
    settings = {name: str(conf.get(name)) for name in _SETTINGS}
    plan = Plan(plan_tree(df), settings | {VERSION: df.sparkSession.version}, df)
    modes = tuple(_check_mode(df, plan, mode, resolved_sink, trigger_name) for mode in MODES)
    not_run = () if is_classic(df) else _NOT_RUN_ON_CONNECT
    if resolved_sink is None:
        return Report(modes, not_run, trigger=trigger_name)
    return Report(
        modes,
        (*not_run, *unchecked(resolved_sink)),
        resolved_sink.name,
        trigger_name,
        KNOWN_FROM.get(resolved_sink.name),
    )


def _trigger_name(trigger: object, sink: Sink | None) -> str:
    if getattr(trigger, "kind", None) == "continuous" and sink is not None and sink.instance is not None:
        return PENSTOCK_CONTINUOUS
    arguments = trigger.arguments() if hasattr(trigger, "arguments") else trigger
    if arguments is None:
        return "processing time"
    if not isinstance(arguments, Mapping) or len(arguments) != 1 or next(iter(arguments)) not in _TRIGGERS:
        raise InvalidInputError(
            f"a trigger is a Trigger, or one argument of Spark's trigger ({', '.join(_TRIGGERS)}) with its "
            f"value, such as {{'availableNow': True}}, not {in_quotes(trigger)}"
        )
    return _TRIGGERS[next(iter(arguments))]


def _check_mode(df: DataFrame, plan: Plan, mode: str, sink: Sink | None, trigger: str) -> ModeReport:
    if sink is not None and trigger == PENSTOCK_CONTINUOUS:
        problems = [*penstock_continuous(plan, mode, sink)]
        problems += table_refusals(df, sink.instance, mode, continuous=True) if mode != "complete" else ()
        return ModeReport(mode, tuple(problems), None if problems else predict_emits(plan, mode))
    rules = (*_RULES, *_TRIGGER_RULES.get(trigger, ()))
    problems = [problem for rule in rules for problem in rule(plan, mode)]
    problems += unfinished_groups(plan, mode, trigger)
    if is_classic(df):
        if plan.settings.get(CHECK_SETTING) == "false":
            problems = [
                replace(reported, severity=UNSAFE) if _is_refused(reported) else reported
                for reported in problems
            ]
        else:
            problems = _with_spark_verdict(problems, check_output_mode(df, mode, trigger))
    problems += [*missing_requirements(plan), *planned_aggregates(plan, mode), *planning(plan, mode)]
    if trigger == "continuous":
        problems += spark_continuous_sources(plan)
    elif trigger == "real time":
        problems += real_time_plans(plan, sink)
    emits = None if any(map(_is_refused, problems)) else predict_emits(plan, mode)
    if sink is not None:
        problems += sink_problems(sink, mode, trigger, emits)
        problems += table_refusals(df, sink.instance, mode)
    problems.sort(key=lambda problem: _WORST_FIRST.index(problem.severity))
    return ModeReport(mode, tuple(problems), None if any(map(_is_refused, problems)) else emits)


def _is_refused(problem: Problem) -> bool:
    return problem.severity == REFUSED


def _with_spark_verdict(problems: list[Problem], refusal: Refusal | None) -> list[Problem]:
    """Keep refusals only if Spark also refuses, and add Spark's message to its problem or as a new one."""
    if refusal is None:
        return [problem for problem in problems if not _is_refused(problem)]
    for index, problem in enumerate(problems):
        if _is_refused(problem) and spark_reports(problem, refusal.message):
            reported = replace(problem, spark=refusal.message, condition=refusal.condition)
            return [*problems[:index], reported, *problems[index + 1 :]]
    code = refusal.condition or "PENSTOCK_REFUSED_BY_SPARK"
    other_problem = Problem(code, refusal.message, spark=refusal.message, condition=refusal.condition)
    return [*problems, other_problem]
