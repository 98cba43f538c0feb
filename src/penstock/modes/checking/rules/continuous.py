"""Spark's continuous trigger."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.modes.checking.plan import Plan, source_of
from penstock.modes.checking.report import Problem
from penstock.modes.checking.sinks import Sink
from penstock.spark.internals.operators import Is, of
from penstock.spark.internals.plan_text import Node

_NOW = re.compile(r"\b(current_timestamp|current_date|localtimestamp|now)\(")
_SOURCES = ("rate", "kafka")


def spark_continuous(plan: Plan, mode: str) -> Iterator[Problem]:
    """Operators, expressions and sources that the continuous trigger does not take."""
    for node in plan.nodes:
        if Is.MAP_LIKE not in of(node.name):
            yield Problem.at(
                node,
                "PENSTOCK_NOT_CONTINUOUS",
                f"the continuous trigger takes map-like operators only, and {node.name} is none",
                fix="a processing-time trigger",
            )
        now = _NOW.search(node.text)
        if now is not None:
            yield Problem.at(
                node,
                "PENSTOCK_CONTINUOUS_NOW",
                f"{now[1]}() is the time of a micro-batch, and the continuous trigger has none",
                fix="a time that comes with the rows",
            )


def spark_continuous_sources(plan: Plan) -> Iterator[Problem]:
    """Sources that cannot be read continuously, which Spark finds out when the query runs."""
    for node in plan.nodes:
        if Is.STREAMING_READ in of(node.name) and source_of(node) not in _SOURCES:
            yield Problem.at(
                node,
                "PENSTOCK_SOURCE_NOT_CONTINUOUS",
                f"the source {source_of(node)} cannot be read continuously",
                fix="a processing-time trigger",
            )


# ---- penstock_continuous: Penstock's own continuous engine, which ``ps.Trigger.continuous`` starts.

PENSTOCK_CONTINUOUS = "continuous (Penstock's)"
"""What a report calls the trigger."""
GENERATORS = ("explode", "posexplode", "inline", "json_tuple")
_PENSTOCK_SOURCES = ("rate", "penstock")
_OTHER = "ps.Trigger.processing_time(...)"
_PENSTOCK_NOW = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\(")
_SPECIAL = re.compile(r"\b(cast\((?:now|today|tomorrow|yesterday) as (?:date|timestamp))", re.IGNORECASE)
_SUBQUERY = re.compile(r"\b(scalar-subquery|exists|list|lateral-subquery)#\d")


def penstock_continuous(plan: Plan, mode: str, sink: Sink) -> Iterator[Problem]:
    """What a pipeline with ``ps.Trigger.continuous`` refuses when it starts: modes, operators, expressions and sources."""
    if mode == "complete":
        yield Problem(
            "PENSTOCK_NOT_CONTINUOUS",
            "a continuous query takes rows one by one, and complete mode gives all of them again",
            fix=f"output_mode='append'; or {_OTHER}",
        )
    elif mode == "update" and sink.name == "penstock":
        yield Problem(
            "PENSTOCK_SINK_MODE",
            "a queue only grows: it takes append mode, not update",
            fix=f"output_mode='append'; or {_OTHER} with ps.TableSink(name, keys=[...])",
        )
    reads = [node for node in plan.nodes if Is.STREAMING_READ in of(node.name)]
    for node in plan.nodes:
        if node not in reads:
            yield from _operator(node)
    for node in reads:
        if source_of(node) not in _PENSTOCK_SOURCES:
            yield Problem.at(
                node,
                "PENSTOCK_SOURCE_NOT_CONTINUOUS",
                f"the source {source_of(node)} cannot be read continuously: a queue can, and a rate",
                fix=f"ps.QueueSource or ps.RateSource; or {_OTHER}",
            )


def _operator(node: Node) -> Iterator[Problem]:
    generator = node.text.split("(")[0] if node.name == "Generate" else None
    if Is.CONTINUOUS not in of(node.name) or (generator is not None and generator not in GENERATORS):
        yield Problem.at(
            node,
            "PENSTOCK_NOT_CONTINUOUS",
            f"a continuous query takes rows one by one, which {generator or node.name} does not",
            fix=_OTHER,
        )
    elif _SUBQUERY.search(node.text):
        yield Problem.at(
            node,
            "PENSTOCK_NOT_CONTINUOUS",
            "a continuous query takes rows one by one, which a subquery does not",
            fix=_OTHER,
        )
    now = _PENSTOCK_NOW.search(node.text) or _SPECIAL.search(node.text)
    if now is not None:
        yield Problem.at(
            node,
            "PENSTOCK_CONTINUOUS_NOW",
            f"{now[1]}{')' if '(' in now[1] else '()'} would stay at the time at which the query starts",
            fix=f"a time that comes with the rows; or {_OTHER}",
        )
