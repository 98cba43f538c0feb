"""Row limits of pipelines with micro-batches: the source's quota, and the end of the query at its limit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.errors import CommitRefused, condition_of
from penstock.limits.per_key import KeyLimit
from penstock.limits.pushdown import is_one_to_one, limit_node, remaining_quota
from penstock.limits.record import KeyRecord, write_key_record
from penstock.limits.resume import LimitState, keep_record, reason_not_to_start, resume_limit
from penstock.limits.rows import STOP, RowLimit, rows_passed_in
from penstock.pipeline.micro_batches import MicroBatchQuery
from penstock.pipeline.query import EndedQuery
from penstock.pipeline.trigger import Trigger
from penstock.spark.checkpoint import Checkpoint, redact_location
from penstock.spark.internals.limit_state import UnreadableState, rows_passed
from penstock.spark.internals.sessions import JvmError
from penstock.spark.schemas import is_case_sensitive

log = logging.getLogger("penstock.pipeline")

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Limiting:
    """The row limit of a pipeline that is about to start."""

    limit: RowLimit
    checkpoint: Checkpoint
    begun: LimitState

    @classmethod
    def of(cls, spark: SparkSession, limit: RowLimit, location: str) -> Limiting:
        """Read from the checkpoint how many rows have passed.

        Raises
        ------
        CommitRefused
            And its kinds: when the query cannot resume from this checkpoint.
        StateRefused
            When the count cannot be read.
        """
        checkpoint = Checkpoint(location)
        return cls(limit, checkpoint, resume_limit(spark, checkpoint, limit.rows))

    def ended(self, name: str | None) -> EndedQuery | None:
        """Return an ended query if it has all its rows and stops at the limit; else None."""
        why = reason_not_to_start(self.begun, self.limit.rows) if self.limit.on_limit == STOP else None
        if why is None:
            return None
        query_id = self.checkpoint.query_id()
        called = name or query_id
        log.warning(
            "query %r ends at once: %s",
            called,
            why,
            extra={"action": "limit_reached", "query": called, "limit": self.limit.rows},
        )
        return EndedQuery(query_id, name, f"query {called!r} ends at once: {why}")

    def arguments(self, trigger: Trigger) -> dict[str, str | bool]:
        """Return the arguments of Spark's trigger.

        After all rows have passed, for the unfinished micro-batch alone.
        """
        is_last = self.limit.on_limit == STOP and self.begun.passed >= self.limit.rows
        return {"once": True} if is_last else trigger.arguments()

    def options(self, frame: DataFrame, *, of_a_queue: bool) -> dict[str, str]:
        """Return options for a queue that reads what the limit leaves; none for other sources and limits.

        Raises
        ------
        InvalidInput
            When the plan has another limit.
        CheckpointMismatch
            When the checkpoint has the offsets of another source.
        """
        exact = is_one_to_one(limit_node(frame))
        if self.limit.on_limit != STOP or not of_a_queue:
            return {}
        return remaining_quota(self.checkpoint, self.begun, self.limit.rows, exact=exact).options()

    def keep(self) -> None:
        """Store the limit beside the checkpoint, before the first micro-batch that counts towards it."""
        keep_record(self.checkpoint, self.limit.rows)

    def watch(self, query: MicroBatchQuery) -> None:
        """Start a thread that stops the query once it has all its rows."""
        if self.limit.on_limit == STOP:
            watch = LimitWatch(query, self.checkpoint, self.limit.rows, self.begun.passed)
            threading.Thread(target=watch.run, name=f"penstock-limit-{query.id}", daemon=True).start()


def keep_for_each_key(spark: SparkSession, limit: KeyLimit, location: str) -> None:
    """Store a limit for each key beside the checkpoint, if the driver can reach it.

    Raises
    ------
    CheckpointMismatch
        When the query has counted by other columns there, or not at all.
    CommitRefused
        When a micro-batch is unfinished that was begun with another limit.
    """
    record = KeyRecord(limit.per, limit.rows, limit.forget_ms)
    try:
        write_key_record(Checkpoint(location), record, exact=is_case_sensitive(spark))
    except Exception as error:
        # A refusal has a condition of its own; a failure to read or write has not.
        if isinstance(error, CommitRefused) and error.condition != CommitRefused.condition:
            raise
        log.warning(
            "the limit for each key could not be stored at %s, so that a later change of it is not noticed: "
            "%s",
            redact_location(location),
            error,
            extra={
                "action": "limit_not_kept",
                "checkpoint": redact_location(location),
                "error": condition_of(error),
            },
        )


class LimitWatch:
    """Watch over the row count after each micro-batch.

    Parameters
    ----------
    query
        The query.
    checkpoint
        Its checkpoint, where the count is.
    rows
        The limit.
    observed
        How many passed in earlier runs; if the state cannot be read, those in the progress of this run are
        added.
    """

    def __init__(self, query: MicroBatchQuery, checkpoint: Checkpoint, rows: int, observed: int) -> None:
        self._query, self._checkpoint, self._rows, self._observed = query, checkpoint, rows, observed
        self._last_batch = -1

    def run(self) -> None:
        """Watch until the query ends, or reaches its limit and is stopped."""
        try:
            self._watch()
        except (JvmError, ConnectionError) as error:
            # Spark has ended, and the query with it.
            log.debug(
                "the row limit is no longer watched: %s",
                type(error).__name__,
                extra={"action": "limit_unwatched", "error": condition_of(error)},
            )

    def _watch(self) -> None:
        while self._query.isActive:
            new = list(self._new())
            if new and self._passed(new) >= self._rows:
                called = self._query.name or self._query.id
                log.info(
                    "query %r has reached its limit of %d rows, and stops",
                    called,
                    self._rows,
                    extra={"action": "limit_reached", "query": called, "limit": self._rows},
                )
                self._query.finish()
                return
            time.sleep(_POLL_SECONDS)

    def _passed(self, new: Sequence[Any]) -> int:
        """Return how many rows have passed, by the state: it counts a row once even if computed twice."""
        self._observed += sum(rows_passed_in(progress) for progress in new)
        try:
            last = self._checkpoint.last_commit()
            return 0 if last is None else rows_passed(self._checkpoint, last)
        except (UnreadableState, OSError):
            return self._observed

    def _new(self) -> Iterator[Any]:
        """Yield the progress of the micro-batches since the last check."""
        last = self._query.lastProgress
        if not _ran(last) or last.batchId <= self._last_batch:
            return
        recent = [last] if last.batchId == self._last_batch + 1 else self._query.recentProgress
        for progress in recent:
            if _ran(progress) and progress.batchId > self._last_batch:
                self._last_batch = progress.batchId
                yield progress


def _ran(progress: Any) -> bool:
    """Return whether it is that of a micro-batch that has run.

    An idle query reports the next one before that runs.
    """
    return progress is not None and "addBatch" in progress.durationMs
