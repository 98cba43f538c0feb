"""Rules of joins between streams, and between a stream and a batch."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.checking.plan import Plan
from penstock.modes.checking.report import UNSAFE, Problem
from penstock.spark.internals.join_bounds import (
    BOTH,
    LEFT,
    bounded_sides,
    evicted_sides,
    has_months,
    unmatched_sides,
)
from penstock.spark.internals.plan_nodes import join_type
from penstock.spark.internals.plan_text import Node

_TIME_RANGE_FIX = (
    "add withWatermark to both streams, and a time range to the condition: "
    '"a.id = b.id and b.ts between a.ts and a.ts + interval 1 hour"'
)
_DAYS_FIX = (
    "an interval of days, such as interval 30 days: months and years have no fixed length, so Spark takes "
    "none as a bound"
)
# The types of join with a batch whose unmatched rows would wait for the whole stream, by the stream's side.
_WAITING_FOR_STREAM = {
    "left": ("RightOuter", "FullOuter"),
    "right": ("LeftOuter", "FullOuter", "LeftSemi"),
}


def joins(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply the rules of Spark's checker for joins (4.2, 4.3), and report joins whose state grows forever."""
    for node in plan.streaming("Join"):
        if join_type(node) == "LeftAnti" and node.children[1].streaming:
            yield _left_anti_join(node)
        elif node in plan.joins:
            yield from _stream_join(plan, node, mode)
        else:
            yield from _batch_join(node)


def _left_anti_join(node: Node) -> Problem:
    return Problem.at(
        node,
        "PENSTOCK_ANTI_JOIN",
        "a left anti join with a stream on the right would have to wait for the whole stream",
        fix="a left outer join with watermarks and a time range, then where(<a column of the right side> is "
        "null)",
    )


def _stream_join(plan: Plan, node: Node, mode: str) -> Iterator[Problem]:
    kind = join_type(node)
    fix = _DAYS_FIX if has_months(node) else _TIME_RANGE_FIX
    if (mode == "update" and unmatched_sides(node)) or (mode == "complete" and plan.aggregates):
        yield Problem.at(
            node,
            "PENSTOCK_JOIN_MODE",
            f"a join of two streams emits each row once, and {mode} mode emits rows again",
            fix="outputMode('append')",
        )
    # Rows of one of these sides must leave the state, because unmatched rows are emitted only then.
    emitted_late = frozenset((LEFT,)) if kind == "LeftSemi" else unmatched_sides(node)
    if emitted_late and emitted_late.isdisjoint(bounded_sides(node)):
        yield Problem.at(
            node,
            "PENSTOCK_OUTER_JOIN_WITHOUT_TIME",
            f"a {kind} join must know when a row can no longer match, and nothing bounds the time between "
            "the two rows",
            fix=fix,
        )
        return
    unbounded = BOTH - evicted_sides(node)
    for side in sorted(unbounded & unmatched_sides(node)):
        yield Problem.at(
            node,
            "PENSTOCK_OUTER_ROWS_NEVER_COME",
            f"unmatched rows of the stream on the {side} are never emitted, since they never leave the "
            "state: that stream itself has no watermark, or its rows may match at any later time",
            UNSAFE,
            fix=fix,
        )
    if unbounded:
        unbounded_streams = (
            "both streams are" if unbounded == BOTH else f"the stream on the {next(iter(unbounded))} is"
        )
        yield Problem.at(
            node,
            "PENSTOCK_JOIN_STATE_FOR_EVER",
            f"{unbounded_streams} kept in the state forever, since a row may match at any time",
            UNSAFE,
            fix=fix,
        )


def _batch_join(node: Node) -> Iterator[Problem]:
    side = "left" if node.children[0].streaming else "right"
    kind = join_type(node)
    if kind in _WAITING_FOR_STREAM[side]:
        yield Problem.at(
            node,
            "PENSTOCK_JOIN_WITH_BATCH",
            f"a {kind} join with the stream on the {side} would have to wait for the whole stream to know "
            "which rows of the batch have no match",
            fix="an inner join, or an outer join that keeps the stream's rows: the stream on the left of a "
            "left outer join",
        )
