"""A limit on the rows of a stream: a transformation that reports how many rows have passed."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.listener import StreamingQueryProgress

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError, InvalidOptionError
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import Node, plan_tree

STOP, KEEP = "stop", "keep"
MAX_LIMIT_ROWS = 2**31 - 1
"""The largest limit. Spark's limits are 32-bit numbers."""

_METRIC = "penstock limit"
_AGGREGATES = {"Aggregate", "Distinct"}


@dataclass(frozen=True)
class RowLimit:
    """Spark's own limit. In append mode it counts rows in the state store over the whole life of a query."""

    rows: int
    on_limit: str = STOP

    def __post_init__(self) -> None:
        check_rows(self.rows)
        if self.on_limit not in (STOP, KEEP):
            hint = did_you_mean(str(self.on_limit), (STOP, KEEP))
            raise InvalidOptionError(
                f"on_limit is {STOP} or {KEEP}, not {in_quotes(self.on_limit)}.{hint}",
                condition="INVALID_OPTION.VALUE",
                option="on_limit",
            )

    def __call__(self, frame: DataFrame) -> DataFrame:
        return frame.limit(self.rows).observe(_METRIC, F.count(F.lit(1)).alias("rows"))


def check_rows(rows: object) -> None:
    """Refuse a limit that is not a valid number of rows."""
    if type(rows) is not int or not 1 <= rows <= MAX_LIMIT_ROWS:
        raise InvalidOptionError(
            f"a limit is a whole number from 1 to {MAX_LIMIT_ROWS:,}, not {in_quotes(rows)}",
            condition="INVALID_OPTION.VALUE",
            option="n",
        )


def rows_passed_in(progress: StreamingQueryProgress) -> int:
    """Return how many rows passed the limit in a micro-batch, according to its progress."""
    row = progress.observedMetrics.get(_METRIC)
    # Access it by position: a Row that comes over Spark Connect has no names.
    return 0 if row is None else int(row[0])


def is_one_to_one(frame: DataFrame) -> bool:
    """Return whether each row that a query reads is exactly one row when it reaches the limit."""
    limits = [node for node in plan_tree(frame).walk() if node.name == "GlobalLimit" and node.streaming]
    if len(limits) != 1:
        raise InvalidInputError(
            f"a pipeline has one limit, but the plan of this one has {len(limits)}: "
            "remove df.limit(n) from its transformations",
            condition="INVALID_INPUT.SEVERAL_LIMITS",
        )
    return all(Trait.ONE_TO_ONE in traits_of(node.name) for node in limits[0].descendants())


def is_per_micro_batch(frame: DataFrame) -> bool:
    """Return whether Spark, in output mode complete, limits each micro-batch's result instead of the stream's
    rows.

    Spark counts over all micro-batches unless there is an aggregation before the limit.
    """
    metrics_nodes: list[Node] = [
        node for node in plan_tree(frame).walk() if node.name == "CollectMetrics" and _METRIC in node.text
    ]
    return any(
        node.name in _AGGREGATES and node.streaming
        for metrics_node in metrics_nodes
        for node in metrics_node.descendants()
    )
