"""What a query emits in a mode, told from its plan."""

from __future__ import annotations

from penstock.modes.emits import (
    ADD,
    AFTER_WATERMARK,
    ALL,
    AT_ONCE,
    CHANGED,
    COUNT,
    FINISHED,
    FOR_EVER,
    FUNCTION,
    MATCHED,
    NEW_ROWS,
    NO_STATE,
    ONE_SIDE,
    ONLY_MATCHED,
    OWN,
    REPLACE_ALL,
    REPLACE_BY_KEY,
    UNTIL_WATERMARK,
    Emits,
)
from penstock.modes.join_bounds import BOTH, given_up, unmatched_sides
from penstock.modes.plan import Plan, expires
from penstock.modes.result_key import result_key
from penstock.spark.internals.operators import Is, of
from penstock.spark.internals.plan_text import Node

_WORST_FIRST = (FOR_EVER, ONE_SIDE, OWN, UNTIL_WATERMARK, COUNT, NO_STATE)


def claims(plan: Plan, mode: str) -> Emits:
    """What comes out of the operator nearest to the sink that keeps state; a query without one passes rows on."""
    kept = {_state(node, mode) for node in plan.stateful} | {NO_STATE}
    state = next(each for each in _WORST_FIRST if each in kept)
    top = next((node for node in plan.stateful if node.name != "GlobalLimit"), None)
    if mode == "complete":
        # A deduplication lets a group through once, and the sink loses it with the next micro-batch.
        rows = NEW_ROWS if top is not None and Is.DEDUPLICATION in of(top.name) else ALL
        return Emits(rows, AT_ONCE, FOR_EVER, REPLACE_ALL)
    if top is None:
        return Emits(NEW_ROWS, AT_ONCE, state, ADD)
    if top.name == "Aggregate":
        if mode == "append":
            return Emits(FINISHED, AFTER_WATERMARK, state, ADD)
        return Emits(CHANGED, AT_ONCE, state, REPLACE_BY_KEY, result_key(plan.root, top))
    if Is.FUNCTION in of(top.name):
        return Emits(FUNCTION, AT_ONCE, state, ADD if mode == "append" else REPLACE_BY_KEY)
    if top.name == "Join" and unmatched_sides(top):
        rows = MATCHED if unmatched_sides(top) <= given_up(top) else ONLY_MATCHED
        return Emits(rows, AFTER_WATERMARK, state, ADD)
    return Emits(NEW_ROWS, AFTER_WATERMARK if _waits(plan, top, mode) else AT_ONCE, state, ADD)


def _waits(plan: Plan, top: Node, mode: str) -> bool:
    """Whether rows that pass an operator at once come from one below that holds them back."""
    return mode == "append" and any(node in plan.aggregates for node in top.below())


def _state(node: Node, mode: str) -> str:
    if node.name == "GlobalLimit":
        return COUNT
    if Is.FUNCTION in of(node.name):
        return OWN
    if node.name == "Join":
        sides = given_up(node)
        return UNTIL_WATERMARK if sides == BOTH else ONE_SIDE if sides else FOR_EVER
    if node.name == "DeduplicateWithinWatermark":
        return UNTIL_WATERMARK
    if node.name == "Aggregate" and mode == "complete":
        return FOR_EVER
    return UNTIL_WATERMARK if expires(node) else FOR_EVER
