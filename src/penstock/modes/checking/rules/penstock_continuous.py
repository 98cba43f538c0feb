"""Penstock's own continuous engine, which ``ps.Trigger.continuous`` starts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.modes.checking.plan import Plan, source_of
from penstock.modes.checking.report import Problem
from penstock.modes.checking.sinks import Sink
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import Node

KIND = "continuous (Penstock's)"
"""What a report calls the trigger."""
GENERATORS = ("explode", "posexplode", "inline", "json_tuple")
_SOURCES = ("rate", "penstock")
_OTHER = "ps.Trigger.processing_time(...)"
_NOW = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\(")
_SPECIAL = re.compile(r"\b(cast\((?:now|today|tomorrow|yesterday) as (?:date|timestamp))", re.IGNORECASE)
_SUBQUERY = re.compile(r"\b(scalar-subquery|exists|list|lateral-subquery)#\d")


def penstocks_continuous(plan: Plan, mode: str, sink: Sink) -> Iterator[Problem]:
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
    reads = [node for node in plan.nodes if Trait.STREAMING_READ in traits_of(node.name)]
    for node in plan.nodes:
        if node not in reads:
            yield from _operator(node)
    for node in reads:
        if source_of(node) not in _SOURCES:
            yield Problem.at(
                node,
                "PENSTOCK_SOURCE_NOT_CONTINUOUS",
                f"the source {source_of(node)} cannot be read continuously: a queue can, and a rate",
                fix=f"ps.QueueSource or ps.RateSource; or {_OTHER}",
            )


def _operator(node: Node) -> Iterator[Problem]:
    generator = node.text.split("(")[0] if node.name == "Generate" else None
    if Trait.CONTINUOUS not in traits_of(node.name) or (
        generator is not None and generator not in GENERATORS
    ):
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
    now = _NOW.search(node.text) or _SPECIAL.search(node.text)
    if now is not None:
        yield Problem.at(
            node,
            "PENSTOCK_CONTINUOUS_NOW",
            f"{now[1]}{')' if '(' in now[1] else '()'} would stay at the time at which the query starts",
            fix=f"a time that comes with the rows; or {_OTHER}",
        )
