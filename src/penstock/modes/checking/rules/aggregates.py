"""Aggregations and deduplications."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.checking.plan import Plan, above_aggregation, expires, names, path_to
from penstock.modes.checking.report import UNSAFE, Problem
from penstock.spark.internals.plan_text import (
    Node,
    grouping_expressions,
    groups_by_session,
    has_watermark,
    list_items,
)

MODE_CONDITION = "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"


def aggregates(plan: Plan, mode: str) -> Iterator[Problem]:
    """What Spark's checker says of aggregations (4.2, 4.3)."""
    if mode == "complete" and not plan.aggregates:
        yield Problem(
            "PENSTOCK_COMPLETE_WITHOUT_AGGREGATION",
            "complete mode gives the whole result again each time, and only an aggregation keeps one",
            fix="use outputMode('append'), or aggregate: df.groupBy(...).agg(...)",
            condition=MODE_CONDITION,
        )
    for node in plan.aggregates:
        if mode == "append" and not expires(node):
            yield _without_watermark(plan, node)
        if mode == "update" and groups_by_session(node):
            yield Problem.at(
                node,
                "PENSTOCK_SESSION_WINDOW_IN_UPDATE",
                "a session window's bounds change while the session grows, so that update mode could not say which row is "
                "replaced",
                fix="use outputMode('append') with withWatermark(...), which gives each session once, when it is over; or "
                "outputMode('complete')",
                condition=MODE_CONDITION,
            )
        if "(distinct " in node.text:
            yield Problem.at(
                node,
                "PENSTOCK_DISTINCT_AGGREGATE",
                "an aggregate over distinct values is not there for streams",
                fix="approx_count_distinct(...); or dropDuplicates(...) before the aggregation, in append mode",
            )


def _without_watermark(plan: Plan, node: Node) -> Problem:
    below = [watermark for watermark in plan.watermarks if watermark.node in node.walk()]
    keys = ", ".join(names(grouping_expressions(node))) or "nothing"
    if not below:
        return Problem.at(
            node,
            "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK",
            f"append mode gives a group when it is finished, and without a watermark a group by {keys} never is",
            fix="df.withWatermark('<event time>', '10 minutes').groupBy(window('<event time>', '5 minutes'), ...); or "
            "outputMode('update') or outputMode('complete')",
            condition=MODE_CONDITION,
        )
    column = below[0].column
    lost = [step for step in path_to(node, below[0].node) if _loses(step)]
    if lost:
        return Problem.at(
            lost[-1],
            "PENSTOCK_EVENT_TIME_LOST",
            f"the watermark on {column!r} does not reach the aggregation: the column is left out, or made anew, on the way",
            fix=f"carry {column!r} through as it is, and group by it or by window({column!r}, ...); or put withWatermark "
            "right before groupBy, on the column that is grouped by",
            condition=MODE_CONDITION,
        )
    return Problem.at(
        node,
        "PENSTOCK_WATERMARK_NOT_IN_GROUPING",
        f"append mode gives a group when the watermark has passed it; the watermark is on {column!r}, and the groups are by "
        f"{keys}, which says nothing of time",
        fix=f"groupBy(window({column!r}, '5 minutes'), ...); an expression such as date_trunc over {column!r} does not count, a "
        "window or the column itself does",
        condition=MODE_CONDITION,
    )


def _loses(step: Node) -> bool:
    """Whether nothing that goes out of a step has a watermark."""
    if step.name == "Project":
        return not any(has_watermark(item) for item in list_items(step.text))
    return step.name.startswith(
        ("MapIn", "FlatMap", "SerializeFromObject", "TransformWithState")
    ) and "-T" not in (step.arguments[-1] if step.arguments else "")


def deduplications(plan: Plan, mode: str) -> Iterator[Problem]:
    """Deduplications that have no watermark, and those of rows that come again with other values."""
    for node in plan.deduplications:
        if node.name == "DeduplicateWithinWatermark" and not plan.watermarks:
            yield Problem.at(
                node,
                "PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK",
                "dropDuplicatesWithinWatermark remembers a key for the watermark's delay, and there is no watermark",
                fix="df.withWatermark('<event time>', '10 minutes').dropDuplicatesWithinWatermark([...])",
            )
        if mode != "append" and above_aggregation(node):
            yield Problem.at(
                node,
                "PENSTOCK_DEDUPLICATION_OF_RESULTS",
                f"in {mode} mode the aggregation below gives a group again when it changes, and the deduplication drops all "
                "but the first: later values are lost",
                UNSAFE,
                fix="deduplicate before the aggregation; or outputMode('append')",
            )
