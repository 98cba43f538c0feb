"""Rules of Spark's planner (4.2, 4.3), which refuses queries in a micro-batch that Spark's checker allows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.modes.checking.plan import (
    MULTIPLE_SETTING,
    PROVIDER_SETTING,
    Plan,
    above_aggregation,
    expires,
    keys_of,
)
from penstock.modes.checking.report import REFUSED, UNSAFE, Problem
from penstock.spark.internals.join_bounds import may_have_equality, unmatched_sides
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_nodes import (
    grouping_expressions,
    groups_by_session,
    groups_by_session_alone,
    has_aggregation_in_stage,
    join_type,
    output_columns,
    python_aggregate,
)
from penstock.spark.internals.plan_text import Node, has_watermark, without_ids
from penstock.spark.internals.sessions import HDFS_PROVIDER

_CORRELATED = re.compile(r"-subquery#\d+ \[")


def planning(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report problems that Spark refuses when it plans a micro-batch."""
    yield from _second_watermarks(plan, mode)
    yield from _several_event_times(plan, mode)
    yield from _joins_without_equality(plan)
    yield from _subtracted_batches(plan, mode)
    yield from _python_aggregates(plan)
    yield from _sessions_of_all_rows(plan)
    yield from _rocksdb_chains(plan, mode)
    yield from _subqueries(plan, mode)


def _second_watermarks(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report a watermark above another watermark, even if its column is dropped in between."""
    if plan.settings.get(MULTIPLE_SETTING, "true") != "true":
        return
    columns = {watermark.node: watermark.column for watermark in plan.watermarks}
    for node, column in columns.items():
        for below, has_aggregation in _watermarks_below(node):
            never_emits = has_aggregation and mode == "append"
            yield Problem.at(
                node,
                "PENSTOCK_WATERMARK_REDEFINED",
                f"the watermark on {columns[below]!r} is defined again, on {column!r}"
                + (
                    ": the aggregation between the two waits for both, and the upper one waits for its rows, "
                    "so nothing is ever emitted"
                    if never_emits
                    else ", which Spark refuses as soon as the watermark moves"
                ),
                UNSAFE if never_emits else REFUSED,
                fix="one withWatermark only; after an aggregation window_time(window) keeps the watermark",
            )


def _watermarks_below(node: Node, has_aggregation: bool = False) -> Iterator[tuple[Node, bool]]:
    """Yield the nearest watermarks below an operator, and whether there is an aggregation in between.

    The rows of a stateful function have no watermark until they get one.
    """
    for child in node.children:
        traits = traits_of(child.name)
        if child.name == "EventTimeWatermark":
            yield child, has_aggregation
        elif child.streaming and Trait.FUNCTION not in traits:
            yield from _watermarks_below(child, has_aggregation or Trait.AGGREGATION in traits)


def _several_event_times(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report operators with state whose input has several columns with a watermark.

    Spark requires exactly one column that decides whether rows are late, after its optimizer has removed
    unused columns.
    """
    if plan.settings.get(MULTIPLE_SETTING, "true") != "true" or not plan.watermarks:
        return
    candidates = [node for node in plan.stateful if _drops_late_rows(plan, node, mode) and _event_times(node)]
    if not candidates or plan.optimized is None:
        return
    for node in plan.optimized.stateful:
        columns, matching = (
            _event_times(node),
            [candidate for candidate in candidates if _optimized_name(candidate) == node.name],
        )
        if columns and matching:
            yield Problem.at(
                matching[0],
                "PENSTOCK_SEVERAL_EVENT_TIMES",
                f"the columns {' and '.join(repr(without_ids(column)) for column in columns)} all have a "
                "watermark, and Spark allows one such column in the input of an operator with state",
                fix="drop all except one of them before the operator; compute time windows after it",
            )


def _event_times(node: Node) -> list[str]:
    """Return the watermarked columns of the first input that has several of them."""
    is_grouped = _optimized_name(node) == "Aggregate"
    inputs = (
        [grouping_expressions(node)] if is_grouped else [output_columns(child) for child in node.children]
    )
    with_watermark = [list(dict.fromkeys(filter(has_watermark, columns))) for columns in inputs]
    return next((columns for columns in with_watermark if len(columns) > 1), [])


def _optimized_name(node: Node) -> str:
    return "Aggregate" if node.name in ("Distinct", "Except") else node.name


def _drops_late_rows(plan: Plan, node: Node, mode: str) -> bool:
    """Return whether an operator with state drops late rows; aggregations in complete mode do not."""
    if mode == "complete" and (node in plan.aggregates or node in plan.excepts):
        return groups_by_session(node)
    return node not in plan.limits


def _joins_without_equality(plan: Plan) -> Iterator[Problem]:
    """Report joins of two streams with only a range condition, or without a condition.

    Spark refuses a ``crossJoin`` even if a filter above it has an equality.
    """
    for node in plan.joins:
        if join_type(node) == "Cross" or not may_have_equality(node):
            yield Problem.at(
                node,
                "PENSTOCK_JOIN_WITHOUT_EQUALITY",
                "Spark keeps the rows of joined streams by key, and the condition has no equality between a "
                "column of each stream",
                fix="a.join(b, F.expr('a.id = b.id and ...')), with an equality in the condition",
            )


def _python_aggregates(plan: Plan) -> Iterator[Problem]:
    for node in plan.aggregates:
        name = python_aggregate(node, plan.python_aggregates)
        if name is not None:
            yield Problem.at(
                node,
                "PENSTOCK_PYTHON_AGGREGATE",
                f"{name} aggregates in Python, and streams only support Spark's own aggregate functions",
                fix="agg(f(collect_list('<column>'))) with a function of a list; or applyInPandasWithState",
            )


def _sessions_of_all_rows(plan: Plan) -> Iterator[Problem]:
    """Report aggregations by session windows alone, after Spark's optimizer has removed literals."""
    by_session = [node for node in plan.aggregates if groups_by_session(node)]
    planned = (plan.optimized or plan).aggregates if by_session else []
    if any(map(groups_by_session_alone, planned)):
        yield Problem.at(
            next(filter(groups_by_session_alone, by_session), by_session[0]),
            "PENSTOCK_SESSIONS_OF_ALL_ROWS",
            "Spark keeps session windows by key, and the aggregation has no key besides the window",
            fix="groupBy(session_window('<event time>', ...), '<key>'); or, for sessions of all rows, with "
            "withColumn('<key>', lit(1)) before it",
        )


def _rocksdb_chains(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report an aggregation and another operator with state in one stage, whose tasks fail with RocksDB."""
    if mode != "append" or not plan.keeps_state_in_rocksdb:
        return
    above = [node for node in plan.stateful if node not in plan.aggregates and above_aggregation(node)]
    if above and plan.physical is not None and has_aggregation_in_stage(plan.physical):
        yield Problem.at(
            above[0],
            "PENSTOCK_ROCKSDB_CHAIN",
            "with state in RocksDB, Spark's tasks fail if they run an aggregation and then another operator "
            "with state, as they do if both have the same keys, or there is one partition",
            fix="repartition(...) between the two; or "
            f"spark.conf.set('{PROVIDER_SETTING}', '{HDFS_PROVIDER}')",
        )


def _subtracted_batches(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report ``subtract`` and ``exceptAll`` of a batch, which Spark runs as aggregations by all columns."""
    for node in plan.excepts:
        if not expires(node):
            append_reason = (
                "append mode emits a row when the watermark has passed it, and it has no watermark"
            )
            state_reason = f"every {keys_of(node)} seen is kept in the state forever"
            yield Problem.at(
                node,
                "PENSTOCK_EXCEPT_BATCH",
                "subtracting a batch is an aggregation by all columns: "
                + (append_reason if mode == "append" else state_reason),
                REFUSED if mode == "append" else UNSAFE,
                fix="df.join(batch, [<columns>], 'left_anti'), which emits rows immediately, without state",
            )


def _subqueries(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report correlated subqueries over a batch that Spark's optimizer joins with an aggregation of the
    stream: an aggregation to the distinct values that the subquery reads.
    """
    correlated = [node for node in plan.nodes if node.streaming and _CORRELATED.search(node.text)]
    if not correlated or plan.optimized is None:
        return
    optimized, analysed_count = plan.optimized, len(plan.aggregates) + len(plan.excepts)
    if len(optimized.aggregates) <= analysed_count or (
        mode == "append" and all(map(expires, optimized.aggregates))
    ):
        return
    is_refused = mode == "append" or (mode == "update" and any(map(unmatched_sides, optimized.joins)))
    yield Problem.at(
        correlated[0],
        "PENSTOCK_CORRELATED_SUBQUERY",
        "Spark joins the stream with an aggregation of its own, to run the subquery once for each value: "
        + (
            f"{mode} mode does not allow that"
            if is_refused
            else "each value ever seen is kept in the state forever, and rows are emitted again"
        ),
        REFUSED if is_refused else UNSAFE,
        fix="aggregate the batch first and join it: df.join(batch.groupBy('<key>').agg(...), ...)",
    )
