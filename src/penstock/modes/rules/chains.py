"""A stateful operator above another."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.join_bounds import unmatched_sides
from penstock.modes.plan import Plan, expires
from penstock.modes.report import Problem
from penstock.spark.internals.operators import Is, of
from penstock.spark.internals.plan_text import Node

_CHECK = "spark.sql.streaming.statefulOperator.checkCorrectness.enabled"


def chains(plan: Plan, mode: str) -> Iterator[Problem]:
    """Spark's correctness check (4.2, 4.3): outside append mode an operator may give rows that the next takes for late."""
    if mode == "append" or plan.settings.get(_CHECK, "true") != "true":
        return
    for node in plan.stateful:
        if not _late(node):
            continue
        below = next((each for each in node.below() if each in plan.stateful and _gives_late(each)), None)
        if below is not None:
            yield Problem.at(
                node,
                "PENSTOCK_STATEFUL_AFTER_STATEFUL",
                f"{below.name} gives rows again in {mode} mode, or rows behind the watermark, which the {node.name} above "
                "it would drop as late",
                fix="outputMode('append'); or two queries with a queue between them",
            )
            return


def _late(node: Node) -> bool:
    """Whether an operator drops rows behind the watermark, or counts rows that come again twice."""
    if node.name in ("Deduplicate", "Distinct"):
        return expires(node)
    return Is.DROPS_LATE in of(node.name)


def _gives_late(node: Node) -> bool:
    if node.name == "Join":
        return bool(unmatched_sides(node))
    return node.name == "Aggregate"
