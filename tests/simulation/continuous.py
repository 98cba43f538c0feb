"""A continuous query's Spark job, around the real driver, coordinator, readers and writers."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.continuous.catch_up import Backlog, BacklogReader, write_backlog
from penstock.continuous.channel import READER, WRITER
from penstock.continuous.connectors.protocol import Epoch, SinkDriver, WriterFactory
from penstock.continuous.connectors.queue import QueueSourceDriver
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs, TaskPart, epoch_of
from penstock.continuous.driver.execution import ContinuousExecution, Settings
from penstock.continuous.tasks import ReadLoop, WriteLoop, await_start
from penstock.errors import ContinuousFailedError
from penstock.spark.driver_endpoint import DriverNetwork
from penstock.tables.sink import TableSink
from tests.simulation.micro_batch import COLUMNS, Plan, as_selected
from tests.simulation.scenario import ADDED
from tests.simulation.scheduler import Gate, Process
from tests.simulation.virtual import Machine

SLOTS = 2


class ContinuousRun:
    """One run of the engine: begun in a driver process."""

    def __init__(self, machine: Machine, driver: Process, plan: Plan, interval: float = 1.0) -> None:
        self._machine, self._world = machine, machine.world
        self.driver, self.plan, self._interval = driver, plan, interval
        self.executors = machine.world.start(f"executors of {driver}")
        self.ended = False
        self.failure: Exception | None = None
        self.execution: ContinuousExecution | None = None
        driver.at_death.append(self.executors_die)

    def executors_die(self) -> None:
        """A while after their driver, as a choice; what they have begun goes on until then."""
        self._machine.repeats += not self.ended
        if self._world.choices.draw(f"x{self.driver.pid}", 2):
            self._world.later(5.0, self.executors.kill)
        else:
            self.executors.kill()

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.failure = error
            self._machine.repeats += 1
        finally:
            self.ended = True

    def _run(self) -> None:
        plan = self.plan
        source = QueueSourceDriver(plan.source)
        logs = CheckpointLog(plan.checkpoint)
        engine = Engine(self, source)
        sink = self._sink(logs.query_id())
        execution = ContinuousExecution(
            "simulated",
            source,
            sink,
            engine,
            logs,
            Settings(self._interval, start_timeout=20.0),
            clock=lambda: self._world.now,
        )
        self.execution = execution
        execution.progress.committed = lambda *given, **named: {}  # type: ignore[method-assign]
        execution.start()
        execution.join()
        if execution.failure is not None:
            raise execution.failure

    def _sink(self, query_id: str) -> SinkDriver:
        driver = self.plan.driver(query_id)
        driver.check(COLUMNS)
        return driver

    @property
    def owned(self) -> bool:
        """Whether it has taken its consumer over."""
        execution = self.execution
        return execution is not None and (execution.coordinator or execution.job) is not None

    @property
    def busy(self) -> bool:
        """Whether an epoch is open."""
        if self.ended or self.execution is None:
            return False
        coordinator = self.execution.coordinator
        return self.execution.job is not None or (coordinator is not None and not coordinator.epochs.idle)

    def at_rest(self, ends: list[int]) -> bool:
        """Whether everything that is there is committed."""
        if self.ended:
            return self.failure is None
        execution = self.execution
        coordinator = None if execution is None else execution.coordinator
        if coordinator is None or execution is None or not coordinator.epochs.idle:
            return False
        return all(execution.committed.positions.get(part, 0) >= end for part, end in enumerate(ends))

    def stop(self, timeout: float = 30.0) -> None:
        """As its user's ``stop`` does it, in a thread of the driver's."""
        execution, ended = self.execution, Gate()

        def work() -> None:
            if execution is not None:
                execution.stop(timeout)
            ended.open()

        if self.driver.alive and not self.ended:
            self.driver.spawn(work, "stop")
            self._world.wait(ended, seconds=timeout + 10.0)
        self.driver.kill()


class Engine:
    """Tasks are simulated ones of the executors' process."""

    slots = SLOTS

    def __init__(self, run: ContinuousRun, source: QueueSourceDriver) -> None:
        self.owner, self.source = run, source

    def coordinator(self, epochs: Epochs) -> EpochCoordinator:
        return EpochCoordinator(DriverNetwork("driver", "driver"), epochs)

    def tasks(self, partitions: int) -> int:
        return min(partitions, SLOTS)

    def job(self, coordinator: EpochCoordinator, tasks: int, sink: WriterFactory, *, limited: bool) -> Job:
        self._need_executors()
        return RunJob(self, coordinator, tasks, sink)

    def catch_up_job(self, backlogs: Sequence[Backlog], sink: WriterFactory, epoch: int) -> Job:
        self._need_executors()
        return CatchUpJob(self, backlogs, sink, epoch)

    def _need_executors(self) -> None:
        run = self.owner
        if not run.executors.alive:
            run._machine.repeats += 1
            run.executors = run._world.start(f"executors of {run.driver}")


class Job(ABC):
    """A Spark job that ends when its tasks do."""

    def __init__(self, engine: Engine, tasks: int, sink: WriterFactory) -> None:
        self._run, self._source = engine.owner, engine.source.reader_factory()
        self._executors = self._run.executors
        self._tasks, self._sink = tasks, sink
        self._failure: Exception | None = None
        self._left = 0
        self._cancelled = False
        self._changed = Gate()
        self._started: list[Any] = []

    def start(self) -> None:
        self._left = self._tasks
        for number in range(self._tasks):
            task = self._executors.spawn(lambda number=number: self._task(number), f"task {number}")
            task.local = {"task": number, "spark.master": "local[2]"}
            self._started.append(task)

    def _task(self, number: int) -> None:
        try:
            self._work(number)
        except Exception as error:
            self._failure = self._failure or error
            self._run._machine.repeats += 1
        self._left -= 1
        self._changed.open()

    @abstractmethod
    def _work(self, number: int) -> None: ...

    def _transformed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for each in batches:
            # The columns that the query selects, and the engine's own.
            batch = as_selected(each.drop_columns([name for name in each.schema.names if name == ADDED]))
            if not isinstance(self._run.plan.sink, TableSink):
                yield batch
                continue
            names = [
                f"c{place}" if name in ("id", "key") else name
                for place, name in enumerate(batch.schema.names)
            ]
            yield batch.rename_columns(names)

    def alive(self) -> bool:
        return self._left > 0 and self._executors.alive

    def join(self, timeout: float) -> bool:
        world = self._run._world
        deadline = world.now + timeout
        while self.alive() and world.now < deadline and self._started:
            world.wait(self._changed, seconds=min(1.0, deadline - world.now))
        return not self.alive()

    def cancel(self) -> None:
        """Spark ends the Python workers of its tasks; one that stands still may wake later."""
        if self._left <= 0 or self._cancelled:
            return
        self._run._machine.repeats += 1
        self._cancelled = True
        self._run._machine.kill_tasks([task for task in self._started if not task.done])
        self._left = 0

    def failure(self) -> Exception | None:
        return self._failure


class RunJob(Job):
    """The job of a run."""

    def __init__(
        self, engine: Engine, coordinator: EpochCoordinator, tasks: int, sink: WriterFactory
    ) -> None:
        super().__init__(engine, tasks, sink)
        self._address = coordinator.address

    def _work(self, number: int) -> None:
        reader = writer = None
        try:
            reader = self._address.open(READER, number)
            writer = self._address.open(WRITER, number)
            epoch, positions = await_start(reader)
            source = self._source.open(positions)
            reading = ReadLoop(source, reader, epoch, 2)
            sink = self._sink.open(number)
            try:
                WriteLoop(sink, writer).write_all([batch] for batch in self._transformed(reading.batches()))
            except Exception as error:
                with contextlib.suppress(ContinuousFailedError):
                    writer.send("failed", error=str(error))
                raise
            writer.send("done")
        finally:
            for link in (reader, writer):
                if link is not None:
                    link.close()


class CatchUpJob(Job):
    """The job that reads a backlog as one epoch; a task that fails is repeated once, as Spark does it."""

    def __init__(self, engine: Engine, backlogs: Sequence[Backlog], sink: WriterFactory, epoch: int) -> None:
        super().__init__(engine, len(backlogs), sink)
        self._backlogs, self._epoch = backlogs, epoch
        self._parts: list[TaskPart] = []

    def _work(self, number: int) -> None:
        try:
            self._attempt(number)
        except Exception:
            self._run._machine.repeats += 1
            self._attempt(number)

    def _attempt(self, number: int) -> None:
        backlog = self._backlogs[number]
        reader = BacklogReader(self._source.open(backlog.positions), backlog.rows, 5.0)
        batches = ([batch] for batch in self._transformed(reader.batches()))
        written = write_backlog(self._sink.open(number), self._epoch, batches)
        self._parts.append(TaskPart.from_reports(reader.report(), written))

    def failure(self) -> Exception | None:
        """With its executors, the job is lost."""
        return super().failure() or (RuntimeError("lost") if self._left > 0 else None)

    def epoch(self) -> Epoch:
        return epoch_of(self._epoch, self._parts)
