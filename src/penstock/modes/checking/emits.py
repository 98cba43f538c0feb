"""Prediction of a query's output in a mode.

It says which rows are emitted and when, how long state is kept, and what the sink must do.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.modes.checking.plan import Plan, expires
from penstock.spark.internals.join_bounds import BOTH, evicted_sides, unmatched_sides
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_nodes import has_subtotals_over_time, result_key
from penstock.spark.internals.plan_text import Node

NEW_ROWS, FINISHED, CHANGED, ALL = "new rows", "finished groups", "changed groups", "all groups"
MATCHED, ONLY_MATCHED, FUNCTION = "matched rows", "matched rows alone", "the function's rows"
INPUTS = "the rows of each input"
AT_ONCE, AFTER_WATERMARK = "at once", "after the watermark"
NO_STATE, COUNT, UNTIL_WATERMARK, SUBTOTALS, ONE_SIDE, FOREVER, UNTIL_REMOVED = (
    "none",
    "a count",
    "until the watermark",
    "for ever for subtotals",
    "for ever on one side",
    "for ever",
    "its own",
)
ADD, REPLACE_BY_KEY, REPLACE_ALL = "add", "replace by key", "replace all"

_MOST_FIRST = (REPLACE_ALL, REPLACE_BY_KEY, ADD)
_WORST_FIRST = (FOREVER, ONE_SIDE, SUBTOTALS, UNTIL_REMOVED, UNTIL_WATERMARK, COUNT, NO_STATE)

_ROWS_TEXT = {
    NEW_ROWS: "each row is emitted once",
    FINISHED: "each group is emitted once, with its final values,",
    CHANGED: "the groups that a micro-batch changed are emitted, with their new values",
    ALL: "all groups are emitted again in each micro-batch that has new rows",
    MATCHED: "rows with a match are emitted once, in the micro-batch that reads the later of the two, and "
    "rows without one",
    ONLY_MATCHED: "rows with a match are emitted once, in the micro-batch that reads the later of the two, "
    "and rows without one are never emitted if they are kept forever",
    FUNCTION: "the rows that the stateful function returns are emitted",
    INPUTS: "the rows of each input of the union are emitted as they would be without the union",
}
_WHEN_TEXT = {
    AT_ONCE: "in the micro-batch that reads it",
    AFTER_WATERMARK: "in the first micro-batch after the watermark has passed it",
}
_STATE_TEXT = {
    NO_STATE: "no state is kept",
    COUNT: "only the number of rows so far is kept",
    UNTIL_WATERMARK: "state is kept until the watermark has passed it, and rows that arrive later are "
    "dropped",
    SUBTOTALS: "subtotals over all times are kept forever, the other groups until the watermark has passed "
    "them",
    ONE_SIDE: "state of one side of the join is kept forever, state of the other side until the watermark "
    "has passed it",
    FOREVER: "state is kept forever",
    UNTIL_REMOVED: "state is kept until the function or its timer removes it",
}
_SINK_TEXT = {
    ADD: "the sink only appends rows",
    REPLACE_BY_KEY: "the sink has to replace rows by key",
    REPLACE_ALL: "the sink has to replace all rows",
}


@dataclass(frozen=True)
class Emits:
    """The output of a query in a mode, in terms that a preview can verify; ``str`` returns a sentence."""

    rows: str
    when: str
    state: str
    sink: str
    key: tuple[str, ...] = ()
    """The columns by which the sink replaces rows."""
    missing_key: tuple[str, ...] = ()
    """The missing grouping columns, without which the sink cannot identify the row to replace."""

    def __str__(self) -> str:
        when = f" {_WHEN_TEXT[self.when]}" if self.rows in (NEW_ROWS, FINISHED, MATCHED) else ""
        key = f" ({', '.join(self.key)})" if self.key and self.sink == REPLACE_BY_KEY else ""
        if self.missing_key:
            key = f", but the result lacks columns that identify them: {', '.join(self.missing_key)}"
        sentence = f"{_ROWS_TEXT[self.rows]}{when}; {_STATE_TEXT[self.state]}; {_SINK_TEXT[self.sink]}{key}."
        return sentence[0].upper() + sentence[1:]


def predict_emits(plan: Plan, mode: str) -> Emits:
    """Predict the output of the stateful operator nearest to the sink; a query without one passes rows on."""
    state = _worst_lifetime({_state_lifetime(node, mode) for node in plan.stateful})
    top = next((node for node in plan.stateful if node.name != "GlobalLimit"), None)
    if mode == "complete":
        # A deduplication emits each group once, and the next micro-batch replaces it in the sink.
        rows = NEW_ROWS if top is not None and Trait.DEDUPLICATION in traits_of(top.name) else ALL
        return Emits(rows, AT_ONCE, FOREVER, REPLACE_ALL)
    union = _top_union(plan)
    if union is not None:
        inputs = [Plan(child, plan.settings) for child in union.children]
        return _emits_of_union([predict_emits(each, mode) for each in inputs])
    if top is None:
        return Emits(NEW_ROWS, AT_ONCE, state, ADD)
    if top in plan.aggregates or top in plan.excepts:
        if mode == "append":
            return Emits(FINISHED, AFTER_WATERMARK, state, ADD)
        key = result_key(plan.root, top)
        return Emits(CHANGED, AT_ONCE, state, REPLACE_BY_KEY, key.columns, key.missing)
    if Trait.FUNCTION in traits_of(top.name):
        return Emits(FUNCTION, AT_ONCE, state, ADD if mode == "append" else REPLACE_BY_KEY)
    if top.name == "Join" and unmatched_sides(top):
        rows = MATCHED if unmatched_sides(top) <= evicted_sides(top) else ONLY_MATCHED
        return Emits(rows, AFTER_WATERMARK, state, ADD)
    # Rows that pass this operator immediately may come from an aggregation below that holds them back.
    is_delayed = mode == "append" and any(node in plan.aggregates for node in top.descendants())
    return Emits(NEW_ROWS, AFTER_WATERMARK if is_delayed else AT_ONCE, state, ADD)


def _top_union(plan: Plan) -> Node | None:
    """Return the union that passes its rows to the sink, without a stateful operator in between."""
    node: Node | None = plan.root
    while node is not None and node.name != "Union":
        streams = [child for child in node.children if child.streaming]
        node = streams[0] if streams and node not in plan.stateful else None
    return node


def _emits_of_union(inputs: list[Emits]) -> Emits:
    """Combine the output of a union's inputs; none of their columns identifies the rows of all inputs."""
    first, alike = inputs[0], len({(each.rows, each.when) for each in inputs}) == 1
    delayed = all(each.when == AFTER_WATERMARK for each in inputs)
    sinks = {each.sink for each in inputs}
    return Emits(
        first.rows if alike else INPUTS,
        AFTER_WATERMARK if delayed else AT_ONCE,
        _worst_lifetime({each.state for each in inputs}),
        next(sink for sink in _MOST_FIRST if sink in sinks),
    )


def _worst_lifetime(lifetimes: set[str]) -> str:
    return next((lifetime for lifetime in _WORST_FIRST if lifetime in lifetimes), NO_STATE)


def _state_lifetime(node: Node, mode: str) -> str:
    if node.name == "GlobalLimit":
        return COUNT
    if Trait.FUNCTION in traits_of(node.name):
        return UNTIL_REMOVED
    if node.name == "Join":
        sides = evicted_sides(node)
        return UNTIL_WATERMARK if sides == BOTH else ONE_SIDE if sides else FOREVER
    if node.name == "DeduplicateWithinWatermark":
        return UNTIL_WATERMARK
    if Trait.AGGREGATION in traits_of(node.name) and mode == "complete":
        return FOREVER
    if has_subtotals_over_time(node):
        return SUBTOTALS
    return UNTIL_WATERMARK if expires(node) else FOREVER
