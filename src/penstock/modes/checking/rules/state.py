"""Several watermarks in one query."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.checking.join_bounds import unmatched_sides
from penstock.modes.checking.plan import Plan, by_window, expires, keeps_for_ever, names
from penstock.modes.checking.report import UNSAFE, WARNING, Problem
from penstock.spark.internals.plan_text import grouping

_POLICY = "spark.sql.streaming.multipleWatermarkPolicy"


def watermarks(plan: Plan, mode: str) -> Iterator[Problem]:
    """A query has one watermark for all its streams: the least or the greatest of several."""
    several = {watermark.node.text: watermark for watermark in plan.watermarks}
    if len(several) < 2 or not plan.stateful:
        return
    told = ", ".join(f"{each.column!r} ({each.delay}, of {each.source})" for each in several.values())
    first = next(iter(several.values())).node
    if plan.settings.get(_POLICY, "min") == "max":
        yield Problem.at(
            first,
            "PENSTOCK_WATERMARK_POLICY_MAX",
            f"the fastest of the watermarks {told} counts for all, and rows of the slower streams are dropped as late",
            UNSAFE,
            fix=f"spark.conf.set('{_POLICY}', 'min')",
        )
    else:
        yield Problem.at(
            first,
            "PENSTOCK_WATERMARK_POLICY_MIN",
            f"the slowest of the watermarks {told} counts for all: while one of these streams has no rows, nothing is finished "
            "and state grows",
            WARNING,
        )


# ---- state: State that never leaves, and groups that stay in it.

_FOR_EVER = "PENSTOCK_STATE_FOR_EVER"
_TIMEOUT = "GroupStateTimeout.ProcessingTimeTimeout with state.setTimeoutDuration(...); or state.remove() when a key is done"
_TIME_TO_LIVE = "timeMode='processingTime' and a ttlDurationMs for the state; or clear() when a key is done"
_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


def state(plan: Plan, mode: str) -> Iterator[Problem]:
    """State that grows for ever, with its operator."""
    for node in plan.aggregates:
        keys = ", ".join(names(grouping(node)))
        timed = by_window(node) or expires(node)
        if timed and mode == "complete":
            yield Problem.at(
                node,
                _FOR_EVER,
                f"complete mode keeps every group by {keys}, whatever the watermark, and time brings new ones for ever",
                UNSAFE,
                fix="outputMode('update') with withWatermark(...), and a sink that replaces by key"
                + ("; ps.TableSink by select('window.start', ...)" if by_window(node) else ""),
            )
        elif timed and not expires(node):
            yield Problem.at(
                node,
                _FOR_EVER,
                f"time brings new groups by {keys} for ever, and without a watermark none leaves the state",
                UNSAFE,
                fix="df.withWatermark('<event time>', '10 minutes') before groupBy",
            )
        elif keys and not expires(node) and mode != "append":
            yield Problem.at(
                node,
                "PENSTOCK_STATE_FOR_EACH_KEY",
                f"the state has a row for each {keys} that has ever come, and none leaves it: see that there are not many",
                WARNING,
            )
    for node in plan.deduplications:
        if node.name != "DeduplicateWithinWatermark" and not expires(node):
            yield Problem.at(
                node,
                _FOR_EVER,
                f"every {', '.join(names(grouping(node))) or 'row'} that has come is remembered for ever",
                UNSAFE,
                fix="df.withWatermark('<event time>', '10 minutes').dropDuplicatesWithinWatermark([...]); or have the event "
                "time among the columns of dropDuplicates",
            )
    for node in plan.functions:
        if keeps_for_ever(node):
            yield Problem.at(
                node,
                _FOR_EVER,
                "the function's state has no time-out: what it keeps of a key stays for ever, unless the function removes it itself",
                WARNING,
                fix=_TIME_TO_LIVE if node.name.startswith("TransformWithState") else _TIMEOUT,
            )


def unfinished_groups(plan: Plan, mode: str, trigger: str) -> Iterator[Problem]:
    """Groups that stay in the state when a query ends."""
    waiting = [node for node in plan.aggregates if expires(node) and mode == "append"]
    waiting += [node for node in plan.joins if unmatched_sides(node)]
    off = plan.settings.get(_NO_DATA, "true") != "true"
    if not waiting or not (trigger == "once" or off):
        return
    why = "Trigger.Once runs one micro-batch" if trigger == "once" else f"{_NO_DATA} is false"
    yield Problem.at(
        waiting[0],
        "PENSTOCK_LAST_GROUP_STAYS",
        f"{why}, so that what the last rows finish stays in the state until a later run has new rows",
        WARNING,
        fix="trigger(availableNow=True)" if trigger == "once" else f"spark.conf.set('{_NO_DATA}', 'true')",
    )
