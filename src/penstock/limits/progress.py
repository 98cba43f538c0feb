"""The progress of a limit, read from a query's checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pyspark.sql import SparkSession

from penstock.arguments import path_text
from penstock.errors import CheckpointNotFoundError, CommitRefusedError, NotFoundError, StateRefusedError
from penstock.json_text import Json
from penstock.limits.record import read_key_record, read_record
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.limit_state import UnreadableState, limit_operator, rows_passed
from penstock.spark.state_reader import has_state_ids, load_state, spark_reason


@dataclass(frozen=True)
class LimitProgress:
    """How many of a limit's rows have passed. Its text form is ``37 of 100``."""

    passed: int
    limit: int

    @property
    def remaining(self) -> int:
        """The number of rows that can still pass."""
        return max(self.limit - self.passed, 0)

    @property
    def reached(self) -> bool:
        """Whether all rows have passed."""
        return self.remaining == 0

    def __str__(self) -> str:
        return f"{self.passed:,} of {self.limit:,}"

    def to_dict(self) -> Json:
        """Return the progress as plain values for JSON."""
        return {"passed": self.passed, "limit": self.limit}


def limit_progress(checkpoint: str | os.PathLike[str], *, spark: SparkSession | None = None) -> LimitProgress:
    """Return how many rows had passed the limit of a query at the end of its last committed micro-batch.

    Parameters
    ----------
    checkpoint
        The location of the query's checkpoint. The query may be running.
    spark
        A session; by default, the active one. It is needed only if the state is not in Spark's default state
        store.

    Raises
    ------
    CheckpointNotFoundError
        When the path has no checkpoint.
    NotFoundError
        When the checkpoint has no limit, or a limit per key, which counts each key separately.
    StateRefusedError
        When the state cannot be read.
    """
    query_checkpoint = Checkpoint(path_text("checkpoint", checkpoint))
    rows = read_record(query_checkpoint)
    if rows is None:
        raise _no_limit_error(query_checkpoint)
    session = spark or SparkSession.getActiveSession()
    return LimitProgress(count_passed(session, query_checkpoint, query_checkpoint.last_commit()), rows)


def _no_limit_error(checkpoint: Checkpoint) -> NotFoundError:
    if checkpoint.read("metadata") is None:
        return CheckpointNotFoundError(
            f"there is no checkpoint at {checkpoint.label!r}: pass the directory that the query was started "
            "with",
            checkpoint=checkpoint.label,
        )
    key_limit = read_key_record(checkpoint)
    description = (
        "no limit: is it the checkpoint of a pipeline with stream.limit(n)?"
        if key_limit is None
        else f"{key_limit}, which counts each key separately: penstock.state.read shows the counts"
    )
    return NotFoundError(
        f"the checkpoint {checkpoint.label!r} has {description}", checkpoint=checkpoint.label
    )


def count_passed(spark: SparkSession | None, checkpoint: Checkpoint, batch_id: int | None) -> int:
    """Return the number of rows that had passed at the end of a micro-batch; 0 before the first one."""
    if batch_id is None:
        return 0
    try:
        continuous_count = checkpoint.limit_passed(batch_id)
    except CommitRefusedError as error:
        raise _unreadable_error(checkpoint, error.message) from error
    if continuous_count is not None:
        return continuous_count
    try:
        return rows_passed(checkpoint, batch_id)
    except UnreadableState as unreadable:
        reason = str(unreadable)
    if spark is None:
        raise _unreadable_error(
            checkpoint, f"{reason}; Spark may be able to read it: pass or start a session"
        )
    try:
        return _count_by_spark(spark, checkpoint, batch_id)
    except StateRefusedError as error:
        raise _unreadable_error(checkpoint, f"{reason}; {error.message}") from error
    except Exception as error:
        raise _unreadable_error(checkpoint, f"{reason}; {spark_reason(error)}") from error


def _count_by_spark(spark: SparkSession, checkpoint: Checkpoint, batch_id: int) -> int:
    """Read the count with Spark's own data source, which can read every state store."""
    state = load_state(
        spark,
        checkpoint,
        limit_operator(checkpoint),
        {"batchId": str(batch_id)},
        state_ids=has_state_ids(checkpoint, batch_id),
    )
    rows = state.select("value.*").collect()
    return int(rows[0][0]) if rows else 0


def _unreadable_error(checkpoint: Checkpoint, reason: str) -> StateRefusedError:
    return StateRefusedError(
        f"the rows that have passed the limit cannot be read from the checkpoint at {checkpoint.label!r} "
        f"({reason})",
        condition="STATE_REFUSED.LIMIT",
        checkpoint=checkpoint.label,
    )
