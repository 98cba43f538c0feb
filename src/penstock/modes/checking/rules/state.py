"""Rules of state: several watermarks, state that grows forever, and groups that a last run leaves in it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.checking.plan import Plan, expires, keys_of
from penstock.modes.checking.report import UNSAFE, WARNING, Problem
from penstock.spark.internals.join_bounds import unmatched_sides
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_nodes import by_window, keeps_forever

_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"
_FOR_EVER = "PENSTOCK_STATE_FOR_EVER"
_TIMEOUT = (
    "GroupStateTimeout.ProcessingTimeTimeout with state.setTimeoutDuration(...); or state.remove() when a "
    "key is finished"
)
_TIME_TO_LIVE = (
    "timeMode='processingTime' and a ttlDurationMs for the state; or clear() when a key is finished"
)
_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


def watermarks(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report several watermarks: a query uses one for all its streams, the lowest or the highest."""
    several = {watermark.node.text: watermark for watermark in plan.watermarks}
    if len(several) < 2 or not plan.stateful:
        return
    listed = ", ".join(f"{mark.column!r} ({mark.delay}, of {mark.source})" for mark in several.values())
    first = next(iter(several.values())).node
    if plan.settings.get(_POLICY, "min") == "max":
        yield Problem.at(
            first,
            "PENSTOCK_WATERMARK_POLICY_MAX",
            f"the fastest of the watermarks {listed} counts for all, and rows of the slower streams are "
            "dropped as late",
            UNSAFE,
            fix=f"spark.conf.set('{_POLICY}', 'min')",
        )
    else:
        yield Problem.at(
            first,
            "PENSTOCK_WATERMARK_POLICY_MIN",
            f"the slowest of the watermarks {listed} counts for all: while one of these streams has no rows, "
            "nothing is finished and state grows",
            WARNING,
        )


def state(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report state that grows forever, with its operator."""
    for node in plan.aggregates:
        keys = keys_of(node)
        timed = by_window(node) or expires(node)
        if timed and mode == "complete":
            yield Problem.at(
                node,
                _FOR_EVER,
                f"complete mode keeps every group by {keys}, whatever the watermark, and time brings new "
                "ones forever",
                UNSAFE,
                fix="outputMode('update') with withWatermark(...), and a sink that replaces by key"
                + ("; TableSink by select('window.start', ...)" if by_window(node) else ""),
            )
        elif timed and not expires(node):
            yield Problem.at(
                node,
                _FOR_EVER,
                f"time brings new groups by {keys} forever, and without a watermark none leaves the state",
                UNSAFE,
                fix="df.withWatermark('<event time>', '10 minutes') before groupBy",
            )
        elif keys and not expires(node) and mode != "append":
            yield Problem.at(
                node,
                "PENSTOCK_STATE_FOR_EACH_KEY",
                f"the state has a row for each {keys} ever seen, and none leaves it: make sure that there "
                "are few",
                WARNING,
            )
    for node in plan.deduplications:
        if node.name != "DeduplicateWithinWatermark" and not expires(node):
            yield Problem.at(
                node,
                _FOR_EVER,
                f"every {keys_of(node) or 'row'} seen is kept in the state forever",
                UNSAFE,
                fix="df.withWatermark('<event time>', '10 minutes').dropDuplicatesWithinWatermark([...]); or "
                "add the event time to the columns of dropDuplicates",
            )
    for node in plan.functions:
        if keeps_forever(node):
            yield Problem.at(
                node,
                _FOR_EVER,
                "the function's state has no timeout: a key's state stays forever unless the function "
                "removes it",
                WARNING,
                fix=_TIME_TO_LIVE if Trait.TRANSFORM in traits_of(node.name) else _TIMEOUT,
            )


def unfinished_groups(plan: Plan, mode: str, trigger: str) -> Iterator[Problem]:
    """Report groups that stay in the state when a query ends."""
    waiting = [node for node in plan.aggregates if expires(node) and mode == "append"]
    waiting += [node for node in plan.joins if unmatched_sides(node)]
    off = plan.settings.get(_NO_DATA, "true") != "true"
    if not waiting or not (trigger == "once" or off):
        return
    why = "Trigger.Once runs one micro-batch" if trigger == "once" else f"{_NO_DATA} is false"
    yield Problem.at(
        waiting[0],
        "PENSTOCK_LAST_GROUP_STAYS",
        f"{why}, so groups that the last rows finish stay in the state until a later run has new rows",
        WARNING,
        fix="trigger(availableNow=True)" if trigger == "once" else f"spark.conf.set('{_NO_DATA}', 'true')",
    )
