"""Rules of aggregations, deduplications, stateful functions (``transformWithState`` and older ones) and
watermarks: what Spark refuses, and state that grows forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from penstock.modes.checking.plan import (
    PROVIDER_SETTING,
    Plan,
    above_aggregation,
    expires,
    keys_of,
    operators_between,
)
from penstock.modes.checking.report import UNSAFE, WARNING, Problem
from penstock.spark.internals.join_bounds import unmatched_sides
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_nodes import (
    function_output_mode,
    groups_by_session,
    groups_by_time,
    has_subtotals_over_time,
    is_map_groups,
    lacks_expiry,
    output_columns,
    times_out_by_event_time,
)
from penstock.spark.internals.plan_text import Node, has_watermark, list_items
from penstock.spark.internals.sessions import ROCKSDB_PROVIDER

MODE_CONDITION = "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"
_NO_WATERMARK = "UNSUPPORTED_STREAMING_OPERATOR_WITHOUT_WATERMARK"
_STATE_FOREVER = "PENSTOCK_STATE_FOR_EVER"
_WATERMARK_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
_NO_DATA_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"
_DISTINCT_IN_SQL = (
    "df.dropDuplicates() in place of SQL's DISTINCT or UNION, which are aggregations: it emits each row "
    "once, when it first appears"
)


def aggregates(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply the rules of Spark's checker for aggregations (4.2, 4.3), and report groups kept forever."""
    if mode == "complete" and not plan.aggregates:
        yield Problem(
            "PENSTOCK_COMPLETE_WITHOUT_AGGREGATION",
            "complete mode emits the whole result each time, and only an aggregation keeps one",
            fix="use outputMode('append'), or aggregate: df.groupBy(...).agg(...)",
            condition=MODE_CONDITION,
        )
    for node in plan.aggregates:
        if node is plan.checked_aggregate:
            yield from _unknown_results(plan, node, mode)
        if "(distinct " in node.text:
            yield Problem.at(
                node,
                "PENSTOCK_DISTINCT_AGGREGATE",
                "streams do not support an aggregate over distinct values",
                fix="approx_count_distinct(...); or dropDuplicates(...) before the aggregation, in append "
                "mode",
            )
        if mode != "complete" and has_subtotals_over_time(node):
            yield _subtotals_over_time(node, mode)
        yield from _groups_kept_forever(node, mode)


def planned_aggregates(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply the same rules to aggregations that only Spark's planner checks (4.2, 4.3)."""
    for node in plan.aggregates:
        if node is not plan.checked_aggregate:
            for problem in _unknown_results(plan, node, mode):
                yield replace(problem, condition=_NO_WATERMARK) if mode == "append" else problem


def _unknown_results(plan: Plan, node: Node, mode: str) -> Iterator[Problem]:
    """Report an aggregation without final groups in append mode, or without stable groups in update mode."""
    if mode == "append" and not expires(node):
        yield _without_watermark(plan, node)
    elif mode == "update" and groups_by_session(node):
        yield Problem.at(
            node,
            "PENSTOCK_SESSION_WINDOW_IN_UPDATE",
            "a session window's bounds change while the session grows, so update mode cannot identify "
            "the row to replace",
            fix="use outputMode('append') with withWatermark(...), which emits each session once, when "
            "it is closed; or outputMode('complete')",
            condition=MODE_CONDITION,
        )


def _groups_kept_forever(node: Node, mode: str) -> Iterator[Problem]:
    keys = keys_of(node)
    timed = groups_by_time(node) or expires(node)
    if timed and mode == "complete":
        yield Problem.at(
            node,
            _STATE_FOREVER,
            f"complete mode keeps every group by {keys} regardless of the watermark, and there are always "
            "new ones",
            UNSAFE,
            fix="outputMode('update') with withWatermark(...), and a sink that replaces by key"
            + ("; TableSink by select('window.start', ...)" if groups_by_time(node) else ""),
        )
    elif timed and not expires(node):
        yield Problem.at(
            node,
            _STATE_FOREVER,
            f"there are always new groups by {keys}, and without a watermark none are removed from the state",
            UNSAFE,
            fix="df.withWatermark('<event time>', '10 minutes') before groupBy",
        )
    elif keys and not expires(node) and mode != "append":
        yield Problem.at(
            node,
            "PENSTOCK_STATE_FOR_EACH_KEY",
            f"the state has a row for each {keys} ever seen, and none are removed: make sure that there are "
            "few",
            WARNING,
        )


def _subtotals_over_time(node: Node, mode: str) -> Problem:
    return Problem.at(
        node,
        "PENSTOCK_SUBTOTALS_OVER_TIME",
        "cube, rollup and grouping sets add subtotals over all times, which no watermark passes: they "
        + ("are never emitted, and stay" if mode == "append" else "stay")
        + " in the state forever",
        UNSAFE if mode == "append" else WARNING,
        fix="GROUPING SETS that all have the event time or its window, such as ((window, k), (window))",
    )


def _without_watermark(plan: Plan, node: Node) -> Problem:
    below = [watermark for watermark in plan.watermarks if watermark.node in node.walk()]
    keys = keys_of(node) or "nothing"
    if not below:
        return Problem.at(
            node,
            "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK",
            f"append mode emits a group when it is final, and without a watermark a group by {keys} is never "
            "final",
            fix=_DISTINCT_IN_SQL
            if node.name == "Distinct"
            else "df.withWatermark('<event time>', '10 minutes').groupBy(window('<event time>', "
            "'5 minutes'), ...); or outputMode('update') or outputMode('complete')",
            condition=MODE_CONDITION,
        )
    column = below[0].column
    dropping = [step for step in operators_between(node, below[0].node) if _drops_watermark(step)]
    if dropping:
        return Problem.at(
            dropping[-1],
            "PENSTOCK_EVENT_TIME_LOST",
            f"the watermark on {column!r} does not reach the aggregation: the column is dropped or "
            "recomputed on the way",
            fix=f"keep {column!r} unchanged, and group by it or by window({column!r}, ...); or put "
            "withWatermark right before groupBy, on the grouping column",
            condition=MODE_CONDITION,
        )
    return Problem.at(
        node,
        "PENSTOCK_WATERMARK_NOT_IN_GROUPING",
        f"append mode emits a group when the watermark has passed it; the watermark is on {column!r}, and "
        f"the groups are by {keys}, which has no event time",
        fix=_DISTINCT_IN_SQL
        if node.name == "Distinct"
        else f"groupBy(window({column!r}, '5 minutes'), ...); an expression such as date_trunc over "
        f"{column!r} does not count, a window or the column itself does",
        condition=MODE_CONDITION,
    )


def _drops_watermark(step: Node) -> bool:
    """Return whether none of a step's output columns has a watermark."""
    if step.name == "Project":
        return not any(has_watermark(item) for item in list_items(step.text))
    return Trait.NEW_COLUMNS in traits_of(step.name) and "-T" not in (
        step.arguments[-1] if step.arguments else ""
    )


def deduplications(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report deduplications without a watermark, or of rows that are emitted again."""
    for node in plan.deduplications:
        if node.name == "DeduplicateWithinWatermark" and not _input_has_watermark(node):
            yield Problem.at(
                node,
                "PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK",
                "dropDuplicatesWithinWatermark keeps a key for the watermark's delay, and none of its input "
                "columns has a watermark",
                fix="df.withWatermark('<event time>', '10 minutes').dropDuplicatesWithinWatermark([...])",
            )
        elif node.name != "DeduplicateWithinWatermark" and not expires(node):
            yield Problem.at(
                node,
                _STATE_FOREVER,
                f"every {keys_of(node) or 'row'} seen is kept in the state forever",
                UNSAFE,
                fix="df.withWatermark('<event time>', '10 minutes').dropDuplicatesWithinWatermark([...]); or "
                "add the event time to the columns of dropDuplicates",
            )
        if mode != "append" and above_aggregation(node):
            yield Problem.at(
                node,
                "PENSTOCK_DEDUPLICATION_OF_RESULTS",
                f"in {mode} mode the aggregation below emits a group again when it changes, and the "
                "deduplication drops all but the first: later values are lost",
                UNSAFE,
                fix="deduplicate before the aggregation; or outputMode('append')",
            )


def _input_has_watermark(node: Node) -> bool:
    return any(map(has_watermark, output_columns(node.children[0])))


def functions(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply the rules of Spark's checker for stateful functions (4.2, 4.3), and report state kept forever."""
    group_state_functions = [node for node in plan.functions if Trait.TRANSFORM not in traits_of(node.name)]
    if len(group_state_functions) > 1 and (
        any(Trait.PYTHON_STATE in traits_of(node.name) for node in group_state_functions)
        or any(function_output_mode(node) != "append" for node in group_state_functions)
    ):
        yield Problem.at(
            group_state_functions[0],
            "PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS",
            "a query may have one applyInPandasWithState, or several flatMapGroupsWithState if all are in "
            "append mode",
            fix="transformWithState, of which there may be several; or two queries with a queue between them",
        )
    for node in group_state_functions:
        yield from _group_state_function(plan, node, mode)
    for node in plan.functions:
        function_mode = function_output_mode(node)
        if (
            node not in group_state_functions
            and function_mode is not None
            and function_mode != mode
            and mode != "complete"
        ):
            yield Problem.at(
                node,
                "PENSTOCK_FUNCTION_MODE_DIFFERS",
                f"the function has output mode {function_mode} and the query {mode}: Spark accepts that, "
                "and emits the rows that the function returns",
                WARNING,
                fix=f"transformWithState(..., outputMode='{mode}', ...)",
            )
        if lacks_expiry(node):
            yield Problem.at(
                node,
                _STATE_FOREVER,
                "the function's state has no timeout: a key's state is kept forever unless the function "
                "removes it",
                WARNING,
                fix="GroupStateTimeout.ProcessingTimeTimeout with state.setTimeoutDuration(...); or "
                "state.remove() when a key is finished"
                if node in group_state_functions
                else "timeMode='processingTime' and a ttlDurationMs for the state; or clear() when a key is "
                "finished",
            )


def missing_requirements(plan: Plan) -> Iterator[Problem]:
    """Report missing requirements of ``transformWithState``, which Spark (4.2, 4.3) reports at run time."""
    transforms = [node for node in plan.functions if Trait.TRANSFORM in traits_of(node.name)]
    if not transforms:
        return
    if not plan.keeps_state_in_rocksdb:
        yield Problem.at(
            transforms[0],
            "PENSTOCK_FUNCTION_NEEDS_ROCKSDB",
            "transformWithState needs the RocksDB state store, and the session has another one",
            fix=f"spark.conf.set('{PROVIDER_SETTING}', '{ROCKSDB_PROVIDER}')",
        )
    has_protobuf = find_spec("google") is not None and find_spec("google.protobuf") is not None
    if Trait.PYTHON_STATE in traits_of(transforms[0].name) and not has_protobuf:
        yield Problem.at(
            transforms[0],
            "PENSTOCK_FUNCTION_NEEDS_PROTOBUF",
            "transformWithState in Python needs the package protobuf, which is not installed",
            fix="pip install protobuf",
        )


def _group_state_function(plan: Plan, node: Node, mode: str) -> Iterator[Problem]:
    function_mode = function_output_mode(node)
    if times_out_by_event_time(node) and not _input_has_watermark(node):
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_TIMEOUT_WITHOUT_WATERMARK",
            "an event-time timeout ends when the watermark passes it, and the rows of the function have no "
            "column with a watermark",
            fix="df.withWatermark('<event time>', '10 minutes').groupBy(...); or "
            "GroupStateTimeout.ProcessingTimeTimeout",
        )
    if is_map_groups(node) and mode != "update":
        yield Problem.at(
            node,
            "PENSTOCK_MAP_GROUPS_MODE",
            "mapGroupsWithState emits a row whenever a key changes, which only update mode allows",
            fix="outputMode('update'); or flatMapGroupsWithState in append mode",
        )
        return
    if above_aggregation(node):
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_AFTER_AGGREGATION",
            "a stateful function cannot take the rows of an aggregation, which may be emitted again",
            fix="transformWithState; or write the aggregation into a queue and read that",
        )
    elif function_mode == "update" and plan.aggregates:
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION",
            "a stateful function in update mode emits rows again, which an aggregation would count twice",
            fix="set outputMode='append' for the function",
        )
    elif not plan.aggregates and function_mode is not None and function_mode != mode and mode != "complete":
        yield Problem.at(
            node,
            "PENSTOCK_FUNCTION_MODE",
            f"the function has {function_mode} mode and the query {mode} mode, and both must be the same",
            fix=f"outputMode('{function_mode}') for the query, or '{mode}' for the function",
        )


def watermarks(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report several watermarks: a query uses one for all its streams, the lowest or the highest."""
    by_text = {watermark.node.text: watermark for watermark in plan.watermarks}
    if len(by_text) < 2 or not plan.stateful:
        return
    listed = ", ".join(
        f"{distinct.column!r} ({distinct.delay}, of {distinct.source})" for distinct in by_text.values()
    )
    first = next(iter(by_text.values())).node
    if plan.settings.get(_WATERMARK_POLICY, "min") == "max":
        yield Problem.at(
            first,
            "PENSTOCK_WATERMARK_POLICY_MAX",
            f"the query uses the fastest of the watermarks {listed}, and rows of the slower streams are "
            "dropped as late",
            UNSAFE,
            fix=f"spark.conf.set('{_WATERMARK_POLICY}', 'min')",
        )
    else:
        yield Problem.at(
            first,
            "PENSTOCK_WATERMARK_POLICY_MIN",
            f"the query uses the slowest of the watermarks {listed}: while one of these streams has no rows, "
            "nothing is finished and state grows",
            WARNING,
        )


def unfinished_groups(plan: Plan, mode: str, trigger: str) -> Iterator[Problem]:
    """Report groups that remain in the state when a query ends."""
    waiting = [node for node in plan.aggregates if expires(node) and mode == "append"]
    waiting += [node for node in plan.joins if unmatched_sides(node)]
    is_disabled = plan.settings.get(_NO_DATA_BATCHES, "true") != "true"
    if not waiting or not (trigger == "once" or is_disabled):
        return
    reason = "Trigger.Once runs one micro-batch" if trigger == "once" else f"{_NO_DATA_BATCHES} is false"
    yield Problem.at(
        waiting[0],
        "PENSTOCK_LAST_GROUP_STAYS",
        f"{reason}, so groups that the last rows finish remain in the state until a later run has new rows",
        WARNING,
        fix="trigger(availableNow=True)"
        if trigger == "once"
        else f"spark.conf.set('{_NO_DATA_BATCHES}', 'true')",
    )
