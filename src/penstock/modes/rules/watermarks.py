"""Several watermarks in one query."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.modes.plan import Plan
from penstock.modes.report import UNSAFE, WARNING, Problem

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
