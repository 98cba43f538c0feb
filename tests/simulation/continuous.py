"""Model of a continuous query's Spark jobs that runs the real driver, coordinator, readers and writers."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

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
from tests.simulation.machine import Machine
from tests.simulation.query import COLUMNS, Query, cast_key
from tests.simulation.scenario import ADDED_COLUMN
from tests.simulation.scheduler import Process, Signal, Task

SLOTS = 2


class ContinuousRun:
    """Run of a continuous query in a driver process."""

    def __init__(self, machine: Machine, driver: Process, query: Query, interval: float = 1.0) -> None:
        self.machine, self.world = machine, machine.world
        self.driver, self.query, self._interval = driver, query, interval
        self.executors = machine.world.start_process(f"executors of {driver}")
        self.ended = False
        self.failure: Exception | None = None
        self.execution: ContinuousExecution | None = None
        driver.on_exit.append(self.kill_executors)

    def kill_executors(self) -> None:
        """Kill the executors after their driver, either at once or a while later."""
        self.machine.reruns += not self.ended
        if self.world.choices.draw(f"x{self.driver.pid}", 2):
            self.world.call_later(5.0, self.executors.kill)
        else:
            self.executors.kill()

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.failure = error
            self.machine.reruns += 1
        finally:
            self.ended = True

    def _run(self) -> None:
        query = self.query
        source = QueueSourceDriver(query.source)
        logs = CheckpointLog(query.checkpoint)
        engine = Engine(self, source)
        sink = self._open_sink(logs.query_id())
        execution = ContinuousExecution(
            "simulated",
            source,
            sink,
            engine,
            logs,
            Settings(self._interval, start_timeout=20.0),
            clock=lambda: self.world.now,
        )
        self.execution = execution
        execution.progress.committed = lambda *args, **kwargs: {}  # type: ignore[method-assign]
        execution.start()
        execution.join()
        if execution.failure is not None:
            raise execution.failure

    def _open_sink(self, query_id: str) -> SinkDriver:
        driver = self.query.sink_driver(query_id)
        driver.check(COLUMNS)
        return driver

    @property
    def owns_consumer(self) -> bool:
        """Whether the driver has taken the consumer over."""
        execution = self.execution
        return execution is not None and (execution.coordinator or execution.job) is not None

    @property
    def busy(self) -> bool:
        """Whether an epoch is in flight."""
        if self.ended or self.execution is None:
            return False
        coordinator = self.execution.coordinator
        return self.execution.job is not None or (coordinator is not None and not coordinator.epochs.idle)

    def is_caught_up(self, ends: list[int]) -> bool:
        """Return whether the query has committed all rows up to these ends of the source's partitions."""
        if self.ended:
            return self.failure is None
        execution = self.execution
        coordinator = None if execution is None else execution.coordinator
        if coordinator is None or execution is None or not coordinator.epochs.idle:
            return False
        positions = execution.committed.positions
        return all(positions.get(partition, 0) >= end for partition, end in enumerate(ends))

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the query in the driver's process, as a user does."""
        execution, stopped = self.execution, Signal()

        def work() -> None:
            if execution is not None:
                execution.stop(timeout)
            stopped.notify_all()

        if self.driver.alive and not self.ended:
            self.driver.spawn(work, "stop")
            self.world.wait(stopped, seconds=timeout + 10.0)
        self.driver.kill()


class Engine:
    """Engine that runs the tasks of its jobs in the simulated executors."""

    slots = SLOTS

    def __init__(self, run: ContinuousRun, source: QueueSourceDriver) -> None:
        self.run, self.source = run, source

    def coordinator(self, epochs: Epochs) -> EpochCoordinator:
        return EpochCoordinator(DriverNetwork("driver", "driver"), epochs)

    def tasks(self, partitions: int) -> int:
        return min(partitions, SLOTS)

    def job(self, coordinator: EpochCoordinator, tasks: int, sink: WriterFactory, *, limited: bool) -> Job:
        self._ensure_executors()
        return RunJob(self, coordinator, tasks, sink)

    def catch_up_job(self, backlogs: Sequence[Backlog], sink: WriterFactory, epoch: int) -> Job:
        self._ensure_executors()
        return CatchUpJob(self, backlogs, sink, epoch)

    def _ensure_executors(self) -> None:
        """Start new executors if they have died."""
        run = self.run
        if not run.executors.alive:
            run.machine.reruns += 1
            run.executors = run.world.start_process(f"executors of {run.driver}")


class Job(ABC):
    """Spark job that ends when all of its tasks have ended."""

    def __init__(self, engine: Engine, tasks: int, sink: WriterFactory) -> None:
        self._run, self._source = engine.run, engine.source.reader_factory()
        self._executors = self._run.executors
        self._sink = sink
        self._failure: Exception | None = None
        self._task_count, self._running_tasks = tasks, 0
        self._cancelled = False
        self._task_ended = Signal()
        self._tasks: list[Task] = []

    def start(self) -> None:
        self._running_tasks = self._task_count
        for number in range(self._task_count):
            task = self._executors.spawn(lambda number=number: self._run_task(number), f"task {number}")
            task.spark_properties = {"task": number, "spark.master": "local[2]"}
            self._tasks.append(task)

    def _run_task(self, number: int) -> None:
        try:
            self._work(number)
        except Exception as error:
            self._failure = self._failure or error
            self._run.machine.reruns += 1
        self._running_tasks -= 1
        self._task_ended.notify_all()

    @abstractmethod
    def _work(self, number: int) -> None: ...

    def _apply_query(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Select the columns of the query, and keep the metadata columns of the engine."""
        for batch in batches:
            added = [name for name in batch.schema.names if name == ADDED_COLUMN]
            selected = cast_key(batch.drop_columns(added))
            if not isinstance(self._run.query.sink, TableSink):
                yield selected
                continue
            names = [
                f"c{index}" if name in ("id", "key") else name
                for index, name in enumerate(selected.schema.names)
            ]
            yield selected.rename_columns(names)

    def alive(self) -> bool:
        return self._running_tasks > 0 and self._executors.alive

    def join(self, timeout: float) -> bool:
        world = self._run.world
        deadline = world.now + timeout
        while self.alive() and world.now < deadline and self._tasks:
            world.wait(self._task_ended, seconds=min(1.0, deadline - world.now))
        return not self.alive()

    def cancel(self) -> None:
        """Kill the Python workers of the job's tasks."""
        if self._running_tasks <= 0 or self._cancelled:
            return
        self._run.machine.reruns += 1
        self._cancelled = True
        self._run.machine.kill_tasks([task for task in self._tasks if not task.done])
        self._running_tasks = 0

    def failure(self) -> Exception | None:
        return self._failure


class RunJob(Job):
    """Job that reads and writes continuously."""

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
            read_loop = ReadLoop(source, reader, epoch, 2)
            sink = self._sink.open(number)
            try:
                WriteLoop(sink, writer).write_all([batch] for batch in self._apply_query(read_loop.batches()))
            except Exception as error:
                with contextlib.suppress(ContinuousFailedError):
                    writer.send("failed", error=str(error))
                raise
            writer.send("done")
        finally:
            for channel in (reader, writer):
                if channel is not None:
                    channel.close()


class CatchUpJob(Job):
    """Job that reads a backlog as one epoch, and retries each failed task once."""

    def __init__(self, engine: Engine, backlogs: Sequence[Backlog], sink: WriterFactory, epoch: int) -> None:
        super().__init__(engine, len(backlogs), sink)
        self._backlogs, self._epoch = backlogs, epoch
        self._task_parts: list[TaskPart] = []

    def _work(self, number: int) -> None:
        try:
            self._attempt(number)
        except Exception:
            self._run.machine.reruns += 1
            self._attempt(number)

    def _attempt(self, number: int) -> None:
        backlog = self._backlogs[number]
        reader = BacklogReader(self._source.open(backlog.positions), backlog.rows, 5.0)
        batches = ([batch] for batch in self._apply_query(reader.batches()))
        written = write_backlog(self._sink.open(number), self._epoch, batches)
        self._task_parts.append(TaskPart.from_reports(reader.report(), written))

    def failure(self) -> Exception | None:
        """Return the failure of a task, or an error if the executors died before all tasks ended."""
        return super().failure() or (RuntimeError("lost") if self._running_tasks > 0 else None)

    def epoch(self) -> Epoch:
        return epoch_of(self._epoch, self._task_parts)
