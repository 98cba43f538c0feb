"""The Spark jobs of a continuous query: its plan, session and task slots.

A run is an endless job; a coordinator sends its tasks the offsets to begin at and the ends of epochs. A job
that catches up reads a backlog as one epoch, and ends.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from pyspark import Accumulator, InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.continuous.catch_up import SECONDS, WRITTEN, Backlog, CatchUpReader, CatchUpWriter, Reports
from penstock.continuous.channel import HIDDEN, CoordinatorAddress
from penstock.continuous.connectors.protocol import Epoch, Positions, SourceDriver, WriterFactory
from penstock.continuous.dataframe import ContinuousFrame, begin_frame, transformed
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs, TaskPart, epoch_of
from penstock.continuous.plan_check import BATCH_ROWS, check_plan
from penstock.continuous.tasks import REPORT, ReadTask, WriteTask
from penstock.errors import ContinuousFailedError
from penstock.spark.driver_endpoint import driver_network
from penstock.spark.internals.sessions import clone_session, task_slots
from penstock.spark.schemas import to_struct
from penstock.spark.session import PIPELINED

log = logging.getLogger("penstock.continuous")


@dataclass
class Run:
    """A run whose job is planned, and possibly started."""

    coordinator: EpochCoordinator
    job: SparkJob
    sink: WriterFactory
    """The factory of the writers in its tasks."""


def partitions_by_task(positions: Positions, tasks: int) -> Sequence[Positions]:
    partitions = sorted(positions)
    return [{p: positions[p] for p in partitions[task::tasks]} for task in range(tasks)]


_SETTINGS = {
    # The list of supported operators does not include those of adaptive plans.
    "spark.sql.adaptive.enabled": "false",
    # With the largest value, Spark counts the rows of a batch for Python instead of measuring each row.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
}
_FOR_LATENCY = {
    # Send data to a Python worker immediately, in small batches.
    "spark.sql.execution.pandas.udf.buffer.size": "64",
    "spark.sql.execution.python.udf.buffer.size": "64",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS),
    "spark.sql.execution.python.udf.maxRecordsPerBatch": str(BATCH_ROWS),
}

ContinuousTransform = Callable[[ContinuousFrame], ContinuousFrame]


class SparkEngine:
    """Factory of the coordinators and Spark jobs of a query's runs, in copies of the user's session."""

    def __init__(
        self,
        spark: SparkSession,
        source: SourceDriver,
        transforms: Sequence[ContinuousTransform],
        called: str,
    ) -> None:
        self._spark, self._source, self._transforms, self._called = spark, source, transforms, called
        self._reports: Accumulator[list[str]] | None = None
        """The reports of readers in jobs that catch up."""
        nowhere = CoordinatorAddress("", 0, b"")
        frame = self._frame(ReadTask(source.readers(), 1, nowhere, 0), {})
        self._plan = check_plan(frame.carried)
        self._plan.require_pipelined(spark.conf.get(PIPELINED, "false") == "true", spark.version)
        self.schema: StructType = frame.schema
        for note in self._plan.notes:
            log.warning(
                "query %s has slow Python stages: %s",
                called,
                note,
                extra={"action": "python_stages", "query": called},
            )

    def coordinator(self, epochs: Epochs) -> EpochCoordinator:
        return EpochCoordinator(driver_network(self._spark), epochs)

    def tasks(self, partitions: int) -> int:
        """Return how many tasks read ``partitions``; if there are several task slots, one is left free."""
        return min(partitions, max(self.slots - 1, 1))

    @property
    def slots(self) -> int:
        """The task slots of the application."""
        slots = task_slots(self._spark)
        if not slots:
            raise ContinuousFailedError(
                "the application has no task slot for the query: give it executors",
                condition="CONTINUOUS_FAILED.NO_SLOTS",
            )
        return slots

    def job(
        self, coordinator: EpochCoordinator, tasks: int, sink: WriterFactory, *, limited: bool
    ) -> SparkJob:
        read = ReadTask(self._source.readers(), tasks, coordinator.address, self._plan.filler_rows)
        frame = sink.shaped(self._frame(read, _FOR_LATENCY))
        write = WriteTask(sink, coordinator.address, limited)
        return SparkJob(frame.carried.mapInArrow(write, REPORT), self._called)

    def catch_up_job(self, backlogs: Sequence[Backlog], sink: WriterFactory, epoch: int) -> CatchUpJob:
        """Return the job of an epoch in which each task reads one of the backlogs."""
        session, source = self._session({}), self._source.readers()
        if self._reports is None:
            self._reports = session.sparkContext.accumulator([], Reports())
        number, tasks = str(uuid.uuid4()), len(backlogs)
        read = CatchUpReader(source, backlogs, SECONDS, number, self._reports)
        frame = session.range(0, tasks, 1, tasks).mapInArrow(read, to_struct(source.schema))
        # With micro-batches, the same functions get a DataFrame.
        for function in self._transforms:
            frame = cast(DataFrame, function(cast(ContinuousFrame, frame)))
        frame = cast(DataFrame, sink.shaped(cast(ContinuousFrame, frame)))
        write = CatchUpWriter(sink, epoch)
        return CatchUpJob(frame.mapInArrow(write, WRITTEN), self._called, self._reports, number, epoch)

    def _frame(self, read: ReadTask, settings: Mapping[str, str]) -> ContinuousFrame:
        """Return the transformed rows of a reader, in a separate session."""
        schema = StructType([*to_struct(read.source.schema), *to_struct(HIDDEN)])
        readers = self._session(settings).range(0, read.tasks, 1, read.tasks)
        frame = begin_frame(readers.mapInArrow(read, schema, barrier=True))
        for function in self._transforms:
            frame = transformed(frame, function)
        return frame

    def _session(self, settings: Mapping[str, str]) -> SparkSession:
        session = clone_session(self._spark)
        for key, value in {**_SETTINGS, **settings}.items():
            session.conf.set(key, value)
        return session


class SparkJob:
    """A Spark job of a query; the job of a run ends when its readers end."""

    def __init__(self, frame: DataFrame, called: str) -> None:
        self._frame, self._called = frame, called
        self._group = f"penstock-{uuid.uuid4()}"
        self._failure: Exception | None = None
        self._ended = threading.Event()
        # In pinned thread mode a job's settings are local to its thread.
        self._thread = InheritableThread(target=self._run, name="continuous job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            context = self._frame.sparkSession.sparkContext
            context.setJobGroup(self._group, self._called, interruptOnCancel=True)
            self._execute(self._frame)
        except Exception as error:
            self._failure = error
        finally:
            self._ended.set()

    def _execute(self, frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float) -> bool:
        return self._ended.wait(timeout)

    def cancel(self) -> None:
        if self.alive():
            with suppress(Exception):
                self._frame.sparkSession.sparkContext.cancelJobGroup(self._group)

    def failure(self) -> Exception | None:
        return self._failure


class CatchUpJob(SparkJob):
    """The Spark job that reads a backlog as one epoch."""

    def __init__(
        self, frame: DataFrame, called: str, reports: Accumulator[list[str]], number: str, epoch: int
    ) -> None:
        super().__init__(frame, called)
        self._reports, self._number, self._epoch = reports, number, epoch
        self._parts: list[TaskPart] = []

    def _execute(self, frame: DataFrame) -> None:
        self._reports.value = []
        written = {task: json.loads(report) for task, report in frame.collect()}
        for report in map(json.loads, self._reports.value):
            # Tasks of an earlier job may have ended late.
            if report["job"] == self._number:
                self._parts.append(TaskPart.of(report, written.pop(report["task"])))
        if written:
            raise ContinuousFailedError(
                f"{len(written)} tasks of the query have not reported what they have read: it restarts after "
                "its last committed epoch",
                condition="CONTINUOUS_FAILED.PROTOCOL",
            )

    def epoch(self) -> Epoch:
        """Return the epoch of a job that has succeeded."""
        return epoch_of(self._epoch, self._parts)
