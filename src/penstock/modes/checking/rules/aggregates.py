"""Rules of aggregations and deduplications."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.checking.plan import Plan, above_aggregation, expires, names, path_to
from penstock.modes.checking.report import UNSAFE, Problem
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import (
    Node,
    grouping_expressions,
    groups_by_session,
    has_watermark,
    list_items,
)

MODE_CONDITION = "STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION"


def aggregates(plan: Plan, mode: str) -> Iterator[Problem]:
    """Apply the rules of Spark's checker for aggregations (4.2, 4.3)."""
    if mode == "complete" and not plan.aggregates:
        yield Problem(
            "PENSTOCK_COMPLETE_WITHOUT_AGGREGATION",
            "complete mode emits the whole result each time, and only an aggregation keeps one",
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
                "a session window's bounds change while the session grows, so update mode cannot identify "
                "the row to replace",
                fix=(
                    "use outputMode('append') with withWatermark(...), which emits each session once, when "
                    "it is closed; or outputMode('complete')"
                ),
                condition=MODE_CONDITION,
            )
        if "(distinct " in node.text:
            yield Problem.at(
                node,
                "PENSTOCK_DISTINCT_AGGREGATE",
                "streams do not support an aggregate over distinct values",
                fix=(
                    "approx_count_distinct(...); or dropDuplicates(...) before the aggregation, in append "
                    "mode"
                ),
            )


def _without_watermark(plan: Plan, node: Node) -> Problem:
    below = [watermark for watermark in plan.watermarks if watermark.node in node.walk()]
    keys = ", ".join(names(grouping_expressions(node))) or "nothing"
    if not below:
        return Problem.at(
            node,
            "PENSTOCK_AGGREGATION_WITHOUT_WATERMARK",
            f"append mode emits a group when it is finished, and without a watermark a group by {keys} never "
            "is",
            fix=(
                "df.withWatermark('<event time>', '10 minutes').groupBy(window('<event time>', '5 minutes'), "
                "...); or outputMode('update') or outputMode('complete')"
            ),
            condition=MODE_CONDITION,
        )
    column = below[0].column
    losing = [step for step in path_to(node, below[0].node) if _loses(step)]
    if losing:
        return Problem.at(
            losing[-1],
            "PENSTOCK_EVENT_TIME_LOST",
            f"the watermark on {column!r} does not reach the aggregation: the column is dropped or "
            "recomputed on the way",
            fix=(
                f"keep {column!r} unchanged, and group by it or by window({column!r}, ...); or put "
                "withWatermark right before groupBy, on the grouping column"
            ),
            condition=MODE_CONDITION,
        )
    return Problem.at(
        node,
        "PENSTOCK_WATERMARK_NOT_IN_GROUPING",
        f"append mode emits a group when the watermark has passed it; the watermark is on {column!r}, and "
        f"the groups are by {keys}, which has no event time",
        fix=(
            f"groupBy(window({column!r}, '5 minutes'), ...); an expression such as date_trunc over "
            f"{column!r} does not count, a window or the column itself does"
        ),
        condition=MODE_CONDITION,
    )


def _loses(step: Node) -> bool:
    """Whether no output column of a step has a watermark."""
    if step.name == "Project":
        return not any(has_watermark(item) for item in list_items(step.text))
    return Trait.NEW_COLUMNS in traits_of(step.name) and "-T" not in (
        step.arguments[-1] if step.arguments else ""
    )


def deduplications(plan: Plan, mode: str) -> Iterator[Problem]:
    """Report deduplications without a watermark, and those of rows that are emitted again with other
    values.
    """
    for node in plan.deduplications:
        if node.name == "DeduplicateWithinWatermark" and not plan.watermarks:
            yield Problem.at(
                node,
                "PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK",
                "dropDuplicatesWithinWatermark keeps a key for the watermark's delay, and the query has no "
                "watermark",
                fix="df.withWatermark('<event time>', '10 minutes').dropDuplicatesWithinWatermark([...])",
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
