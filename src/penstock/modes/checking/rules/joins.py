"""Joins of streams with streams and with batches."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.checking.join_bounds import BOTH, LEFT, bounded_sides, evicted_sides, unmatched_sides
from penstock.modes.checking.plan import Plan, join_type
from penstock.modes.checking.report import UNSAFE, Problem
from penstock.spark.internals.plan_text import Node

_BOUND = (
    'put withWatermark on both streams, and a time range into the condition: "a.id = b.id and b.ts between a.ts and a.ts + '
    'interval 1 hour"'
)
# With a batch on one side, the types whose rows without a match would have to wait for the whole stream: by the stream's side.
_UNMATCHED = {
    "left": ("RightOuter", "FullOuter"),
    "right": ("LeftOuter", "FullOuter", "LeftSemi"),
}


def joins(plan: Plan, mode: str) -> Iterator[Problem]:
    """What Spark's checker says of joins (4.2, 4.3), and joins whose state grows for ever."""
    for node in plan.streaming("Join"):
        if join_type(node) == "LeftAnti" and node.children[1].streaming:
            yield _anti(node)
        elif node in plan.joins:
            yield from _of_streams(plan, node, mode)
        else:
            yield from _with_batch(node)


def _anti(node: Node) -> Problem:
    return Problem.at(
        node,
        "PENSTOCK_ANTI_JOIN",
        "a left anti join with a stream on the right would have to wait for all of it",
        fix="a left outer join with watermarks and a time range, then where(<a column of the right side> is null)",
    )


def _of_streams(plan: Plan, node: Node, mode: str) -> Iterator[Problem]:
    kind = join_type(node)
    if (mode == "update" and unmatched_sides(node)) or (mode == "complete" and plan.aggregates):
        yield Problem.at(
            node,
            "PENSTOCK_JOIN_MODE",
            f"a join of two streams gives each row once, and {mode} mode has rows come again",
            fix="outputMode('append')",
        )
    # Of these sides one has to leave the state, since its rows without a match are waited for.
    waited_for = frozenset((LEFT,)) if kind == "LeftSemi" else unmatched_sides(node)
    if waited_for and waited_for.isdisjoint(bounded_sides(node)):
        yield Problem.at(
            node,
            "PENSTOCK_OUTER_JOIN_WITHOUT_TIME",
            f"a {kind} join has to know when no match can come any more, and nothing bounds the time between the two rows",
            fix=_BOUND,
        )
        return
    stay = BOTH - evicted_sides(node)
    for side in sorted(stay & unmatched_sides(node)):
        yield Problem.at(
            node,
            "PENSTOCK_OUTER_ROWS_NEVER_COME",
            f"rows of the stream on the {side} that have no match never come out, for nothing makes them leave the state: that "
            "stream has no watermark of its own, or its rows may have a match at any later time",
            UNSAFE,
            fix=_BOUND,
        )
    if stay:
        kept = "both streams are" if stay == BOTH else f"the stream on the {next(iter(stay))} is"
        yield Problem.at(
            node,
            "PENSTOCK_JOIN_STATE_FOR_EVER",
            f"{kept} kept in the state for ever, since a match may come at any time",
            UNSAFE,
            fix=_BOUND,
        )


def _with_batch(node: Node) -> Iterator[Problem]:
    side = "left" if node.children[0].streaming else "right"
    kind = join_type(node)
    if kind in _UNMATCHED[side]:
        yield Problem.at(
            node,
            "PENSTOCK_JOIN_WITH_BATCH",
            f"a {kind} join with the stream on the {side} would have to wait for the whole stream before it knows which rows "
            "of the batch have no match",
            fix="an inner join, or an outer join that keeps the stream's rows: the stream on the left of a left outer join",
        )
