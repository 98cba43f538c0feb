"""Engine whose tasks are threads of this process with real connections to the coordinator, without Spark."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.continuous.catch_up import Backlog, BacklogReader, write_backlog
from penstock.continuous.channel import READER, WRITER
from penstock.continuous.connectors.protocol import Epoch, Positions, SourceDriver, WriterFactory
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs, TaskPart, epoch_of
from penstock.continuous.tasks import ReadLoop, WriteLoop, await_start
from penstock.spark.driver_endpoint import LOOPBACK, DriverNetwork

Transform = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass
class LocalEngine:
    """Engine with one task for each partition, up to the number of slots."""

    source: SourceDriver
    transform: Transform = lambda batch: batch
    slots: int = 8
    jobs: list[LocalJob] = field(default_factory=list)

    def coordinator(self, epochs: Epochs) -> EpochCoordinator:
        return EpochCoordinator(DriverNetwork(LOOPBACK, LOOPBACK), epochs)

    def tasks(self, partitions: int) -> int:
        return min(partitions, self.slots)

    def job(
        self, coordinator: EpochCoordinator, tasks: int, sink: WriterFactory, *, limited: bool
    ) -> LocalJob:
        job = RunJob(self, coordinator, tasks, sink, limited)
        self.jobs.append(job)
        return job

    def catch_up_job(self, backlogs: Sequence[Backlog], sink: WriterFactory, epoch: int) -> LocalCatchUp:
        job = LocalCatchUp(self, backlogs, sink, epoch)
        self.jobs.append(job)
        return job


class LocalJob(ABC):
    """Job whose tasks run in threads."""

    catches_up = False

    def __init__(self, engine: LocalEngine, groups: Sequence[Positions], sink: WriterFactory) -> None:
        self._engine, self._sink = engine, sink
        self.groups = list(groups)
        """The partitions and positions that each task reads."""
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        source, sink = self._engine.source.reader_factory(), self._sink
        for task in range(len(self.groups)):
            thread = threading.Thread(target=self._run_task, args=[source, sink, task], daemon=True)
            self._threads.append(thread)
            thread.start()

    @abstractmethod
    def _run_task(self, source: Any, sink: Any, task: int) -> None: ...

    def _transform(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(self._engine.transform, batches)

    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout: float) -> bool:
        for thread in self._threads:
            thread.join(timeout)
        return not self.alive()

    def cancel(self) -> None:  # noqa: B027 - intentionally does nothing
        """Do nothing: the coordinator closes the connections, and a catch-up job ends by itself."""

    def failure(self) -> Exception | None:
        return self._failure


class RunJob(LocalJob):
    """Job of a run, which lasts until the query stops."""

    def __init__(
        self,
        engine: LocalEngine,
        coordinator: EpochCoordinator,
        tasks: int,
        sink: WriterFactory,
        limited: bool,
    ) -> None:
        super().__init__(engine, [{}] * tasks, sink)
        self._limited, self._address = limited, coordinator.address

    def _run_task(self, source: Any, sink: Any, task: int) -> None:
        try:
            reader, writer = self._address.open(READER, task), self._address.open(WRITER, task)
        except Exception as error:
            self._failure = self._failure or error
            return
        try:
            epoch, self.groups[task] = await_start(reader)
            with closing(source.open(self.groups[task])) as rows, closing(sink.open(task)) as writes:
                reading = ReadLoop(rows, reader, epoch, 2)
                WriteLoop(writes, writer, limited=self._limited).write_all(
                    [batch] for batch in self._transform(reading.batches())
                )
            writer.send("done")
        except Exception as error:
            self._failure = self._failure or error
        finally:
            reader.close()
            writer.close()


class LocalCatchUp(LocalJob):
    """Job that reads a backlog as one epoch and ends."""

    catches_up = True

    def __init__(
        self, engine: LocalEngine, backlogs: Sequence[Backlog], sink: WriterFactory, epoch: int
    ) -> None:
        super().__init__(engine, [backlog.positions for backlog in backlogs], sink)
        self._backlogs, self._epoch = backlogs, epoch
        self._parts: list[TaskPart] = []

    def _run_task(self, source: Any, sink: Any, task: int) -> None:
        backlog = self._backlogs[task]
        try:
            with closing(source.open(backlog.positions)) as rows, closing(sink.open(task)) as writes:
                reader = BacklogReader(rows, backlog.rows, 60.0)
                written = write_backlog(
                    writes, self._epoch, ([batch] for batch in self._transform(reader.batches()))
                )
                self._parts.append(TaskPart.from_reports(reader.report(), written))
        except Exception as error:
            self._failure = self._failure or error

    def epoch(self) -> Epoch:
        return epoch_of(self._epoch, self._parts)
