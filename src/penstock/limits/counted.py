"""How many rows a limit had let through when its query's last micro-batch was committed."""

from __future__ import annotations

from pyspark.sql import SparkSession

from penstock.errors import CommitRefused, StateRefused
from penstock.spark.checkpoint import Checkpoint, redact
from penstock.spark.internals.limit_state import UnreadableState, limit_operator, rows_passed


def counted(spark: SparkSession | None, checkpoint: Checkpoint, batch_id: int | None) -> int:
    """The rows that had passed at the end of a micro-batch; none before the first one.

    Parameters
    ----------
    spark
        Reads the state where plain Python cannot.

    Raises
    ------
    StateRefused
        When there is no session then, or it cannot read the state either; or when the micro-batch's offsets are not there.
    """
    if batch_id is None:
        return 0
    try:
        by_epochs = checkpoint.passed(batch_id)
    except CommitRefused as error:
        raise _unreadable(checkpoint, error.message) from error
    if by_epochs is not None:
        return by_epochs
    try:
        return rows_passed(checkpoint, batch_id)
    except UnreadableState as unreadable:
        why = str(unreadable)
    if spark is None:
        raise _unreadable(checkpoint, f"{why}; Spark may know it: give a session, or start one")
    try:
        return _by_spark(spark, checkpoint, batch_id)
    except Exception as error:
        raise _unreadable(checkpoint, f"{why}; {type(error).__name__}: {str(error)[:200]}") from error


def _by_spark(spark: SparkSession, checkpoint: Checkpoint, batch_id: int) -> int:
    """By Spark's own data source, whatever the state store."""
    options = {"batchId": str(batch_id), "operatorId": str(limit_operator(checkpoint))}
    state = spark.read.format("statestore").options(**options).load(checkpoint.location)
    found = state.select("value.*").collect()
    return int(found[0][0]) if found else 0


def _unreadable(checkpoint: Checkpoint, why: str) -> StateRefused:
    where = redact(checkpoint.location)
    return StateRefused(
        f"how far the limit has come cannot be read from the checkpoint at {where!r} ({why})",
        condition="STATE_REFUSED.LIMIT",
        checkpoint=where,
    )
