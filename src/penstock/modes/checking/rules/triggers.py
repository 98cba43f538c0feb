"""Rules of triggers: Spark's continuous and real-time triggers, and Penstock's continuous engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.modes.checking.plan import Plan
from penstock.modes.checking.report import UNSAFE, WARNING, Problem
from penstock.modes.checking.sinks import Sink
from penstock.spark.internals.join_bounds import has_equality
from penstock.spark.internals.operators import CONTINUOUS_GENERATORS, Trait, traits_of
from penstock.spark.internals.plan_nodes import source_of
from penstock.spark.internals.plan_text import Node, without_ids
from penstock.spark.internals.sessions import parse_version

PENSTOCK_CONTINUOUS = "continuous (Penstock's)"
"""The name of Penstock's trigger in reports."""
_SPARK_SOURCES, _PENSTOCK_SOURCES = ("rate", "kafka"), ("rate", "penstock")
_NOW = re.compile(r"\b(current_timestamp|current_date|localtimestamp|now)\(")
_PENSTOCK_NOW = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\(")
_NOW_LITERAL = re.compile(r"\b(cast\((?:now|today|tomorrow|yesterday) as (?:date|timestamp))", re.IGNORECASE)
_SUBQUERY = re.compile(r"\b(scalar-subquery|exists|list|lateral-subquery)#\d")
# Plans contain SQL names, such as json_tuple.
_GENERATORS = {re.sub(r"(?<=[a-z])(?=T)", "_", name).lower() for name in CONTINUOUS_GENERATORS}
_PROCESSING_TIME = "Trigger.processing_time(...)"


def spark_continuous(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report operators and expressions that Spark's continuous trigger refuses."""
    for node in plan.nodes:
        if Trait.MAP_LIKE not in traits_of(node.name):
            yield Problem.at(
                node,
                "PENSTOCK_NOT_CONTINUOUS",
                f"the continuous trigger takes only map-like operators, and {node.name} is not one",
                fix="a processing-time trigger",
            )
        now = _NOW.search(node.text)
        if now is not None:
            yield Problem.at(
                node,
                "PENSTOCK_CONTINUOUS_NOW",
                f"{now[1]}() is the time of a micro-batch, and the continuous trigger has no micro-batches",
                fix="a time column of the rows",
            )


def spark_continuous_sources(plan: Plan) -> Iterator[Problem]:
    """Report sources without a continuous reader, which Spark refuses only when the query runs."""
    for node in plan.reads:
        if source_of(node) not in _SPARK_SOURCES:
            yield Problem.at(
                node,
                "PENSTOCK_SOURCE_NOT_CONTINUOUS",
                f"the source {source_of(node)} cannot be read continuously",
                fix="a processing-time trigger",
            )


def penstock_continuous(plan: Plan, mode: str, sink: Sink) -> Iterator[Problem]:
    """Report what Penstock's continuous engine refuses: modes, operators, expressions and sources."""
    if mode == "complete":
        yield Problem(
            "PENSTOCK_NOT_CONTINUOUS",
            "a continuous query writes each row once, and complete mode writes all groups again",
            fix=f"output_mode='append'; or {_PROCESSING_TIME}",
        )
    elif mode == "update" and sink.name == "penstock":
        yield Problem(
            "PENSTOCK_SINK_MODE",
            "a queue only grows: it takes append mode, not update",
            fix=f"output_mode='append'; or {_PROCESSING_TIME} with TableSink(name, keys=[...])",
        )
    for node in plan.nodes:
        if node not in plan.reads:
            yield from _continuous_operator(node)
    for node in plan.reads:
        if source_of(node) not in _PENSTOCK_SOURCES:
            yield Problem.at(
                node,
                "PENSTOCK_SOURCE_NOT_CONTINUOUS",
                f"the source {source_of(node)} cannot be read continuously: only a queue and a rate can",
                fix=f"QueueSource or RateSource; or {_PROCESSING_TIME}",
            )


def _continuous_operator(node: Node) -> Iterator[Problem]:
    generator = node.text.split("(")[0] if node.name == "Generate" else None
    if Trait.CONTINUOUS not in traits_of(node.name) or (
        generator is not None and generator not in _GENERATORS
    ):
        yield Problem.at(
            node,
            "PENSTOCK_NOT_CONTINUOUS",
            f"a continuous query processes rows one by one, and {generator or node.name} does not",
            fix=_PROCESSING_TIME,
        )
    elif _SUBQUERY.search(node.text):
        yield Problem.at(
            node,
            "PENSTOCK_NOT_CONTINUOUS",
            "a continuous query processes rows one by one, and a subquery does not",
            fix=_PROCESSING_TIME,
        )
    now = _PENSTOCK_NOW.search(node.text) or _NOW_LITERAL.search(node.text)
    if now is not None:
        yield Problem.at(
            node,
            "PENSTOCK_CONTINUOUS_NOW",
            f"{now[1]}{')' if '(' in now[1] else '()'} would always be the time at which the query started",
            fix=f"a time column of the rows; or {_PROCESSING_TIME}",
        )


ALLOW_LIST = "spark.sql.streaming.realTimeMode.allowlistCheck"
VERSION = "version"
"""The key of the session's version among the settings of a plan."""
_OUTPUT_MODE = "STREAMING_REAL_TIME_MODE.OUTPUT_MODE_NOT_SUPPORTED"
_STATE_BELOW_UNION = "STREAMING_REAL_TIME_MODE.STATEFUL_OPERATORS_BEFORE_UNION_NOT_SUPPORTED"
_SAME_SOURCE = "STREAMING_REAL_TIME_MODE.IDENTICAL_SOURCES_IN_UNION_NOT_SUPPORTED"
_SOURCE = "STREAMING_REAL_TIME_MODE.INPUT_STREAM_NOT_SUPPORTED"
_NOT_ALLOWED = "STREAMING_REAL_TIME_MODE.OPERATOR_OR_SINK_NOT_IN_ALLOWLIST"
_MICRO_BATCHES = "a processing-time trigger"
_SOURCES = ("kafka", "memory")
"""``memory`` is a source for tests in the JVM."""
_SINKS = ("console", "foreach", "kafka")
_END_OF_CALL = re.compile(r"\)#\d+")


def real_time(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply ``checkAdditionalRealTimeModeConstraints`` of Spark 4.3."""
    if mode != "update":
        yield Problem(
            _OUTPUT_MODE,
            f"the real-time trigger takes only update mode, not {mode}",
            fix="outputMode('update')",
            condition=_OUTPUT_MODE,
        )
    # Spark 4.2 supports no stateful operator under this trigger.
    stateful = plan.streaming_with(Trait.ABOVE_UNION) if _supports_state(plan) else []
    for node in plan.streaming("Union"):
        below = next((child for child in node.descendants() if child in stateful), None)
        if below is not None:
            yield Problem.at(
                below,
                _STATE_BELOW_UNION,
                f"under the real-time trigger the {below.name} must be above the union",
                fix=_MICRO_BATCHES + "; or the union first, and then the stateful operator",
                condition=_STATE_BELOW_UNION,
            )


def real_time_plans(plan: Plan, sink: Sink | None) -> Iterator[Problem]:
    """Report sources, operators and sinks that the real-time trigger refuses at the start (Spark 4.3)."""
    for node in plan.reads:
        if source_of(node) not in _SOURCES:
            yield Problem.at(
                node,
                _SOURCE,
                f"the source {source_of(node)} cannot be read in real time",
                fix=_MICRO_BATCHES,
                condition=_SOURCE,
            )
    yield from _same_sources(plan)
    severity = UNSAFE if plan.settings.get(ALLOW_LIST) == "false" else "refused"
    for node in plan.nodes:
        if node.streaming and not _is_allowed(plan, node):
            yield Problem.at(
                node,
                _NOT_ALLOWED,
                f"the real-time trigger does not take {_label(node)}",
                severity,
                fix=_MICRO_BATCHES,
                condition=_NOT_ALLOWED,
            )
        elif node.name == "Join" and not any(_has_broadcast_hint(child) for child in node.children):
            yield Problem.at(
                node,
                "PENSTOCK_REAL_TIME_BROADCAST",
                "the real-time trigger takes a join with a batch DataFrame only if Spark broadcasts it, as "
                "it does with small ones",
                WARNING,
                fix="F.broadcast(batch)",
            )
    if sink is not None and sink.name not in _SINKS:
        yield Problem(
            _NOT_ALLOWED,
            f"the real-time trigger does not take the sink {sink.name}",
            severity,
            fix="console, foreach or Kafka; or " + _MICRO_BATCHES,
            condition=_NOT_ALLOWED,
        )


def _same_sources(plan: Plan) -> Iterator[Problem]:
    for node in plan.streaming("Union"):
        leaves = [without_ids(leaf.text) for leaf in node.walk() if leaf.streaming and not leaf.children]
        if len(set(leaves)) < len(leaves):
            yield Problem.at(
                node,
                _SAME_SOURCE,
                "the real-time trigger does not read one stream twice for a union",
                fix="read the source once for each side of the union",
                condition=_SAME_SOURCE,
            )


def _is_allowed(plan: Plan, node: Node) -> bool:
    if node.name == "Join":
        return not all(child.streaming for child in node.children) and has_equality(node)
    if node.name == "Repartition":
        # A repartition with a shuffle is allowed, a coalesce is not.
        return node.arguments[1:2] == ("true",)
    allowed_traits = Trait.REAL_TIME | (Trait.REAL_TIME_4_3 if _supports_state(plan) else Trait(0))
    return bool(traits_of(node.name) & allowed_traits) and not _calls_python(node)


def _supports_state(plan: Plan) -> bool:
    return parse_version(plan.settings[VERSION]) >= (4, 3)


def _label(node: Node) -> str:
    return (
        f"Python functions, as in this {node.name}" if Trait.REAL_TIME in traits_of(node.name) else node.name
    )


def _has_broadcast_hint(node: Node) -> bool:
    return any(child.name == "ResolvedHint" and "broadcast" in child.text for child in node.walk())


def _calls_python(node: Node) -> bool:
    """Return whether an operator calls Python: its printed call has columns, and ends with an id."""
    for end in _END_OF_CALL.finditer(node.text):
        depth = 0
        for index in range(end.start(), -1, -1):
            depth += {")": 1, "(": -1}.get(node.text[index], 0)
            if depth == 0:
                if "#" in node.text[index : end.start()]:
                    return True
                break
    return False
