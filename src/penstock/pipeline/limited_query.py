"""A pipeline with a limit of rows: what its source is told, and how it ends by itself."""

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
    """The limit of a pipeline that is about to start."""

    limit: RowLimit
    checkpoint: Checkpoint
    found: LimitState

    @classmethod
    def of(cls, spark: SparkSession, limit: RowLimit, location: str) -> Limiting:
        """Look at how far it has come.

        Raises
        ------
        CommitRefused
            And its kinds: when it cannot go on with this checkpoint.
        StateRefused
            When the count cannot be read.
        """
        checkpoint = Checkpoint(location)
        return cls(limit, checkpoint, resume_limit(spark, checkpoint, limit.rows))

    def ended(self, name: str | None) -> EndedQuery | None:
        """The query, when it has all its rows and is to stop then."""
        why = reason_not_to_start(self.found, self.limit.rows) if self.limit.on_limit == STOP else None
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
        """The arguments of Spark's trigger; where all rows have passed, the query only finishes the micro-batch that was begun."""
        is_last = self.limit.on_limit == STOP and self.found.passed >= self.limit.rows
        return {"once": True} if is_last else trigger.arguments()

    def options(self, frame: DataFrame, *, of_a_queue: bool) -> dict[str, str]:
        """What the queue is told of the limit, as options of its read; nothing when the query is to run on, or reads something else.

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
        return remaining_quota(self.checkpoint, self.found, self.limit.rows, exact=exact).options()

    def keep(self) -> None:
        """Keep the limit beside the checkpoint, before the first micro-batch that counts for it."""
        keep_record(self.checkpoint, self.limit.rows)

    def watch(self, query: MicroBatchQuery) -> None:
        """Stop the query once it has all its rows."""
        if self.limit.on_limit == STOP:
            watch = LimitWatch(query, self.checkpoint, self.limit.rows, self.found.passed)
            threading.Thread(target=watch.run, name=f"penstock-limit-{query.id}", daemon=True).start()


def keep_for_each_key(spark: SparkSession, limit: KeyLimit, location: str) -> None:
    """Keep a limit for each key beside the checkpoint, where it can be reached from here.

    Raises
    ------
    CheckpointMismatch
        When other columns were counted there, or none.
    CommitRefused
        When a micro-batch is unfinished that was begun with another limit.
    """
    record = KeyRecord(limit.per, limit.rows, limit.forget_ms)
    try:
        write_key_record(Checkpoint(location), record, exact=is_case_sensitive(spark))
    except Exception as error:
        # What is refused has a condition of its own; what cannot be read or written has not.
        if isinstance(error, CommitRefused) and error.condition != CommitRefused.condition:
            raise
        log.warning(
            "the limit for each key is not kept at %s, and another one will not be noticed there: %s",
            redact_location(location),
            error,
            extra={
                "action": "limit_not_kept",
                "checkpoint": redact_location(location),
                "error": condition_of(error),
            },
        )


class LimitWatch:
    """Looks at the count after each micro-batch.

    Parameters
    ----------
    query
        The query.
    checkpoint
        Its checkpoint, where the count is.
    rows
        How many are enough.
    observed
        How many passed in earlier runs; where the state cannot be read, what the progress tells of further ones is added up.
    """

    def __init__(self, query: MicroBatchQuery, checkpoint: Checkpoint, rows: int, observed: int) -> None:
        self._query, self._checkpoint, self._rows, self._observed = query, checkpoint, rows, observed
        self._seen = -1

    def run(self) -> None:
        """Until the query ends, or is stopped from here."""
        try:
            self._watch()
        except (JvmError, ConnectionError) as error:
            # Spark has ended, and the query with it.
            log.debug(
                "the limit is no longer watched: %s",
                type(error).__name__,
                extra={"action": "limit_unwatched", "error": condition_of(error)},
            )

    def _watch(self) -> None:
        while self._query.isActive:
            new = list(self._new())
            if new and self._passed(new) >= self._rows:
                called = self._query.name or self._query.id
                log.info(
                    "query %r has its %d rows, and stops",
                    called,
                    self._rows,
                    extra={"action": "limit_reached", "query": called, "limit": self._rows},
                )
                self._query.finish()
                return
            time.sleep(_POLL_SECONDS)

    def _passed(self, new: Sequence[Any]) -> int:
        """How many rows have passed: by the state, which counts a row once, whatever was computed twice."""
        self._observed += sum(rows_passed_in(progress) for progress in new)
        try:
            last = self._checkpoint.last_commit()
            return 0 if last is None else rows_passed(self._checkpoint, last)
        except (UnreadableState, OSError):
            return self._observed

    def _new(self) -> Iterator[Any]:
        """The progress of the micro-batches since the last look."""
        last = self._query.lastProgress
        if not _ran(last) or last.batchId <= self._seen:
            return
        found = [last] if last.batchId == self._seen + 1 else self._query.recentProgress
        for progress in found:
            if _ran(progress) and progress.batchId > self._seen:
                self._seen = progress.batchId
                yield progress


def _ran(progress: Any) -> bool:
    """Whether it tells of a micro-batch; while a query rests, it tells of the next one before that has run."""
    return progress is not None and "addBatch" in progress.durationMs
