"""A stateful operator above another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.modes.checking.join_bounds import unmatched_sides
from penstock.modes.checking.plan import Plan, above_aggregation, expires
from penstock.modes.checking.report import Problem
from penstock.spark.internals.operators import Is, of
from penstock.spark.internals.plan_text import NOT_PLANNED, Node

_CHECK = "spark.sql.streaming.statefulOperator.checkCorrectness.enabled"


def stateful_chains(plan: Plan, mode: str) -> Iterator[Problem]:
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


# ---- operators: Operators that Spark takes on no stream, or in some modes only.


@dataclass(frozen=True)
class _Never:
    """An operator that no mode takes."""

    code: str
    message: str
    fix: str | None = None
    condition: str | None = None


_EVER = {
    "Offset": _Never("PENSTOCK_OFFSET", "rows of a stream cannot be skipped by their number"),
    "Sample": _Never(
        "PENSTOCK_SAMPLE",
        "a stream cannot be sampled",
        "df.where('rand() < 0.1'), which chooses anew where a micro-batch is repeated; or by a hash of the key: "
        "df.where('pmod(xxhash64(id), 10) = 0')",
    ),
    "Intersect": _Never(
        "PENSTOCK_INTERSECT",
        "a stream cannot be intersected",
        "a left semi join with a watermark and a time range",
    ),
    "Window": _Never(
        "NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING",
        "window functions need all rows of a partition, and a stream has never given them all",
        "groupBy(window('<event time>', ...)) for windows of time; max_by and min_by for the last and first row of a group; "
        "or foreachBatch for what is in a micro-batch",
        "NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING",
    ),
    "Tail": _Never("PENSTOCK_TAIL", "a stream has no end to take rows from"),
}
_EXPRESSION = re.compile(r"\b(monotonically_increasing_id)\(\)")


def operators(plan: Plan, mode: str) -> Iterator[Problem]:
    """What Spark's checker says of single operators (4.2, 4.3)."""
    if not plan.root.streaming:
        yield Problem(
            "PENSTOCK_NOT_STREAMING",
            "the DataFrame is not a streaming one",
            fix="spark.readStream, or df.write for a batch",
        )
        return
    if plan.root.name == NOT_PLANNED:
        yield Problem(
            "PENSTOCK_NOT_PLANNED", f"Spark cannot plan the query, and shows nothing of it: {plan.root.text}"
        )
    for node in plan.nodes:
        if not node.streaming:
            continue
        never = _EVER.get(node.name)
        if never is not None:
            yield Problem.at(
                node,
                never.code,
                never.message,
                fix=never.fix,
                condition=never.condition,
            )
        yield from _set_operations(node)
        match = _EXPRESSION.search(node.text)
        if match is not None:
            yield Problem.at(
                node,
                "PENSTOCK_EXPRESSION",
                f"{match[1]}() begins anew in every micro-batch, and is not there for streams",
                fix="uuid(), or a key that the source gives (a queue's _partition and _row_index)",
            )


def _set_operations(node: Node) -> Iterator[Problem]:
    if node.name == "Union" and not all(child.streaming for child in node.children):
        yield Problem.at(
            node,
            "PENSTOCK_UNION_WITH_BATCH",
            "a stream cannot be united with a batch, whose rows belong to no micro-batch",
            fix="read both as streams, or write the batch into the sink first",
        )
    if node.name == "Except" and node.children[-1].streaming:
        yield Problem.at(
            node,
            "PENSTOCK_EXCEPT_STREAM",
            "rows can be taken away from a stream, and not those of a stream",
            fix="a left outer join with a watermark and a time range, of which the matched rows are left out",
        )


def sorts_and_limits(plan: Plan, mode: str) -> Iterator[Problem]:
    """Sorting, which needs the whole result, and limits."""
    for node in plan.streaming("Sort"):
        whole = mode == "complete" and above_aggregation(node)
        if not whole:
            yield Problem.at(
                node,
                "PENSTOCK_SORT",
                "sorting needs the whole result, which only an aggregation in complete mode has",
                fix="leave the order to those who read the sink; or aggregate and use outputMode('complete'); or sort in "
                "foreachBatch",
            )
    if mode == "update":
        for node in plan.limits:
            yield Problem.at(
                node,
                "PENSTOCK_LIMIT_IN_UPDATE",
                "in update mode a row may come again with other values, so that a limit has nothing to count",
                fix="outputMode('append'), where a limit counts over the whole life of the query; or, after an aggregation, "
                "outputMode('complete'), where it is a limit for each micro-batch",
            )
