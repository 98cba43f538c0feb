"""Rules of the continuous triggers: Spark's, and Penstock's own engine, which ``Trigger.continuous``
starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.modes.checking.plan import Plan, source_of
from penstock.modes.checking.report import Problem
from penstock.modes.checking.sinks import Sink
from penstock.spark.internals.operators import CONTINUOUS_GENERATORS, Trait, traits_of
from penstock.spark.internals.plan_text import Node

PENSTOCK_CONTINUOUS = "continuous (Penstock's)"
"""The trigger of Penstock's engine in reports."""
_SPARK_SOURCES, _PENSTOCK_SOURCES = ("rate", "kafka"), ("rate", "penstock")
_NOW = re.compile(r"\b(current_timestamp|current_date|localtimestamp|now)\(")
_PENSTOCK_NOW = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\(")
_SPECIAL = re.compile(r"\b(cast\((?:now|today|tomorrow|yesterday) as (?:date|timestamp))", re.IGNORECASE)
_SUBQUERY = re.compile(r"\b(scalar-subquery|exists|list|lateral-subquery)#\d")
# A plan prints SQL names, such as json_tuple.
_GENERATORS = {re.sub(r"(?<=[a-z])(?=T)", "_", name).lower() for name in CONTINUOUS_GENERATORS}
_OTHER = "Trigger.processing_time(...)"


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
                f"{now[1]}() is the time of a micro-batch, and the continuous trigger has none",
                fix="a time column of the rows",
            )


def spark_continuous_sources(plan: Plan) -> Iterator[Problem]:
    """Report sources without a continuous reader, which Spark refuses only when the query runs."""
    for node in plan.nodes:
        if Trait.STREAMING_READ in traits_of(node.name) and source_of(node) not in _SPARK_SOURCES:
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
            fix=f"output_mode='append'; or {_OTHER}",
        )
    elif mode == "update" and sink.name == "penstock":
        yield Problem(
            "PENSTOCK_SINK_MODE",
            "a queue only grows: it takes append mode, not update",
            fix=f"output_mode='append'; or {_OTHER} with TableSink(name, keys=[...])",
        )
    reads = [node for node in plan.nodes if Trait.STREAMING_READ in traits_of(node.name)]
    for node in plan.nodes:
        if node not in reads:
            yield from _operator(node)
    for node in reads:
        if source_of(node) not in _PENSTOCK_SOURCES:
            yield Problem.at(
                node,
                "PENSTOCK_SOURCE_NOT_CONTINUOUS",
                f"the source {source_of(node)} cannot be read continuously: only a queue and a rate can",
                fix=f"QueueSource or RateSource; or {_OTHER}",
            )


def _operator(node: Node) -> Iterator[Problem]:
    generator = node.text.split("(")[0] if node.name == "Generate" else None
    if Trait.CONTINUOUS not in traits_of(node.name) or (
        generator is not None and generator not in _GENERATORS
    ):
        yield Problem.at(
            node,
            "PENSTOCK_NOT_CONTINUOUS",
            f"a continuous query takes rows one by one, and {generator or node.name} does not",
            fix=_OTHER,
        )
    elif _SUBQUERY.search(node.text):
        yield Problem.at(
            node,
            "PENSTOCK_NOT_CONTINUOUS",
            "a continuous query takes rows one by one, and a subquery does not",
            fix=_OTHER,
        )
    now = _PENSTOCK_NOW.search(node.text) or _SPECIAL.search(node.text)
    if now is not None:
        yield Problem.at(
            node,
            "PENSTOCK_CONTINUOUS_NOW",
            f"{now[1]}{')' if '(' in now[1] else '()'} would always be the time at which the query started",
            fix=f"a time column of the rows; or {_OTHER}",
        )
