"""Runs of a continuous query: a Spark job with its plan, session, task slots and coordinator.

A run may be planned while the one before it is still active: its tasks get their offsets when they have
connected.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.continuous.channel import HIDDEN, CoordinatorAddress
from penstock.continuous.connectors.protocol import Positions, SourceDriver, WriterFactory
from penstock.continuous.dataframe import ContinuousFrame, begin_frame, transformed
from penstock.continuous.driver.coordinator import EpochCoordinator
from penstock.continuous.driver.epochs import Epochs
from penstock.continuous.plan_check import FEW_ROWS, MANY_ROWS, check_plan
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
    """What its tasks write with."""
    large_batches: bool
    """Whether it is for throughput rather than latency."""


def partitions_by_task(positions: Positions, tasks: int) -> Sequence[Positions]:
    partitions = sorted(positions)
    return [{p: positions[p] for p in partitions[task::tasks]} for task in range(tasks)]


_SETTINGS = {
    # The list of supported operators has none of an adaptive plan.
    "spark.sql.adaptive.enabled": "false",
    # At its largest value Spark counts the rows of a batch for Python, and does not measure each of them.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    # Data for a Python worker is sent at once.
    "spark.sql.execution.pandas.udf.buffer.size": "64",
    "spark.sql.execution.python.udf.buffer.size": "64",
}

_BATCHES = (
    "spark.sql.execution.arrow.maxRecordsPerBatch",
    "spark.sql.execution.python.udf.maxRecordsPerBatch",
)

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
        """Return how many tasks read so many partitions; one of several task slots is left for other jobs."""
        slots = task_slots(self._spark)
        if not slots:
            raise ContinuousFailedError(
                "the application has no task slot for the query: give it executors",
                condition="CONTINUOUS_FAILED.NO_SLOTS",
            )
        return min(partitions, max(slots - 1, 1))

    def job(
        self,
        coordinator: EpochCoordinator,
        tasks: int,
        sink: WriterFactory,
        *,
        large_batches: bool,
        limited: bool,
    ) -> SparkJob:
        rows = MANY_ROWS if large_batches else FEW_ROWS
        fillers = self._plan.filler_rows(rows)
        read = ReadTask(self._source.readers(), tasks, coordinator.address, fillers, large_batches)
        frame = sink.shaped(self._frame(read, dict.fromkeys(_BATCHES, str(rows))))
        write = WriteTask(sink, coordinator.address, limited)
        return SparkJob(frame.carried.mapInArrow(write, REPORT), self._called)

    def _frame(self, read: ReadTask, settings: Mapping[str, str]) -> ContinuousFrame:
        """Return the transformed rows of a reader, in a session of their own."""
        session = clone_session(self._spark)
        for key, value in {**_SETTINGS, **settings}.items():
            session.conf.set(key, value)
        schema = StructType([*to_struct(read.source.schema), *to_struct(HIDDEN)])
        readers = session.range(0, read.tasks, 1, read.tasks)
        frame = begin_frame(readers.mapInArrow(read, schema, barrier=True))
        for function in self._transforms:
            frame = transformed(frame, function)
        return frame


class SparkJob:
    """The Spark job of one run, which ends when its readers do."""

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
            self._frame.write.format("noop").mode("overwrite").save()
        except Exception as error:
            self._failure = error
        finally:
            self._ended.set()

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
