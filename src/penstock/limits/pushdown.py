"""What a queue need not be read for, since a limit would drop it."""

from __future__ import annotations

from pyspark.sql import DataFrame

from penstock.commit.offsets import QueueOffset
from penstock.errors import CheckpointMismatch, InvalidInput
from penstock.limits.resume import LimitState
from penstock.limits.rows import METRIC
from penstock.spark.checkpoint import Checkpoint, redact_location
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import Node, plan_tree
from penstock.spark.limit_pushdown import Quota

_AGGREGATES = {"Aggregate", "Distinct"}


def limit_node(frame: DataFrame) -> Node:
    """The limit in a query's plan.

    Raises
    ------
    InvalidInput
        When there is another one; their counts could not be told apart.
    """
    found = [node for node in plan_tree(frame).walk() if node.name == "GlobalLimit" and node.streaming]
    if len(found) != 1:
        raise InvalidInput(
            f"a pipeline has one limit, and this one's plan has {len(found)}: leave df.limit(n) out of its transformations"
        )
    return found[0]


def is_per_micro_batch(frame: DataFrame) -> bool:
    """Whether the limit of a query in output mode complete is one of each micro-batch's result, and not of the rows of the stream.

    Spark counts over all micro-batches where no aggregation is below it.
    """
    counted = (
        node for node in plan_tree(frame).walk() if node.name == "CollectMetrics" and METRIC in node.text
    )
    return any(node.name in _AGGREGATES and node.streaming for top in counted for node in top.below())


def is_one_to_one(limit: Node) -> bool:
    """Whether each row that is read below a limit comes to it as one row."""
    return all(Trait.ONE_TO_ONE in traits_of(node.name) for node in limit.below())


def remaining_quota(checkpoint: Checkpoint, found: LimitState, rows: int, *, exact: bool) -> Quota:
    """What a limit leaves to read of the one queue that the query reads.

    Parameters
    ----------
    exact
        Whether each row that is read passes.

    Raises
    ------
    CheckpointMismatch
        When the checkpoint has the offsets of another source.
    """
    if not exact:
        return Quota(rows, None, None, checkpoint.location)
    return Quota(rows, rows - found.passed, _since(checkpoint, found), checkpoint.location)


def _since(checkpoint: Checkpoint, found: LimitState) -> tuple[int, ...] | None:
    """Where the last committed micro-batch ended; where the first one began, when none is committed."""
    if found.last is None and found.planned is None:
        return None
    offsets = [QueueOffset.of(value) for value in checkpoint.offsets(found.last or 0)]
    if len(offsets) != 1 or offsets[0] is None:
        where = redact_location(checkpoint.location)
        raise CheckpointMismatch(
            f"the query at {where!r} has counted the rows of another source for its limit, and is now to read a queue: start with a new "
            "checkpoint; a consumer's offset says where it goes on",
            checkpoint=where,
        )
    return offsets[0].start if found.last is None else offsets[0].end
