"""A row limit of a query in micro-batches: where the limit resumes, how many rows the source may read, and
when the query ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from penstock.commit.offsets import QueueOffset
from penstock.errors import CheckpointMismatchError, CommitRefusedError, condition_of
from penstock.limits.per_key import KeyLimit
from penstock.limits.progress import count_passed
from penstock.limits.record import (
    NEW_CHECKPOINT,
    KeyRecord,
    limit_changed_error,
    read_key_record,
    read_record,
    store_key_record,
)
from penstock.limits.rows import STOP, RowLimit, is_one_to_one, rows_passed_in
from penstock.redaction import redacted_message
from penstock.spark.checkpoint import Checkpoint, redact_location
from penstock.spark.internals.limit_state import UnreadableState, rows_passed
from penstock.spark.internals.sessions import JvmError
from penstock.spark.options import Quota
from penstock.spark.schemas import is_case_sensitive

log = logging.getLogger("penstock.limits")

_POLL_SECONDS = 0.05
_UNREADABLE = ("COMMIT_REFUSED.CHECKPOINT_DAMAGED", "COMMIT_REFUSED.CHECKPOINT_UNREACHABLE")
"""The conditions of errors about a checkpoint that cannot be read or written."""


@dataclass(frozen=True)
class LimitState:
    """The state of a limit when its query starts."""

    passed: int
    """The number of rows that had passed at the end of the last committed micro-batch."""
    last: int | None
    """The number of the last committed micro-batch; None if there is none."""
    planned: int | None
    """The number of the last micro-batch that was started, committed or not; None if there is none."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a micro-batch was started but not committed."""
        return self.planned != self.last


@dataclass(frozen=True)
class LimitRun:
    """The row limit of a query that is about to start."""

    limit: RowLimit
    checkpoint: Checkpoint
    resumed: LimitState

    @classmethod
    def of(cls, spark: SparkSession, limit: RowLimit, location: str) -> LimitRun:
        """Read from the checkpoint how many rows have passed."""
        checkpoint = Checkpoint(location)
        return cls(limit, checkpoint, _read_limit_state(spark, checkpoint, limit.rows))

    def reason_to_end(self, name: str | None) -> str | None:
        """Return why the query does not have to start; None if it must start, at least to finish a
        micro-batch.
        """
        rows, passed = self.limit.rows, self.resumed.passed
        if self.limit.on_limit != STOP or passed < rows or self.resumed.is_unfinished:
            return None
        if passed == rows:
            reason = f"its limit of {rows:,} rows is reached"
        else:
            reason = f"its limit of {rows:,} rows is lower than the {passed:,} rows that have passed"
        query = name or self.checkpoint.query_id()
        log.warning(
            "query %r ends immediately: %s",
            query,
            reason,
            extra={"action": "limit_reached", "query": query, "limit": rows},
        )
        return f"query {query!r} ends immediately: {reason}"

    def trigger_arguments(self, arguments: Mapping[str, str | bool]) -> Mapping[str, str | bool]:
        """Return the trigger's arguments. If all rows have passed, only an unfinished micro-batch runs."""
        is_reached = self.limit.on_limit == STOP and self.resumed.passed >= self.limit.rows
        return {"once": True} if is_reached else arguments

    def options(self, frame: DataFrame, *, of_a_queue: bool) -> dict[str, str]:
        """Return options that make a queue source read only as many rows as the limit still allows; none for
        other sources.
        """
        exact = is_one_to_one(frame)
        if self.limit.on_limit != STOP or not of_a_queue:
            return {}
        return remaining_quota(self.checkpoint, self.resumed, self.limit.rows, exact=exact).options()

    def watch(self, query: LimitedQuery) -> None:
        """Start a thread that stops the query once all rows have passed."""
        if self.limit.on_limit == STOP:
            watch = _LimitWatch(query, self)
            threading.Thread(target=watch.run, name=f"penstock-limit-{query.id}", daemon=True).start()


def _read_limit_state(spark: SparkSession, checkpoint: Checkpoint, rows: int) -> LimitState:
    try:
        last, planned = checkpoint.last_commit(), checkpoint.last_planned()
        stored_limit = read_record(checkpoint)
    except Exception as error:
        raise CommitRefusedError(
            f"a limit keeps its count in the checkpoint, but this Python process cannot read "
            f"{checkpoint.label!r} ({type(error).__name__}): check the address and the credentials",
            condition="COMMIT_REFUSED.CHECKPOINT_UNREACHABLE",
            checkpoint=checkpoint.label,
        ) from error
    if last is not None and checkpoint.limit_passed(last) is not None:
        raise CheckpointMismatchError(
            f"the continuous trigger has counted the rows of the limit at {checkpoint.label!r}, and Spark's "
            f"own count does not include them: keep penstock.Trigger.continuous, or {NEW_CHECKPOINT}",
            condition="CHECKPOINT_MISMATCH.LIMIT_TRIGGER",
            checkpoint=checkpoint.label,
        )
    if planned is not None and stored_limit is None:
        key_limit = read_key_record(checkpoint)
        description = (
            "without a limit before, and counted nothing" if key_limit is None else f"with {key_limit} before"
        )
        raise CheckpointMismatchError(
            f"the query at {checkpoint.label!r} has run {description}: {NEW_CHECKPOINT}",
            condition="CHECKPOINT_MISMATCH.LIMIT",
            checkpoint=checkpoint.label,
        )
    if stored_limit not in (None, rows) and planned is not None and planned != last:
        raise limit_changed_error(checkpoint, planned, stored_limit, rows)
    return LimitState(count_passed(spark, checkpoint, last), last, planned)


def remaining_quota(checkpoint: Checkpoint, resumed: LimitState, rows: int, *, exact: bool) -> Quota:
    """Return how many more rows a limit allows the source to read. Pass ``exact`` if every row that is read
    passes.
    """
    rows_left, counted_end = (
        (rows - resumed.passed, _counted_end(checkpoint, resumed)) if exact else (None, None)
    )
    return Quota(rows, rows_left, counted_end, checkpoint.location)


def _counted_end(checkpoint: Checkpoint, resumed: LimitState) -> tuple[int, ...] | None:
    """Return the end of the last committed micro-batch; if there is none, the start of the first one."""
    if resumed.last is None and resumed.planned is None:
        return None
    offsets = [QueueOffset.of(value) for value in checkpoint.offsets(resumed.last or 0)]
    if len(offsets) != 1 or offsets[0] is None:
        raise CheckpointMismatchError(
            f"the query at {checkpoint.label!r} has counted the rows of another source for its limit, but "
            f"now reads a queue: {NEW_CHECKPOINT}",
            condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
            checkpoint=checkpoint.label,
        )
    return offsets[0].start if resumed.last is None else offsets[0].end


def store_key_limit(counted: DataFrame, limit: KeyLimit, location: str) -> None:
    """Store a limit for each key of a DataFrame in the checkpoint, if the driver can reach the checkpoint."""
    record = KeyRecord(limit.per, limit.rows, limit.forget_ms, limit.kinds(counted))
    try:
        store_key_record(Checkpoint(location), record, exact=is_case_sensitive(counted.sparkSession))
    except Exception as error:
        if isinstance(error, CommitRefusedError) and error.condition not in _UNREADABLE:
            raise
        log.warning(
            "the limit for each key could not be stored at %s, so a later change of it will not be "
            "detected: %s",
            redact_location(location),
            redacted_message(error),
            extra={
                "action": "limit_not_kept",
                "checkpoint": redact_location(location),
                "error": condition_of(error),
            },
        )


def require_no_limit(location: str) -> None:
    """Refuse to run a query without the limit that it had before, since rows would pass without being
    counted.
    """
    try:
        checkpoint = Checkpoint(location)
        rows, key_limit = read_record(checkpoint), read_key_record(checkpoint)
        has_run = (rows is not None or key_limit is not None) and checkpoint.last_planned() is not None
    except Exception:
        # A query without a limit does not have to read its checkpoint here.
        return
    if has_run:
        limit = key_limit if rows is None else f"limit({rows})"
        raise CheckpointMismatchError(
            f"the query at {checkpoint.label!r} has run with {limit} before, but now has no limit: pass the "
            f"limit again, or {NEW_CHECKPOINT}",
            condition="CHECKPOINT_MISMATCH.LIMIT",
            checkpoint=checkpoint.label,
        )


class LimitedQuery(Protocol):
    """The part of a running query's interface that the thread needs to stop it."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str | None: ...

    @property
    def isActive(self) -> bool: ...

    @property
    def lastProgress(self) -> StreamingQueryProgress | None: ...

    @property
    def recentProgress(self) -> Sequence[StreamingQueryProgress]: ...

    def finish(self) -> None: ...


class _LimitWatch:
    """Counts the rows that have passed after each micro-batch, and stops the query at its limit.

    If the state cannot be read, it adds up the rows in this run's progress reports and those of earlier runs.
    """

    def __init__(self, query: LimitedQuery, run: LimitRun) -> None:
        self._query, self._checkpoint, self._rows = query, run.checkpoint, run.limit.rows
        self._observed_rows = run.resumed.passed
        self._last_batch = -1

    def run(self) -> None:
        try:
            self._watch()
        except (JvmError, ConnectionError) as error:
            # Spark has ended, and with it the query.
            log.debug(
                "the row limit is no longer watched: %s",
                type(error).__name__,
                extra={"action": "limit_unwatched", "error": condition_of(error)},
            )

    def _watch(self) -> None:
        while self._query.isActive:
            new = list(self._new_progress())
            if new and self._passed(new) >= self._rows:
                name = self._query.name or self._query.id
                log.info(
                    "query %r has reached its limit of %d rows, and stops",
                    name,
                    self._rows,
                    extra={"action": "limit_reached", "query": name, "limit": self._rows},
                )
                self._query.finish()
                return
            time.sleep(_POLL_SECONDS)

    def _passed(self, new: Sequence[StreamingQueryProgress]) -> int:
        """Return how many rows have passed, according to the state, which counts recomputed rows only
        once.
        """
        self._observed_rows += sum(rows_passed_in(progress) for progress in new)
        try:
            last = self._checkpoint.last_commit()
            return 0 if last is None else rows_passed(self._checkpoint, last)
        except (UnreadableState, OSError):
            return self._observed_rows

    def _new_progress(self) -> Iterator[StreamingQueryProgress]:
        last = self._query.lastProgress
        if last is None or not _has_run(last) or last.batchId <= self._last_batch:
            return
        recent = [last] if last.batchId == self._last_batch + 1 else self._query.recentProgress
        for progress in recent:
            if _has_run(progress) and progress.batchId > self._last_batch:
                self._last_batch = progress.batchId
                yield progress


def _has_run(progress: StreamingQueryProgress) -> bool:
    """Return whether the micro-batch of a progress report has run. An idle query reports the next one
    early.
    """
    return "addBatch" in progress.durationMs
