"""Runs whose tasks are threads of this process, with real connections to the coordinator, without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.continuous.channel import READER, WRITER
from penstock.continuous.connectors.protocol import Positions, SourceDriver, WriterFactory
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs
from penstock.continuous.tasks import ReadLoop, WriteLoop, await_start
from penstock.spark.driver_endpoint import LOOPBACK, DriverNetwork

Transform = Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass
class LocalEngine:
    """Engine with as many tasks as partitions, unless there are fewer slots."""

    source: SourceDriver
    transform: Transform = lambda batch: batch
    slots: int = 8
    jobs: list[LocalJob] = field(default_factory=list)

    def coordinator(self, epochs: Epochs) -> EpochCoordinator:
        return EpochCoordinator(DriverNetwork(LOOPBACK, LOOPBACK), epochs)

    def tasks(self, partitions: int) -> int:
        return min(partitions, self.slots)

    def job(
        self,
        coordinator: EpochCoordinator,
        tasks: int,
        sink: WriterFactory,
        *,
        large_batches: bool,
        limited: bool,
    ) -> LocalJob:
        self.jobs.append(LocalJob(self, coordinator, tasks, sink, large_batches, limited))
        return self.jobs[-1]


class LocalJob:
    def __init__(
        self,
        engine: LocalEngine,
        coordinator: EpochCoordinator,
        tasks: int,
        sink: WriterFactory,
        large_batches: bool,
        limited: bool,
    ) -> None:
        self._sink, self.large_batches, self._limited = sink, large_batches, limited
        self._engine, self._address = engine, coordinator.address
        self.groups: list[Positions] = [{}] * tasks
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        source, sink = self._engine.source.readers(), self._sink
        for task in range(len(self.groups)):
            thread = threading.Thread(target=self._task, args=[source, sink, task], daemon=True)
            self._threads.append(thread)
            thread.start()

    def _task(self, source: Any, sink: Any, task: int) -> None:
        try:
            reader, writer = self._address.open(READER, task), self._address.open(WRITER, task)
        except Exception as error:
            self._failure = self._failure or error
            return
        try:
            epoch, self.groups[task] = await_start(reader)
            with closing(source.open(self.groups[task])) as rows, closing(sink.open(task)) as writes:
                reading = ReadLoop(rows, reader, epoch, 2, large_batches=self.large_batches)
                WriteLoop(writes, writer, limited=self._limited).all(
                    [batch] for batch in self._transformed(reading.batches())
                )
            writer.send("done")
        except Exception as error:
            self._failure = self._failure or error
        finally:
            reader.close()
            writer.close()

    def _transformed(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(self._engine.transform, batches)

    def alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout: float) -> bool:
        for thread in self._threads:
            thread.join(timeout)
        return not self.alive()

    def cancel(self) -> None:
        """Do nothing: the coordinator closes the connections."""

    def failure(self) -> Exception | None:
        return self._failure
