"""How far a limit has come, told from a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from penstock.arguments import path_text
from penstock.errors import CheckpointNotFound, NotFound
from penstock.limits.record import read_key_record, read_record
from penstock.limits.resume import count_passed
from penstock.spark.checkpoint import Checkpoint, redact_location


@dataclass(frozen=True)
class LimitProgress:
    """How many rows of a limit have passed; as text such as ``37 of 100``."""

    passed: int
    limit: int

    @property
    def remaining(self) -> int:
        """How many more will pass."""
        return max(self.limit - self.passed, 0)

    @property
    def reached(self) -> bool:
        """Whether all have."""
        return self.remaining == 0

    def __str__(self) -> str:
        return f"{self.passed:,} of {self.limit:,}"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {"passed": self.passed, "limit": self.limit}


def limit_progress(checkpoint: str | os.PathLike[str], *, spark: SparkSession | None = None) -> LimitProgress:
    """How far the limit of a query has come, by its last committed micro-batch; the query may run or not.

    Parameters
    ----------
    checkpoint
        The query's.
    spark
        A session to read the state with, where it is in another store than Spark's own choice; the active one when None. Files in
        Spark's own choice are read without.

    Raises
    ------
    CheckpointNotFound
        When there is no checkpoint.
    NotFound
        When no limit is kept there, or one for each key, which has no one count.
    StateRefused
        When the state cannot be read.
    """
    location = path_text("checkpoint", checkpoint)
    found = Checkpoint(location)
    record = read_record(found)
    if record is None:
        raise _untold(found)
    session = spark or SparkSession.getActiveSession()
    return LimitProgress(count_passed(session, found, found.last_commit()), record.rows)


def _untold(checkpoint: Checkpoint) -> NotFound:
    where = redact_location(checkpoint.location)
    if checkpoint.read("metadata") is None:
        return CheckpointNotFound(
            f"there is no checkpoint at {where!r}: give the directory that the query was started with",
            checkpoint=where,
        )
    keyed = read_key_record(checkpoint)
    if keyed is None:
        why = "no limit is kept there: is it the checkpoint of a pipeline with stream.limit(n)?"
    else:
        why = f"of {keyed} each key has a count of its own, and ps.state.read shows them"
    return NotFound(
        f"how far the limit of the checkpoint {where!r} has come cannot be told: {why}", checkpoint=where
    )
