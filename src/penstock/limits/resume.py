"""How many rows a limit had let through when its query's last micro-batch was committed."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import SparkSession

from penstock.errors import CheckpointMismatch, CommitRefused, StateRefused
from penstock.limits.record import LimitRecord, read_key_record, read_record, write_record
from penstock.spark.checkpoint import Checkpoint, redact_location
from penstock.spark.internals.limit_state import UnreadableState, limit_operator, rows_passed


def count_passed(spark: SparkSession | None, checkpoint: Checkpoint, batch_id: int | None) -> int:
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
        by_epochs = checkpoint.limit_passed(batch_id)
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
    where = redact_location(checkpoint.location)
    return StateRefused(
        f"how far the limit has come cannot be read from the checkpoint at {where!r} ({why})",
        condition="STATE_REFUSED.LIMIT",
        checkpoint=where,
    )


# ---- begun: A limit on its way: what a checkpoint says when its query is started, again or for the first time.


@dataclass(frozen=True)
class LimitState:
    """How far a limit has come."""

    passed: int
    """Rows, at the end of the last committed micro-batch."""
    last: int | None
    """That micro-batch."""
    planned: int | None
    """The last one that was begun, committed or not."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a micro-batch was begun and not committed."""
        return self.planned != self.last


def resume_limit(spark: SparkSession, checkpoint: Checkpoint, rows: int) -> LimitState:
    """How far the limit of a checkpoint has come, which is now one of so many rows.

    Raises
    ------
    CheckpointMismatch
        When the query ran without a limit before.
    CommitRefused
        When the limit was another one, and a micro-batch was begun with that and not committed: repeated, it would have other rows than
        the sink may have.
    StateRefused
        When the count cannot be read.
    """
    where = redact_location(checkpoint.location)
    try:
        last, planned = checkpoint.last_commit(), checkpoint.last_planned()
        record = read_record(checkpoint)
    except Exception as error:
        raise CommitRefused(
            f"a limit is counted by the checkpoint, and {where!r} cannot be read from this Python ({type(error).__name__}): check the "
            "address and the credentials",
            checkpoint=where,
        ) from error
    if last is not None and checkpoint.limit_passed(last) is not None:
        raise CheckpointMismatch(
            f"the limit at {where!r} was counted by the continuous trigger, and Spark's own count knows nothing of it: go on with "
            "ps.Trigger.continuous, or start with a new checkpoint; a consumer's offset says where it goes on",
            checkpoint=where,
        )
    if planned is not None and record is None:
        keyed = read_key_record(checkpoint)
        how = "without a limit before, and nothing was counted" if keyed is None else f"with {keyed} before"
        raise CheckpointMismatch(
            f"the query at {where!r} has run {how}: start with a new checkpoint; a consumer's offset says where it goes on",
            checkpoint=where,
        )
    if record is not None and record.rows != rows and planned != last:
        raise CommitRefused(
            f"micro-batch {planned} was begun with limit({record.rows}) and not committed; with limit({rows}) it might have other rows "
            f"than the sink has got: start the query once with limit({record.rows}), which finishes it, then with limit({rows})",
            condition="COMMIT_REFUSED.LIMIT_CHANGED",
            checkpoint=where,
            before=record.rows,
            now=rows,
        )
    return LimitState(count_passed(spark, checkpoint, last), last, planned)


def reason_not_to_start(found: LimitState, rows: int) -> str | None:
    """Why a query with a limit need not start at all; None when it is to, if only to finish a micro-batch."""
    if found.passed < rows or found.is_unfinished:
        return None
    if found.passed == rows:
        return f"its limit of {rows:,} rows is reached"
    return f"its limit of {rows:,} rows is lower than the {found.passed:,} rows that have passed"


def keep_record(checkpoint: Checkpoint, rows: int) -> None:
    """Keep the limit beside the checkpoint.

    Raises
    ------
    CommitRefused
        When it cannot be written.
    """
    record = LimitRecord(rows)
    if read_record(checkpoint) != record:
        write_record(checkpoint, record)
