"""The driver side of a continuous query: successive runs, each a long Spark job, and their epochs."""

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
from penstock.redaction import shown
from penstock.spark.error_boundary import job_failure
from penstock.store.records.catalog import QueueChanged
from penstock.store.staging import StagingLost

log = logging.getLogger("penstock.continuous")

_RESTARTS = 5
_BACK_OFF = 0.1
_LONGEST_BACK_OFF = 10.0
_FINISH_SECONDS = 60.0
_FINISHING_SECONDS = 0.02
"""Seconds between two attempts to begin the last epoch."""
_JOB_FAILURE_SECONDS = 2.0
_LISTENER_SECONDS = 2.0
LITTLE_LEFT = BEHIND_ROWS / 10
"""With at least this many unread rows, another job that catches up pays off, since a run of epochs takes a
moment to begin.
"""
_REST_SECONDS = 0.25
"""Seconds between two checks of the source and the job while no rows arrive."""
_IDLE_SECONDS = 5.0
_NOTIFY_SECONDS = 1.0
"""Seconds between two checks of the source while nothing is committed."""


class State(Enum):
    """The state of a query, as in Spark's ContinuousExecution."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    RECONFIGURING = "RECONFIGURING"
    TERMINATED = "TERMINATED"


@dataclass(frozen=True)
class Settings:
    """Settings of a query."""

    interval: float
    """The minimum number of seconds between the starts of two epochs."""
    retain: int = 100
    """The number of epochs that the checkpoint keeps."""
    backlog: int = 10_000
    """The number of epochs that may be in flight."""
    start_timeout: float = 60.0
    """Seconds within which all tasks have to connect."""


class ContinuousExecution:
    """The driver side of a query, and its thread, which calls ``clean_up`` unless the query has failed."""

    def __init__(
        self,
        name: str | None,
        source: SourceDriver,
        sink: SinkDriver,
        engine: SparkEngine,
        logs: CheckpointLog,
        settings: Settings,
        *,
        limit: Limit | None = None,
        run_id: str | None = None,
        listeners: ListenerDispatch | None = None,
        clean_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.id, self.run_id = name, logs.query_id(), run_id or str(uuid.uuid4())
        self.source, self.sink, self.engine, self.logs = source, sink, engine, logs
        self.settings, self._clock, self._limit, self._clean_up = settings, clock, limit, clean_up
        self.progress = Progress(self.id, self.run_id, name, clock, source.description, sink.description)
        self._listeners = listeners or ListenerDispatch(name or self.id, None)
        self.committed = CommittedEpochs(
            source, sink, logs, clock, limited=limit is not None, retain=settings.retain
        )
        self.ending: str | None = None
        """Why it has ended on its own, if it has."""
        self._changed = threading.Condition()
        self.state = State.INITIALIZING
        self.failure: Exception | None = None
        """The error that ended it, if one did."""
        self.stopping = self._started = False
        self.coordinator: EpochCoordinator | None = None
        self.job: SparkJob | None = None
        self._fresh = True
        """Whether the current run has committed nothing yet."""
        self._worth = float(BEHIND_ROWS)
        """The number of unread rows from which on the next run is a job that catches up."""
        self._thread = threading.Thread(target=self._run, name=f"continuous {name or self.id}", daemon=True)

    # For the query's users.

    def start(self) -> None:
        """Start, and return when the first run is active or the query has ended."""
        log.info("query %s starts", self._called, extra={"action": "query_started", **self._fields})
        self._listeners.started(self.name, timestamp())
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self.state is State.TERMINATED)

    def stop(self, timeout: float = _FINISH_SECONDS) -> bool:
        """Finish the epoch in flight, then end; return whether it was finished."""
        self.stopping = True
        with self._changed:
            self._changed.notify_all()
        if (coordinator := self.coordinator) is not None:
            coordinator.wake()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return self.failure is None
        if (coordinator := self.coordinator) is not None:
            coordinator.interrupt(_not_finished("the epoch in flight is not complete", timeout))
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

    # In its thread: from the query to its runs.

    def _run(self) -> None:
        try:
            self._runs()
        except Exception as raised:
            error = job_failure(raised)
            log.error(
                "query %s failed: %s",
                self._called,
                shown(error),
                extra={"action": "query_failed", **self._with_error(error)},
            )
            self.failure = error
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self.committed.release()
        except Exception as error:
            log.warning(
                "query %s: its source could not be released: %s",
                self._called,
                shown(error),
                extra={"action": "release_failed", **self._with_error(error)},
            )
        if self.failure is None:
            self._clean_up()
        with self._changed:
            self.state = State.TERMINATED
            self._changed.notify_all()
        self._listeners.terminated(self.failure, _LISTENER_SECONDS)
        log.info("Query %s was stopped", self._called, extra={"action": "query_ended", **self._fields})

    @property
    def _called(self) -> str:
        return f"{self.name or 'without a name'} [id = {self.id}, runId = {self.run_id}]"

    @property
    def _fields(self) -> dict[str, str | None]:
        return {"query": self.name, "query_id": self.id, "run_id": self.run_id}

    def _with_error(self, error: Exception) -> dict[str, str | int | None]:
        return {**self._fields, "epoch": self.committed.last, "error": condition_of(error)}

    def _runs(self) -> None:
        failures = 0
        while not self.stopping:
            self._fresh = True
            try:
                self._one_run()
            except Exception as raised:
                error, failures = job_failure(raised), failures + 1 if self._fresh else 1
                # A query that does not even start fails, since its user has to act.
                if not self._started or not _may_be_repeated(raised, error) or failures > _RESTARTS:
                    raise
                if self._stops_short(error):
                    return
                log.warning(
                    "query %s restarts after epoch %s: %s",
                    self._called,
                    self.committed.last,
                    shown(error),
                    extra={"action": "restart", **self._with_error(error), "failures": failures},
                )
                with self._changed:
                    wait = min(_BACK_OFF * 2**failures, _LONGEST_BACK_OFF)
                    self._changed.wait_for(lambda: self.stopping, wait)

    def _stops_short(self, error: Exception) -> bool:
        """Return whether the query is being stopped; its next start then repeats what has failed."""
        if self.stopping:
            log.warning(
                "query %s stops after epoch %s, and its next start repeats the rest: %s",
                self._called,
                self.committed.last,
                shown(error),
                extra={"action": "stopped_short", **self._with_error(error)},
            )
        return self.stopping

    def _one_run(self) -> None:
        self.progress.run_started()
        self.source.own()
        self.committed.settle(first_run=not self._started)
        self.sink.clear()
        if self._end_by_limit():
            return
        backlogs = self._backlogs()
        if backlogs:
            self._catch_up(backlogs)
        else:
            self._run_epochs()

    def _backlogs(self) -> Sequence[Backlog]:
        """Return what each task of a job that catches up should read; empty if there are few unread rows."""
        least, self._worth = self._worth, float(BEHIND_ROWS)
        if self._limit is not None:
            # With a limit, only few of the rows may be needed.
            return ()
        ends = self.source.ends()
        unread = {part: ends.get(part, at) - at for part, at in self.committed.positions.items()}
        if sum(unread.values()) < least:
            return ()
        starts = {part: at for part, at in self.committed.positions.items() if unread[part] > 0}
        groups = partitions_by_task(starts, min(len(starts), self.engine.slots))
        return [Backlog(group, sum(unread[part] for part in group)) for group in groups]

    def _catch_up(self, backlogs: Sequence[Backlog]) -> None:
        """Commit a backlog, or as much of it as can be read in some seconds, as one epoch."""
        writers, before = self.sink.writers(), self.committed.positions
        job = self.job = self.engine.catch_up_job(backlogs, writers, self.committed.last + 1)
        try:
            job.start()
            self._become(State.ACTIVE)
            self.progress.tasks_connected()
            while not job.join(_REST_SECONDS):
                self.check_source()
            if (failure := job.failure()) is not None:
                raise failure
            epoch = job.epoch()
            if any(before[part] != at for part, at in epoch.offsets.items()):
                self._commit(writers, epoch)
                self._worth = LITTLE_LEFT
            else:
                # A run of epochs may find more rows, or wait for them.
                self._worth = math.inf
        finally:
            job.cancel()
            job.join(_FINISH_SECONDS)
            self.job = None

    def _run_epochs(self) -> None:
        tasks = self.engine.tasks(len(self.committed.positions))
        coordinator = self.engine.coordinator(Epochs(tasks, 0, self.settings.backlog))
        writers = self.sink.writers()
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
            self._become(State.ACTIVE)
            self.progress.tasks_connected()
            self._epochs(run)
            if not job.join(_FINISH_SECONDS):
                raise _not_finished("the tasks of the query have not ended")
        except ContinuousFailedError as error:
            if error.condition == "CONTINUOUS_FAILED.NOT_FINISHED":
                # Tasks may have failed since, as the driver has hung up.
                raise
            # A task's own failure is more informative than its broken connection, which Spark does not notice
            # in an idle task.
            job.join(_JOB_FAILURE_SECONDS)
            raise job.failure() or error from None
        finally:
            # End the job whatever its tasks are doing.
            job.cancel()
            coordinator.close()
            job.join(_FINISH_SECONDS)
            self.coordinator = None

    def _become(self, state: State) -> None:
        with self._changed:
            self.state, self._started = state, True
            self._changed.notify_all()

    # In its thread: the epochs of one run.

    def _epochs(self, run: Run) -> None:
        """Begin epochs and commit each that is complete, until the run has to end.

        An epoch begins with the first rows, but not before the interval after the start of the last one is
        over.
        """
        next_at, interval = self._clock(), self.settings.interval
        while not self._to_end(run):
            early = next_at - self._clock()
            self._commit_next(run, early if early > 0 else _REST_SECONDS)
            self.check_source()
            late = self._clock() - next_at
            if late >= 0 and run.coordinator.begin() is not None:
                # This keeps the rate of epochs on a busy source, although each begins a little late.
                next_at += interval + (late if late >= interval else 0.0)
            if not run.job.alive():
                raise run.job.failure() or ContinuousFailedError(
                    "the tasks of the query ended without an error while it was running, which happens when "
                    "Spark's job is cancelled: to end a query, call its stop()",
                    condition="CONTINUOUS_FAILED.TASKS_ENDED",
                )
        if run.coordinator.behind:
            self._worth = LITTLE_LEFT
        if not (self.stopping or self._reached_limit(run)):
            self._become(State.RECONFIGURING)
        self._finish(run)
        self._end_by_limit()

    def _to_end(self, run: Run) -> bool:
        """Return whether the run has to end, for good or for another one."""
        behind = run.coordinator.behind and self._limit is None
        return self.stopping or run.coordinator.grown or behind or self._reached_limit(run)

    def _reached_limit(self, run: Run) -> bool:
        """Return whether a limit that ends the query is used up."""
        return self._limit is not None and self._limit.stops and run.coordinator.exhausted

    def _end_by_limit(self) -> bool:
        """End the query if its limit is reached and committed; return whether it is."""
        limit, rows = self._limit, self.committed.rows
        if limit is None or not limit.stops or rows < limit.rows:
            return False
        why = "is reached" if rows == limit.rows else f"is lower than the {rows:,} rows that have passed"
        self.ending = f"its limit of {limit.rows:,} rows {why}"
        # A warning if the query ends before it begins, which is unexpected.
        log.log(
            logging.INFO if self._started else logging.WARNING,
            "query %s ends: %s",
            self._called,
            self.ending,
            extra={"action": "limit_reached", **self._fields, "limit": limit.rows},
        )
        self.stopping = True
        return True

    def _finish(self, run: Run) -> None:
        """Commit a last epoch with the rows that have been read."""
        coordinator = run.coordinator
        coordinator.pause()
        deadline = self._clock() + _FINISH_SECONDS
        while not coordinator.settled:
            if self._clock() > deadline:
                raise _not_finished("the epoch in flight is not complete")
            coordinator.begin()
            self._commit_next(run, _FINISHING_SECONDS)
        coordinator.finish()
        self.committed.log_all()

    def _commit_next(self, run: Run, timeout: float) -> None:
        epoch = run.coordinator.complete(timeout)
        if epoch is not None:
            self._commit(run.sink, epoch)
            run.coordinator.committed(epoch.number)

    def _commit(self, writers: WriterFactory, epoch: Epoch) -> None:
        began = self._clock()
        offset = self.committed.commit(writers, epoch)
        self._fresh = False
        progress = self.progress.committed(epoch, offset, began, at_once=self.sink.at_once)
        self._listeners.progressed(progress)
        if not self.source.advanced_by_sink:
            self._notify_source()
        with self._changed:
            self._changed.notify_all()

    def check_source(self) -> None:
        """Notify the source of committed epochs, and check it from time to time without any: another query
        may own it, or it may ask this one to end.
        """
        if self.committed.silent_seconds >= (_NOTIFY_SECONDS if self.committed.untold else _IDLE_SECONDS):
            self._notify_source()

    def _notify_source(self) -> None:
        if self.committed.notify_source():
            self.stopping = True


def _may_be_repeated(raised: Exception, error: Exception) -> bool:
    """Return whether the next run may succeed, for example after partitions were added to the sink.

    ``error`` is the error that made the run fail; it was raised here, or ``raised`` is Spark's report of it.
    """
    if isinstance(error, InvalidInputError | DataLostError):
        # The same rows would be refused again.
        return False
    if not isinstance(raised, PenstockError) or raised.condition == OTHER_INPUT:
        return True
    return isinstance(raised, ContinuousFailedError | QueueChanged | StagingLost)


def _not_finished(what: str, seconds: float = _FINISH_SECONDS) -> ContinuousFailedError:
    return ContinuousFailedError(
        f"{what} {seconds:g} s after the run should have ended: a function of the query or its "
        "sink hangs or is slow. Look at the tasks on Spark's page; the next run repeats the epoch",
        condition="CONTINUOUS_FAILED.NOT_FINISHED",
    )
