"""Rules of operators that Spark refuses on streams, of sorts and limits, and of stateful operator chains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from penstock.modes.checking.plan import MULTIPLE_SETTING, Plan, above_aggregation, expires
from penstock.modes.checking.report import REFUSED, UNSAFE, Problem
from penstock.spark.internals.join_bounds import unmatched_sides
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_nodes import output_columns, times_out_by_event_time
from penstock.spark.internals.plan_text import ANALYSIS_FAILED, Node, has_watermark

_CHECK_SETTING = "spark.sql.streaming.statefulOperator.checkCorrectness.enabled"
_WINDOW = "NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING"
_REFUSED_OPERATORS = {
    "Offset": Problem("PENSTOCK_OFFSET", "a stream has no row numbers to skip by"),
    "Sample": Problem(
        "PENSTOCK_SAMPLE",
        "a stream cannot be sampled",
        fix="df.where('rand() < 0.1'), which samples again where a micro-batch is repeated; or by a hash of "
        "the key: df.where('pmod(xxhash64(id), 10) = 0')",
    ),
    "Intersect": Problem(
        "PENSTOCK_INTERSECT",
        "a stream cannot be intersected",
        fix="a left semi join with a watermark and a time range",
    ),
    "Window": Problem(
        _WINDOW,
        "window functions need all rows of a partition, and a stream is never complete",
        fix="groupBy(window('<event time>', ...)) for windows of time; max_by and min_by for the last and "
        "first row of a group; or foreachBatch for the rows of a micro-batch",
        condition=_WINDOW,
    ),
    "Tail": Problem("PENSTOCK_TAIL", "a stream has no end to take rows from"),
}
"""The problems of operators that no output mode supports."""
_BOTH = {True, False}
_EXPRESSION = re.compile(r"\b(monotonically_increasing_id)\(\)")


def operators(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply the rules of Spark's checker for single operators (4.2, 4.3)."""
    if not plan.root.streaming:
        yield Problem(
            "PENSTOCK_NOT_STREAMING",
            "the DataFrame is not a streaming DataFrame",
            fix="spark.readStream, or df.write for a batch",
        )
        return
    if plan.root.name == ANALYSIS_FAILED:
        yield Problem("PENSTOCK_NOT_PLANNED", f"Spark cannot plan the query: {plan.root.text}")
    for node in plan.nodes:
        if not node.streaming:
            continue
        if Trait.REFUSED in traits_of(node.name):
            yield replace(_REFUSED_OPERATORS[node.name], operator=node.name, line=node.line)
        yield from _set_operations(node)
        match = _EXPRESSION.search(node.text)
        if match is not None:
            yield Problem.at(
                node,
                "PENSTOCK_EXPRESSION",
                f"{match[1]}() restarts in every micro-batch, so Spark refuses it on streams",
                fix="uuid(), or a key of the source (a queue's _partition and _row_index)",
            )


def _set_operations(node: Node) -> Iterator[Problem]:
    if node.name == "Union" and not all(child.streaming for child in node.children):
        yield Problem.at(
            node,
            "PENSTOCK_UNION_WITH_BATCH",
            "a stream cannot be united with a batch DataFrame, whose rows belong to no micro-batch",
            fix="read both as streams, or write the batch to the sink first",
        )
    if node.name == "Except" and node.children[-1].streaming:
        yield Problem.at(
            node,
            "PENSTOCK_EXCEPT_STREAM",
            "the rows of a stream cannot be subtracted",
            fix="a left outer join with a watermark and a time range, and a filter that drops the matched "
            "rows",
        )


def rows_beside_groups(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report a union in complete mode that has groups of one input and single rows of another."""
    if mode != "complete":
        return
    for node in _above_aggregations(plan.root):
        if (
            node.name == "Union"
            and {_has_aggregation(child) for child in node.children if child.streaming} == _BOTH
        ):
            yield Problem.at(
                node,
                "PENSTOCK_ROWS_BESIDE_GROUPS",
                "complete mode replaces all rows in the sink in each micro-batch, and an input of the union "
                "without an aggregation emits a row only in one micro-batch: the next one removes it",
                UNSAFE,
                fix="outputMode('update') with a sink that replaces by key; or two queries",
            )
            return


def _above_aggregations(node: Node) -> Iterator[Node]:
    """Return the operators whose rows reach the sink without an aggregation, from the top."""
    if node.streaming and Trait.AGGREGATION not in traits_of(node.name):
        yield node
        for child in node.children:
            yield from _above_aggregations(child)


def _has_aggregation(node: Node) -> bool:
    return Trait.AGGREGATION in traits_of(node.name) or above_aggregation(node)


def sorts_and_limits(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report sorts, which require the whole result, and limits in update mode."""
    for node in plan.streaming("Sort"):
        if not (mode == "complete" and above_aggregation(node)):
            yield Problem.at(
                node,
                "PENSTOCK_SORT",
                "sorting needs the whole result, which only an aggregation in complete mode has",
                fix="sort when reading the sink; or aggregate and use outputMode('complete'); or sort in "
                "foreachBatch",
            )
    if mode == "update":
        for node in plan.limits:
            yield Problem.at(
                node,
                "PENSTOCK_LIMIT_IN_UPDATE",
                "in update mode a row may be emitted again with other values, so a limit cannot count rows",
                fix="outputMode('append'), where a limit counts over the whole life of the query; or, after "
                "an aggregation, outputMode('complete'), where it is a limit for each micro-batch",
            )


def stateful_chains(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report operators that emit rows which the next operator drops as late, or counts twice.

    Spark refuses such chains (4.2, 4.3), unless its check is turned off. If all operators share one
    watermark, it refuses too few of them.
    """
    is_checked = plan.settings.get(_CHECK_SETTING, "true") == "true"
    for node in filter(_drops_late_rows, plan.stateful):
        below = [child for child in node.descendants() if child in plan.stateful]
        late = next((child for child in below if _emits_late_rows(child, mode)), None)
        if late is not None:
            yield _late_rows(node, late, mode, REFUSED if is_checked else UNSAFE)
            return
    if plan.settings.get(MULTIPLE_SETTING, "true") != "true":
        yield from _chains_with_one_watermark(plan)


def _late_rows(node: Node, below: Node, mode: str, severity: str) -> Problem:
    if times_out_by_event_time(below):
        reason = f"with an event-time timeout {below.name} may emit rows behind the watermark"
        fix = "transformWithState; or two queries with a queue between them"
    else:
        reason = f"in {mode} mode {below.name} emits rows again, or rows behind the watermark"
        fix = "outputMode('append'); or two queries with a queue between them"
    return Problem.at(
        node,
        "PENSTOCK_STATEFUL_AFTER_STATEFUL",
        f"{reason}, which the {node.name} above it would drop as late",
        severity,
        fix=fix,
    )


def _chains_with_one_watermark(plan: Plan) -> Iterator[Problem]:
    """Report operators that emit rows behind the watermark of the query, below one that drops such rows."""
    for node in filter(_drops_late_rows, plan.stateful):
        columns = [column for child in node.children for column in output_columns(child)]
        below = [child for child in node.descendants() if child in (*plan.aggregates, *plan.joins)]
        if below and any(map(has_watermark, columns)):
            yield Problem.at(
                node,
                "PENSTOCK_STATEFUL_AFTER_STATEFUL",
                f"{MULTIPLE_SETTING} is false, so all operators share one watermark: {below[0].name} emits "
                f"rows behind it, and the {node.name} above it drops them as late",
                UNSAFE,
                fix=f"spark.conf.set('{MULTIPLE_SETTING}', 'true')",
            )
            return


def _drops_late_rows(node: Node) -> bool:
    """Return whether an operator drops rows behind the watermark, or counts repeated rows twice."""
    properties = traits_of(node.name)
    return Trait.DROPS_LATE in properties or (Trait.DROPS_LATE_BY_KEY in properties and expires(node))


def _emits_late_rows(node: Node, mode: str) -> bool:
    if times_out_by_event_time(node):
        return True
    if node.name == "Join":
        return mode != "append" and bool(unmatched_sides(node))
    return mode != "append" and Trait.AGGREGATION in traits_of(node.name)
