"""The Spark jobs of a continuous query: their plan, session and task slots.

A run is an endless job. A coordinator sends its tasks the offsets to start at, and the ends of epochs. A
catch-up job reads a backlog as one epoch and ends.
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

from penstock.continuous.catch_up import (
    CATCH_UP_REPORT,
    MAX_READ_SECONDS,
    Backlog,
    CatchUpReader,
    CatchUpWriter,
    ReportsParam,
)
from penstock.continuous.channel import METADATA_COLUMNS, CoordinatorAddress
from penstock.continuous.connectors.protocol import Epoch, Positions, SourceDriver, WriterFactory
from penstock.continuous.dataframe import ContinuousFrame, apply_transform, begin_frame
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs, TaskPart, epoch_of
from penstock.continuous.plan_check import BATCH_ROWS, check_plan
from penstock.continuous.tasks import WRITE_REPORT, ReadTask, WriteTask
from penstock.errors import ContinuousFailedError
from penstock.spark.driver_endpoint import driver_network
from penstock.spark.internals.sessions import clone_session, task_slots
from penstock.spark.schemas import to_struct
from penstock.spark.session import PIPELINED

log = logging.getLogger("penstock.continuous")


@dataclass
class Run:
    """A run whose job is planned and may have started."""

    coordinator: EpochCoordinator
    job: SparkJob
    writers: WriterFactory
    """The factory of the writers in the job's tasks."""


def partitions_by_task(positions: Positions, tasks: int) -> Sequence[Positions]:
    partitions = sorted(positions)
    return [
        {partition: positions[partition] for partition in partitions[task::tasks]} for task in range(tasks)
    ]


_SETTINGS = {
    # The list of supported operators has no operators of adaptive plans.
    "spark.sql.adaptive.enabled": "false",
    # With the largest value, Spark does not measure the size of each row for Python.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
}
_LOW_LATENCY_SETTINGS = {
    # Send rows to a Python worker immediately, in small batches.
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
        label: str,
    ) -> None:
        self._spark, self._source, self._transforms, self._label = spark, source, transforms, label
        self._reports: Accumulator[list[str]] | None = None
        """The reports of readers in catch-up jobs."""
        no_coordinator = CoordinatorAddress("", 0, b"")
        frame = self._frame(ReadTask(source.reader_factory(), 1, no_coordinator, 0), {})
        self._plan = check_plan(frame.full_frame)
        self._plan.require_pipelined(spark.conf.get(PIPELINED, "false") == "true", spark.version)
        self.schema: StructType = frame.schema
        for note in self._plan.latency_notes:
            log.warning(
                "query %s has slow Python stages: %s",
                label,
                note,
                extra={"action": "python_stages", "query": label},
            )

    def coordinator(self, epochs: Epochs) -> EpochCoordinator:
        return EpochCoordinator(driver_network(self._spark), epochs)

    def tasks(self, partitions: int) -> int:
        """Return how many tasks read this many partitions; one of several task slots stays free."""
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
        self, coordinator: EpochCoordinator, tasks: int, writers: WriterFactory, *, limited: bool
    ) -> SparkJob:
        read_task = ReadTask(
            self._source.reader_factory(), tasks, coordinator.address, self._plan.filler_rows
        )
        frame = writers.convert(self._frame(read_task, _LOW_LATENCY_SETTINGS))
        write_task = WriteTask(writers, coordinator.address, limited)
        return SparkJob(frame.full_frame.mapInArrow(write_task, WRITE_REPORT), self._label)

    def catch_up_job(self, backlogs: Sequence[Backlog], writers: WriterFactory, epoch: int) -> CatchUpJob:
        """Return a job in which each task reads one of the backlogs, as one epoch."""
        session, source = self._session({}), self._source.reader_factory()
        if self._reports is None:
            self._reports = session.sparkContext.accumulator([], ReportsParam())
        job_id, tasks = str(uuid.uuid4()), len(backlogs)
        reader = CatchUpReader(source, backlogs, MAX_READ_SECONDS, job_id, self._reports)
        frame = session.range(0, tasks, 1, tasks).mapInArrow(reader, to_struct(source.schema))
        # The same functions also accept a DataFrame: they get one with micro-batches.
        for function in self._transforms:
            frame = cast(DataFrame, function(cast(ContinuousFrame, frame)))
        frame = cast(DataFrame, writers.convert(cast(ContinuousFrame, frame)))
        writer = CatchUpWriter(writers, epoch)
        return CatchUpJob(
            frame.mapInArrow(writer, CATCH_UP_REPORT), self._label, self._reports, job_id, epoch
        )

    def _frame(self, read_task: ReadTask, settings: Mapping[str, str]) -> ContinuousFrame:
        """Return the transformed rows of a reader, in a session with these settings."""
        schema = StructType([*to_struct(read_task.source.schema), *to_struct(METADATA_COLUMNS)])
        readers = self._session(settings).range(0, read_task.tasks, 1, read_task.tasks)
        frame = begin_frame(readers.mapInArrow(read_task, schema, barrier=True))
        for function in self._transforms:
            frame = apply_transform(frame, function)
        return frame

    def _session(self, settings: Mapping[str, str]) -> SparkSession:
        session = clone_session(self._spark)
        for key, value in {**_SETTINGS, **settings}.items():
            session.conf.set(key, value)
        return session


class SparkJob:
    """A Spark job of a query. The job of a run ends when its readers end."""

    def __init__(self, frame: DataFrame, label: str) -> None:
        self._frame, self._label = frame, label
        self._group = f"penstock-{uuid.uuid4()}"
        self._failure: Exception | None = None
        self._ended = threading.Event()
        # In pinned thread mode, a job's settings are local to its thread.
        self._thread = InheritableThread(target=self._run, name="continuous job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            context = self._frame.sparkSession.sparkContext
            context.setJobGroup(self._group, self._label, interruptOnCancel=True)
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
        self, frame: DataFrame, label: str, reports: Accumulator[list[str]], job_id: str, epoch: int
    ) -> None:
        super().__init__(frame, label)
        self._reports, self._job_id, self._epoch = reports, job_id, epoch
        self._parts: list[TaskPart] = []

    def _execute(self, frame: DataFrame) -> None:
        self._reports.value = []
        written = {task: json.loads(report) for task, report in frame.collect()}
        for report in map(json.loads, self._reports.value):
            # Tasks of an earlier job may have reported late.
            if report["job"] == self._job_id:
                self._parts.append(TaskPart.from_reports(report, written.pop(report["task"])))
        if written:
            raise ContinuousFailedError(
                f"{len(written)} tasks of the query have not reported what they read: the query restarts "
                "after its last committed epoch",
                condition="CONTINUOUS_FAILED.PROTOCOL",
            )

    def epoch(self) -> Epoch:
        """Return the epoch that the job has written; only after it has succeeded."""
        return epoch_of(self._epoch, self._parts)
