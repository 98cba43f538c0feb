"""Execution of a continuous query on the driver: its runs, which are long Spark jobs, and their epochs."""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.commit.protocol import OTHER_INPUT
from penstock.continuous.catch_up import Backlog
from penstock.continuous.connectors.protocol import Epoch, Positions, SinkDriver, SourceDriver, WriterFactory
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.committed_epochs import CommittedEpochs
from penstock.continuous.driver.coordinator import EpochCoordinator, Limit, Quota
from penstock.continuous.driver.epochs import Epochs
from penstock.continuous.driver.progress import ListenerDispatch, Progress, timestamp
from penstock.continuous.driver.runs import Run, SparkEngine, SparkJob, partitions_by_task
from penstock.continuous.tasks import BEHIND_ROWS
from penstock.errors import (
    ContinuousFailedError,
    DataLostError,
    InvalidInputError,
    PenstockError,
    condition_of,
)
from penstock.redaction import redacted_message
from penstock.spark.error_boundary import job_failure
from penstock.store.records.catalog import QueueChanged
from penstock.store.staging import StagingLost

log = logging.getLogger("penstock.continuous")

_MAX_RESTARTS = 5
_FIRST_BACK_OFF_SECONDS = 0.1
_MAX_BACK_OFF_SECONDS = 10.0
_FINISH_SECONDS = 60.0
_LAST_EPOCH_POLL_SECONDS = 0.02
"""Seconds between two attempts to begin a run's last epoch."""
_JOB_FAILURE_SECONDS = 2.0
_LISTENER_SECONDS = 2.0
MIN_CATCH_UP_ROWS = BEHIND_ROWS / 10
"""After a catch-up job or a run that fell behind, this many unread rows are worth another catch-up job, since
a run of epochs takes a moment to start.
"""
_POLL_SECONDS = 0.25
"""Seconds between two checks of the job while no rows arrive."""
_CHECK_SECONDS = 5.0
"""Seconds between two checks of the source while nothing is committed."""
_NOTIFY_SECONDS = 1.0
"""Seconds between two notifications of a source whose consumer the sink moves."""


class State(Enum):
    """The state of a query, as in Spark's ContinuousExecution."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    RECONFIGURING = "RECONFIGURING"
    TERMINATED = "TERMINATED"


@dataclass(frozen=True)
class Settings:
    """Settings of a continuous query."""

    interval: float
    """The minimum number of seconds between the starts of two epochs."""
    retain: int = 100
    """The number of epochs that the checkpoint keeps."""
    backlog: int = 10_000
    """The number of epochs that may be in flight."""
    start_timeout: float = 60.0
    """Seconds within which all tasks must connect."""


class ContinuousExecution:
    """Driver of a query, in its own thread, which calls ``clean_up`` unless the query has failed."""

    def __init__(
        self,
        name: str | None,
        source: SourceDriver,
        sink: SinkDriver,
        engine: SparkEngine,
        checkpoint: CheckpointLog,
        settings: Settings,
        *,
        limit: Limit | None = None,
        run_id: str | None = None,
        listeners: ListenerDispatch | None = None,
        clean_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.id, self.run_id = name, checkpoint.query_id(), run_id or str(uuid.uuid4())
        self.source, self.sink, self.engine, self.checkpoint = source, sink, engine, checkpoint
        self.settings, self._clock, self._limit, self._clean_up = settings, clock, limit, clean_up
        self.progress = Progress(self.id, self.run_id, name, clock, source.description, sink.description)
        self._listeners = listeners or ListenerDispatch(name or self.id, None)
        self.committed = CommittedEpochs(
            source, sink, checkpoint, clock, limited=limit is not None, retain=settings.retain
        )
        self.end_reason: str | None = None
        """Why the query has ended by itself, if it has."""
        self._changed = threading.Condition()
        self.state = State.INITIALIZING
        self.failure: Exception | None = None
        """The error that ended the query, if any."""
        self.stopping = self._started = False
        self.coordinator: EpochCoordinator | None = None
        self.job: SparkJob | None = None
        self._nothing_committed = True
        """Whether the current run has not committed anything yet."""
        self._catch_up_rows = float(BEHIND_ROWS)
        """The next run is a catch-up job if at least this many rows are unread."""
        self._thread = threading.Thread(target=self._run, name=f"continuous {name or self.id}", daemon=True)

    # Called by users of the query.

    def start(self) -> None:
        """Start the query; return when its first run is active or the query has ended."""
        log.info("query %s starts", self._label, extra={"action": "query_started", **self._log_fields})
        self._listeners.started(self.name, timestamp())
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self.state is State.TERMINATED)

    def stop(self, timeout: float = _FINISH_SECONDS) -> bool:
        """Finish the epoch in flight, then end the query; return whether the epoch was finished."""
        self.stopping = True
        with self._changed:
            self._changed.notify_all()
        if (coordinator := self.coordinator) is not None:
            coordinator.wake()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return self.failure is None
        if (coordinator := self.coordinator) is not None:
            coordinator.interrupt(_not_finished_error("the epoch in flight is not complete", timeout))
        if (job := self.job) is not None:
            job.cancel()
        self._thread.join(timeout)
        return False

    def join(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def await_epoch(self, number: int, timeout: float | None = None) -> bool:
        """Wait until an epoch is committed or the query has ended; return whether the epoch is committed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.committed.last >= number or self.state is State.TERMINATED, timeout
            )
        return self.committed.last >= number

    def await_offsets(self, reached: Callable[[Positions], bool]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: reached(self.committed.positions) or self.state is State.TERMINATED
            )

    # In the query's thread: its runs.

    def _run(self) -> None:
        try:
            self._run_until_ended()
        except Exception as raised:
            error = job_failure(raised)
            log.error(
                "query %s failed: %s",
                self._label,
                redacted_message(error),
                extra={"action": "query_failed", **self._error_fields(error)},
            )
            self.failure = error
        finally:
            self._terminate()

    def _terminate(self) -> None:
        try:
            self.committed.release()
        except Exception as error:
            log.warning(
                "query %s could not release its source: %s",
                self._label,
                redacted_message(error),
                extra={"action": "release_failed", **self._error_fields(error)},
            )
        if self.failure is None:
            self._clean_up()
        with self._changed:
            self.state = State.TERMINATED
            self._changed.notify_all()
        self._listeners.terminated(self.failure, _LISTENER_SECONDS)
        log.info("query %s has ended", self._label, extra={"action": "query_ended", **self._log_fields})

    @property
    def _label(self) -> str:
        return f"{self.name or 'without a name'} [id = {self.id}, runId = {self.run_id}]"

    @property
    def _log_fields(self) -> dict[str, str | None]:
        return {"query": self.name, "query_id": self.id, "run_id": self.run_id}

    def _error_fields(self, error: Exception) -> dict[str, str | int | None]:
        return {**self._log_fields, "epoch": self.committed.last, "error": condition_of(error)}

    def _run_until_ended(self) -> None:
        failures = 0
        while not self.stopping:
            self._nothing_committed = True
            try:
                self._run_once()
            except Exception as raised:
                error, failures = job_failure(raised), failures + 1 if self._nothing_committed else 1
                # If the first run cannot start, the query fails, since the user has to act.
                if not self._started or not _is_repeatable(raised, error) or failures > _MAX_RESTARTS:
                    raise
                if self._warn_if_stopping(error):
                    return
                log.warning(
                    "query %s restarts after epoch %s: %s",
                    self._label,
                    self.committed.last,
                    redacted_message(error),
                    extra={"action": "restart", **self._error_fields(error), "failures": failures},
                )
                with self._changed:
                    back_off = min(_FIRST_BACK_OFF_SECONDS * 2**failures, _MAX_BACK_OFF_SECONDS)
                    self._changed.wait_for(lambda: self.stopping, back_off)

    def _warn_if_stopping(self, error: Exception) -> bool:
        """Return whether the query is stopping; if so, log that its next start repeats what has failed."""
        if self.stopping:
            log.warning(
                "query %s stops after epoch %s; its next start repeats the rest: %s",
                self._label,
                self.committed.last,
                redacted_message(error),
                extra={"action": "stopped_short", **self._error_fields(error)},
            )
        return self.stopping

    def _run_once(self) -> None:
        self.progress.run_started()
        self.source.take_ownership()
        self.committed.resume(first_run=not self._started)
        self.sink.delete_staged()
        if self._end_by_limit():
            return
        backlogs = self._backlogs()
        if backlogs:
            self._catch_up(backlogs)
        else:
            self._run_epochs()

    def _backlogs(self) -> Sequence[Backlog]:
        """Return what each task of a catch-up job should read; empty if few rows are unread."""
        min_rows, self._catch_up_rows = self._catch_up_rows, float(BEHIND_ROWS)
        if self._limit is not None:
            # The limit may need only a few of the rows.
            return ()
        ends = self.source.end_offsets()
        unread = {
            partition: ends.get(partition, offset) - offset
            for partition, offset in self.committed.positions.items()
        }
        if sum(unread.values()) < min_rows:
            return ()
        starts = {
            partition: offset
            for partition, offset in self.committed.positions.items()
            if unread[partition] > 0
        }
        groups = partitions_by_task(starts, min(len(starts), self.engine.slots))
        return [Backlog(group, sum(unread[partition] for partition in group)) for group in groups]

    def _catch_up(self, backlogs: Sequence[Backlog]) -> None:
        """Commit a backlog, or as much of it as the tasks read within their time, as one epoch."""
        writers, start = self.sink.writer_factory(), self.committed.positions
        job = self.job = self.engine.catch_up_job(backlogs, writers, self.committed.last + 1)
        try:
            job.start()
            self._set_state(State.ACTIVE)
            self.progress.tasks_connected()
            while not job.join(_POLL_SECONDS):
                self.check_source()
            if (failure := job.failure()) is not None:
                raise failure
            epoch = job.epoch()
            if any(start[partition] != offset for partition, offset in epoch.offsets.items()):
                self._commit(writers, epoch)
                self._catch_up_rows = MIN_CATCH_UP_ROWS
            else:
                # Continue with a run of epochs, which waits for rows.
                self._catch_up_rows = math.inf
        finally:
            job.cancel()
            job.join(_FINISH_SECONDS)
            self.job = None

    def _run_epochs(self) -> None:
        tasks = self.engine.tasks(len(self.committed.positions))
        coordinator = self.engine.coordinator(Epochs(tasks, 0, self.settings.backlog))
        writers = self.sink.writer_factory()
        job = self.engine.job(coordinator, tasks, writers, limited=self._limit is not None)
        run = Run(coordinator, job, writers)
        self.coordinator = coordinator
        if self._limit is not None:
            coordinator.quota = Quota(self._limit.rows - self.committed.rows)
        try:
            job.start()
            coordinator.await_tasks(self.settings.start_timeout, job.alive)
            positions = partitions_by_task(self.committed.positions, coordinator.tasks)
            coordinator.assign(self.committed.last + 1, positions)
            self._set_state(State.ACTIVE)
            self.progress.tasks_connected()
            self._process_epochs(run)
            if not job.join(_FINISH_SECONDS):
                raise _not_finished_error("the tasks of the query have not ended")
        except ContinuousFailedError as error:
            if error.condition == "CONTINUOUS_FAILED.NOT_FINISHED":
                # Tasks may have failed since, because the driver has disconnected.
                raise
            # A task's own error says more than its lost connection.
            job.join(_JOB_FAILURE_SECONDS)
            raise job.failure() or error from None
        finally:
            # End the job, whatever its tasks are doing.
            job.cancel()
            coordinator.close()
            job.join(_FINISH_SECONDS)
            self.coordinator = None

    def _set_state(self, state: State) -> None:
        with self._changed:
            self.state, self._started = state, True
            self._changed.notify_all()

    # In the query's thread: the epochs of one run.

    def _process_epochs(self, run: Run) -> None:
        """Begin epochs, and commit them when they are complete, until the run has to end.

        An epoch begins as soon as there are rows, but at least one interval after the last one began.
        """
        next_begin, interval = self._clock(), self.settings.interval
        while not self._must_end(run):
            seconds_left = next_begin - self._clock()
            self._commit_next(run, seconds_left if seconds_left > 0 else _POLL_SECONDS)
            self.check_source()
            seconds_late = self._clock() - next_begin
            if seconds_late >= 0 and run.coordinator.begin() is not None:
                # Counting from the due time keeps the rate of epochs, although each begins a little late.
                next_begin += interval + (seconds_late if seconds_late >= interval else 0.0)
            if not run.job.alive():
                raise run.job.failure() or ContinuousFailedError(
                    "the tasks of the query ended without an error while it was running, which happens if "
                    "the Spark job is cancelled: to end a query, call its stop()",
                    condition="CONTINUOUS_FAILED.TASKS_ENDED",
                )
        if run.coordinator.far_behind:
            self._catch_up_rows = MIN_CATCH_UP_ROWS
        if not (self.stopping or self._reached_limit(run)):
            self._set_state(State.RECONFIGURING)
        self._finish(run)
        self._end_by_limit()

    def _must_end(self, run: Run) -> bool:
        """Return whether the run has to end: with the query, or so that another run can follow."""
        behind = run.coordinator.far_behind and self._limit is None
        return self.stopping or run.coordinator.has_new_partitions or behind or self._reached_limit(run)

    def _reached_limit(self, run: Run) -> bool:
        """Return whether the query has used up a limit that ends it."""
        return self._limit is not None and self._limit.stops and run.coordinator.exhausted

    def _end_by_limit(self) -> bool:
        """End the query if enough rows for its limit are committed; return whether it ends."""
        limit, rows = self._limit, self.committed.rows
        if limit is None or not limit.stops or rows < limit.rows:
            return False
        reason = "is reached" if rows == limit.rows else f"is lower than the {rows:,} rows that have passed"
        self.end_reason = f"its limit of {limit.rows:,} rows {reason}"
        # A warning if the query ends before it has run, which users may not expect.
        log.log(
            logging.INFO if self._started else logging.WARNING,
            "query %s ends: %s",
            self._label,
            self.end_reason,
            extra={"action": "limit_reached", **self._log_fields, "limit": limit.rows},
        )
        self.stopping = True
        return True

    def _finish(self, run: Run) -> None:
        """Commit the rows that have been read as a last epoch."""
        coordinator = run.coordinator
        coordinator.pause()
        deadline = self._clock() + _FINISH_SECONDS
        while not coordinator.is_drained:
            if self._clock() > deadline:
                raise _not_finished_error("the epoch in flight is not complete")
            coordinator.begin()
            self._commit_next(run, _LAST_EPOCH_POLL_SECONDS)
        coordinator.finish()
        self.committed.flush_checkpoint()

    def _commit_next(self, run: Run, timeout: float) -> None:
        epoch = run.coordinator.next_complete(timeout)
        if epoch is not None:
            self._commit(run.writers, epoch)
            run.coordinator.committed(epoch.number)

    def _commit(self, writers: WriterFactory, epoch: Epoch) -> None:
        commit_started = self._clock()
        offset = self.committed.commit(writers, epoch)
        self._nothing_committed = False
        progress = self.progress.committed(
            epoch, offset, commit_started, visible_when_written=self.sink.visible_when_written
        )
        self._listeners.progressed(progress)
        if not self.source.advanced_by_sink:
            self._notify_source()
        with self._changed:
            self._changed.notify_all()

    def check_source(self) -> None:
        """Notify the source of committed epochs, and regularly also without any: another query may own the
        source, or the source may ask this query to end.
        """
        if self.committed.seconds_since_notified >= (
            _NOTIFY_SECONDS if self.committed.has_unnotified_epochs else _CHECK_SECONDS
        ):
            self._notify_source()

    def _notify_source(self) -> None:
        if self.committed.notify_source():
            self.stopping = True


def _is_repeatable(raised: Exception, error: Exception) -> bool:
    """Return whether another run may succeed, for example after partitions were added to the sink.

    ``error`` is the error that made the run fail. ``raised`` is the same, or Spark's report of it.
    """
    if isinstance(error, InvalidInputError | DataLostError):
        # The same rows would be refused again.
        return False
    if not isinstance(raised, PenstockError) or raised.condition == OTHER_INPUT:
        return True
    return isinstance(raised, ContinuousFailedError | QueueChanged | StagingLost)


def _not_finished_error(problem: str, seconds: float = _FINISH_SECONDS) -> ContinuousFailedError:
    return ContinuousFailedError(
        f"{problem} {seconds:g} s after the run should have ended: a function of the query or its "
        "sink hangs or is slow. Look at the tasks in the Spark UI; the next run repeats the epoch",
        condition="CONTINUOUS_FAILED.NOT_FINISHED",
    )
