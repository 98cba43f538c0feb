"""A continuous query on the driver: successive runs, each a long Spark job, and the epochs of each run."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.commit.protocol import OTHER_INPUT
from penstock.continuous.connectors.protocol import Positions, SinkDriver, SourceDriver
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.coordinator import EpochCoordinator, Limit, Quota
from penstock.continuous.driver.epochs import Epoch
from penstock.continuous.driver.listener_dispatch import ListenerDispatch
from penstock.continuous.driver.progress import Progress, timestamp
from penstock.continuous.driver.recovery import recover
from penstock.continuous.driver.runs import Engine, Run, partitions_by_task
from penstock.continuous.task.reader import BEHIND_ROWS
from penstock.errors import ContinuousFailed, OwnerFenced, PenstockError, condition_of
from penstock.store.records.catalog import QueueGrown

log = logging.getLogger("penstock.continuous")

_RESTARTS = 5
_BACK_OFF = 0.1
_LONGEST_BACK_OFF = 10.0
_FINISH_SECONDS = 60.0
_FINISHING_SECONDS = 0.02
"""Between two attempts to begin the last epoch."""
_JOB_FAILURE_SECONDS = 2.0
_LISTENER_SECONDS = 2.0
_IDLE_SECONDS = 5.0
"""Between two checks of the source while nothing is committed."""


class State(Enum):
    """The state of a query (as in Spark's ContinuousExecution)."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    RECONFIGURING = "RECONFIGURING"
    TERMINATED = "TERMINATED"


@dataclass(frozen=True)
class Settings:
    """Settings of a query.

    Parameters
    ----------
    interval
        Seconds between the ends of two epochs.
    retain
        How many epochs the checkpoint keeps.
    backlog
        How many epochs may be in flight.
    start_timeout
        Seconds within which all tasks have to connect.
    """

    interval: float
    retain: int = 100
    backlog: int = 10_000
    start_timeout: float = 60.0


class ContinuousExecution:
    """The driver side of a query, and the thread that runs it.

    Parameters
    ----------
    name
        The query's name.
    clock
        Returns seconds, from any starting point.
    """

    def __init__(
        self,
        name: str | None,
        source: SourceDriver,
        sink: SinkDriver,
        engine: Engine,
        logs: CheckpointLog,
        settings: Settings,
        *,
        limit: Limit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.id, self.run_id = name, logs.query_id, str(uuid.uuid4())
        self._source, self._sink, self._engine, self._logs = source, sink, engine, logs
        self._settings, self._clock, self._limit = settings, clock, limit
        self.progress = Progress(self.id, self.run_id, name, clock, source.description, sink.description)
        self.listeners = ListenerDispatch(self.called, None)
        """Who gets events of the query; set before it starts."""
        self.clean_up: Callable[[], None] = lambda: None
        """Called at its end, unless it has failed; set before it starts."""
        self.ending: str | None = None
        """Why it has ended on its own, if it has."""
        self._changed = threading.Condition()
        self._state = State.INITIALIZING
        self._failure: Exception | None = None
        self._stopping = self._started = False
        self._coordinator: EpochCoordinator | None = None
        self._epoch = -1
        """The last committed epoch."""
        self._at: Positions = {}
        self._offset: Any = None
        self._passed = 0
        """Rows of committed epochs, which count towards the limit."""
        self._next: Run | None = None
        """The next run, with another batch size, planned while the current one is still active."""
        self._logging = -1
        """The last epoch that this driver has committed to the sink and is logging."""
        self._fresh = True
        """Whether the current run has committed nothing yet."""
        self._checked_at = clock()
        """When the source was last notified of an offset."""
        self._thread = threading.Thread(target=self._run, name=f"continuous {name or self.id}", daemon=True)

    # For the query's users.

    @property
    def state(self) -> State:
        """Its state."""
        return self._state

    @property
    def failure(self) -> Exception | None:
        """What ended it, if anything did."""
        return self._failure

    def start(self) -> None:
        """Start, and return when the first run is active or the query has ended."""
        log.info("query %s starts", self.called, extra={"action": "query_started", **self._fields})
        self.listeners.started(self.name, timestamp())
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._state is State.TERMINATED)

    def stop(self, timeout: float = _FINISH_SECONDS) -> bool:
        """Finish the epoch in flight, then end; return whether it was finished."""
        self._stopping = True
        self._wake()
        self._thread.join(timeout)
        if self._thread.is_alive():
            coordinator = self._coordinator
            if coordinator is not None:
                coordinator.close()
            self._thread.join(timeout)
            return False
        return self._failure is None

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; return whether it has ended in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def await_epoch(self, number: int, timeout: float | None = None) -> bool:
        """Wait until an epoch is committed or the query has ended; return whether the epoch is committed."""
        with self._changed:
            self._changed.wait_for(lambda: self._epoch >= number or self._state is State.TERMINATED, timeout)
        return self._epoch >= number

    def await_offsets(self, reached: Callable[[Positions], bool]) -> None:
        """Wait until the committed offsets fulfil a condition."""
        with self._changed:
            self._changed.wait_for(lambda: reached(self._at) or self._state is State.TERMINATED)

    # In its thread.

    def _run(self) -> None:
        try:
            self._runs()
        except Exception as error:
            log.error(
                "query %s failed: %s",
                self.called,
                error,
                extra={"action": "query_failed", **self._fields, "error": condition_of(error)},
            )
            self._failure = error
        finally:
            self._ended()

    @property
    def called(self) -> str:
        """What log records call it."""
        return f"{self.name or 'without a name'} [id = {self.id}, runId = {self.run_id}]"

    @property
    def _fields(self) -> dict[str, str | None]:
        """Fields of its log records."""
        return {"query": self.name, "query_id": self.id, "run_id": self.run_id}

    def _ended(self) -> None:
        self._drop_next()
        try:
            self._source.release(self._offset)
        except Exception as error:
            log.warning(
                "query %s: its source could not be released: %s",
                self.called,
                error,
                extra={"action": "release_failed", **self._fields, "error": condition_of(error)},
            )
        if self._failure is None:
            self.clean_up()
        with self._changed:
            self._state = State.TERMINATED
            self._changed.notify_all()
        self.listeners.terminated(self._failure, _LISTENER_SECONDS)
        log.info("Query %s was stopped", self.called, extra={"action": "query_ended", **self._fields})

    def _runs(self) -> None:
        failures = 0
        while not self._stopping:
            self._fresh = True
            try:
                self._one_run()
            except Exception as error:
                failures = 1 if not self._fresh else failures + 1
                self._drop_next()
                # A query that does not even start fails: its user has to act.
                if not self._started or not _may_be_repeated(error) or failures > _RESTARTS:
                    raise
                if self._stops_short(error):
                    return
                log.warning(
                    "query %s restarts after epoch %s: %s",
                    self.called,
                    self._epoch,
                    error,
                    extra={
                        "action": "restart",
                        **self._fields,
                        "epoch": self._epoch,
                        "failures": failures,
                        "error": condition_of(error),
                    },
                )
                with self._changed:
                    wait = min(_BACK_OFF * 2**failures, _LONGEST_BACK_OFF)
                    self._changed.wait_for(lambda: self._stopping, wait)

    def _stops_short(self, error: Exception) -> bool:
        """Return whether the query is being stopped, so that its next start repeats what has failed."""
        if self._stopping:
            log.warning(
                "query %s stops after epoch %s, and its next start repeats the rest: %s",
                self.called,
                self._epoch,
                error,
                extra={
                    "action": "stopped_short",
                    **self._fields,
                    "epoch": self._epoch,
                    "error": condition_of(error),
                },
            )
        return self._stopping

    def _one_run(self) -> None:
        self.progress.run_started()
        self._source.own()
        self._settle()
        self._sink.clear()
        if self._end_by_limit():
            return
        run = self._next_run()
        job, coordinator = run.job, run.coordinator
        self._coordinator = coordinator
        if self._limit is not None:
            coordinator.quota = Quota(self._limit.rows - self._passed)
        try:
            job.start()
            coordinator.await_tasks(self._settings.start_timeout, job.alive)
            coordinator.assign(self._epoch + 1, partitions_by_task(self._at, run.tasks))
            self._become(State.ACTIVE)
            self.progress.tasks_connected()
            self._epochs(run)
            if not job.join(_FINISH_SECONDS):
                raise ContinuousFailed("the tasks of the query did not end")
        except ContinuousFailed as error:
            # A task's own failure says more than its broken connection; Spark does not notice the latter in
            # an idle task.
            job.join(_JOB_FAILURE_SECONDS)
            raise job.failure() or error from None
        finally:
            run.end(_FINISH_SECONDS)
            self._coordinator = None

    def _next_run(self) -> Run:
        """Return the run that was planned during the last one if it still fits, else a new one."""
        run, tasks = self._next, self._engine.tasks(len(self._at))
        if run is None or run.tasks != tasks:
            self._drop_next()
            return self._plan_run(tasks, large_batches=self._has_backlog(tasks))
        self._next = None
        return run

    def _has_backlog(self, tasks: int) -> bool:
        """Return whether a task is so far behind that throughput counts more than latency."""
        ends = self._source.ends()
        return any(
            sum(ends.get(partition, at) - at for partition, at in group.items()) >= BEHIND_ROWS
            for group in partitions_by_task(self._at, tasks)
        )

    def _plan_run(self, tasks: int, *, large_batches: bool) -> Run:
        return Run.plan(
            self._engine,
            tasks,
            self._sink.writers(),
            self._settings.backlog,
            large_batches=large_batches,
            limited=self._limit is not None,
        )

    def _drop_next(self) -> None:
        run, self._next = self._next, None
        if run is not None:
            run.coordinator.close()

    def _become(self, state: State) -> None:
        with self._changed:
            self._state, self._started = state, True
            self._changed.notify_all()

    def _settle(self) -> None:
        """Find out where the last run has ended.

        An epoch that it began is in the sink as a whole or not at all.
        """
        if self._started:
            self._require_own_checkpoint()
        last = recover(self._logs, self._sink, self._source.follow, limited=self._limit is not None)
        self._offset = None if last is None else self._logs.offset(last)
        self._epoch = -1 if last is None else last
        if self._limit is not None:
            self._passed = self._logs.passed(last)
        self._at = self._source.start(self._offset)
        if self._offset is not None:
            self._source.logged(self._offset)

    def _require_own_checkpoint(self) -> None:
        """Refuse to repeat a run after another driver has committed.

        Without a consumer nothing else reveals it.
        """
        last = self._logs.last_committed()
        if last not in (None, self._epoch, self._logging):
            raise OwnerFenced(
                f"the checkpoint at {self._logs.location!r} has epochs up to {last}, and this driver has "
                f"committed {self._epoch}: another driver runs the query. Run each query once",
                condition="OWNER_FENCED.CHECKPOINT",
                checkpoint=self._logs.location,
            )

    def _epochs(self, run: Run) -> None:
        """Begin an epoch at each interval, and commit each that is complete, until the run has to end."""
        coordinator, job = run.coordinator, run.job
        next_at = self._clock() + self._settings.interval
        while not self._to_end(run):
            self._commit_next(
                run, next_at - self._clock(), lambda: self._to_end(run) or run.needs_other_batches
            )
            self._check_idle_source()
            if self._clock() >= next_at:
                coordinator.begin()
                next_at = max(next_at + self._settings.interval, self._clock())
            if run.needs_other_batches and not self._to_end(run):
                # Planned before this one ends, started after it: its tasks take over the slots and the Python
                # workers.
                self._next = self._plan_run(run.tasks, large_batches=not run.large_batches)
            if not job.alive():
                raise job.failure() or ContinuousFailed("the tasks of the query have ended on their own")
        if not (self._stopping or self._reached_limit(coordinator)):
            self._become(State.RECONFIGURING)
        self._finish(run)
        self._end_by_limit()

    def _to_end(self, run: Run) -> bool:
        """Return whether the run has to end, for good or for another one."""
        changes = run.coordinator.grown or self._next is not None
        return self._stopping or changes or self._reached_limit(run.coordinator)

    def _reached_limit(self, coordinator: EpochCoordinator) -> bool:
        """Return whether a limit that ends the query is used up."""
        return self._limit is not None and self._limit.stops and coordinator.exhausted

    def _end_by_limit(self) -> bool:
        """End the query if its limit is reached and committed; return whether it is."""
        limit = self._limit
        if limit is None or not limit.stops or self._passed < limit.rows:
            return False
        exceeded = self._passed > limit.rows
        why = f"is lower than the {self._passed:,} rows that have passed" if exceeded else "is reached"
        self.ending = f"its limit of {limit.rows:,} rows {why}"
        # A query that ends before it begins is more of a surprise.
        log.log(
            logging.INFO if self._started else logging.WARNING,
            "query %s ends: %s",
            self.called,
            self.ending,
            extra={"action": "limit_reached", **self._fields, "limit": limit.rows},
        )
        self._stopping = True
        return True

    def _finish(self, run: Run) -> None:
        """Commit a last epoch, of what has been read."""
        coordinator = run.coordinator
        coordinator.pause()
        deadline = self._clock() + _FINISH_SECONDS
        while not coordinator.settled:
            if self._clock() > deadline:
                raise ContinuousFailed(f"the epoch in flight was not finished within {_FINISH_SECONDS:.0f} s")
            coordinator.begin()
            self._commit_next(run, _FINISHING_SECONDS, lambda: coordinator.settled)
        coordinator.finish()

    def _commit_next(self, run: Run, timeout: float, until: Callable[[], bool]) -> None:
        epoch = run.coordinator.complete(timeout, until)
        if epoch is None:
            return
        self._commit(run, epoch)
        run.coordinator.committed(epoch.number)
        with self._changed:
            self._changed.notify_all()

    def _commit(self, run: Run, epoch: Epoch) -> None:
        began, end = self._clock(), {**self._at, **epoch.offsets}
        offset = self._source.plan(self._at, end)
        passed = self._passed + epoch.rows_out
        # The sink comes first: after a driver dies in between, the next one finds there what the checkpoint
        # lacks.
        self._sink.commit(run.sink, epoch, offset)
        self._logging = epoch.number
        self._logs.write_offset(epoch.number, offset, None if self._limit is None else passed)
        self._logs.write_commit(epoch.number)
        self._epoch, self._at, self._offset, self._fresh = epoch.number, end, offset, False
        self._passed = passed
        progress = self.progress.committed(epoch, offset, began, at_once=self._sink.at_once)
        self.listeners.progressed(progress)
        self._notify_source(offset)
        self._logs.prune(epoch.number, self._settings.retain)

    def _check_idle_source(self) -> None:
        """Check a source without new epochs: another query may own it, or it may ask this one to end."""
        if self._offset is not None and self._clock() - self._checked_at >= _IDLE_SECONDS:
            self._notify_source(self._offset)

    def _notify_source(self, offset: Any) -> None:
        self._checked_at = self._clock()
        if self._source.logged(offset):
            self._stopping = True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        coordinator = self._coordinator
        if coordinator is not None:
            coordinator.wake()


def _may_be_repeated(error: Exception) -> bool:
    """Return whether the next run may succeed.

    It writes to a sink that has got more partitions, and finds an epoch that another driver has committed.
    """
    if isinstance(error, ContinuousFailed | QueueGrown) or not isinstance(error, PenstockError):
        return True
    return error.condition == OTHER_INPUT
