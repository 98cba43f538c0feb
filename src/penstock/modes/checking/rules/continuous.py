"""Spark's continuous trigger."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.modes.checking.plan import Plan, source_of
from penstock.modes.checking.report import Problem
from penstock.spark.internals.operators import Trait, traits_of

_NOW = re.compile(r"\b(current_timestamp|current_date|localtimestamp|now)\(")
_SOURCES = ("rate", "kafka")


def continuous(plan: Plan, mode: str) -> Iterator[Problem]:
    """Operators, expressions and sources that the continuous trigger does not take."""
    for node in plan.nodes:
        if Trait.MAP_LIKE not in traits_of(node.name):
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


def sources(plan: Plan) -> Iterator[Problem]:
    """Sources that cannot be read continuously, which Spark finds out when the query runs."""
    for node in plan.nodes:
        if Trait.STREAMING_READ in traits_of(node.name) and source_of(node) not in _SOURCES:
            yield Problem.at(
                node,
                "PENSTOCK_SOURCE_NOT_CONTINUOUS",
                f"the source {source_of(node)} cannot be read continuously",
                fix="a processing-time trigger",
            )
