"""Runs of a continuous query as Spark jobs: slots, sessions and plans."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.continuous.coordinator import EpochCoordinator
from penstock.continuous.ends import Positions, SinkDriver, SourceDriver
from penstock.continuous.epochs import Epochs
from penstock.continuous.hidden import HIDDEN
from penstock.continuous.link import Address
from penstock.continuous.reader import ReadTask
from penstock.continuous.writer import REPORT, WriteTask
from penstock.errors import ContinuousFailed
from penstock.spark.endpoint import names
from penstock.spark.schemas import to_struct

_BATCH_ROWS, _BATCH_ROWS_WITH_PYTHON = 512, 64
_SETTINGS = {
    # At its largest value Spark counts the rows of a batch for Python and no longer weighs it after each of them.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    # What is written to a Python worker goes out at once.
    "spark.sql.execution.pandas.udf.buffer.size": "64",
}

Carry = Callable[[DataFrame], DataFrame]
"""The transformation of rows that have the hidden columns."""


@dataclass
class SparkEngine:
    """Makes what a run needs.

    Parameters
    ----------
    spark
        The user's session; the query works in a copy, with settings of its own.
    carry
        The transformation.
    python_stages
        How many of its stages run in Python.
    called
        How Spark's page describes the job.
    """

    spark: SparkSession
    source: SourceDriver
    sink: SinkDriver
    carry: Carry
    python_stages: int
    called: str

    def coordinator(self, epochs: Epochs) -> EpochCoordinator:
        return EpochCoordinator(*names(self.spark), epochs)

    def groups(self, positions: Positions) -> Sequence[Positions]:
        """Partitions by task: each has a task slot to the end, and one slot is left for other jobs where there is more than one.

        Raises
        ------
        ContinuousFailed
            When there is no slot.
        """
        jvm = self.spark.sparkContext._jsc.sc()
        slots = int(jvm.maxNumConcurrentTasks(jvm.resourceProfileManager().defaultResourceProfile()))
        if not slots:
            raise ContinuousFailed(
                "there is no task slot for the query: give the application executors",
                condition="CONTINUOUS_FAILED.NO_SLOTS",
            )
        tasks = min(len(positions), max(slots - 1, 1))
        partitions = sorted(positions)
        return [{p: positions[p] for p in partitions[task::tasks]} for task in range(tasks)]

    def job(self, coordinator: EpochCoordinator, groups: Sequence[Positions], epoch: int) -> SparkJob:
        own = SparkSession(self.spark.sparkContext, self.spark._jsparkSession.cloneSession())
        rows = _BATCH_ROWS_WITH_PYTHON if self.python_stages else _BATCH_ROWS
        for key, value in {**_SETTINGS, "spark.sql.execution.arrow.maxRecordsPerBatch": str(rows)}.items():
            own.conf.set(key, value)
        frame = self._frame(own, coordinator.address, groups, epoch, rows * (1 + self.python_stages) + 2)
        return SparkJob(frame, self.called)

    def _frame(
        self, own: SparkSession, address: Address, groups: Sequence[Positions], epoch: int, fillers: int
    ) -> DataFrame:
        source, tasks = self.source.source(), len(groups)
        read = ReadTask(source, tuple(groups), address, epoch, fillers)
        schema = StructType([*to_struct(source.schema), *to_struct(HIDDEN)])
        rows = own.range(0, tasks, 1, tasks).mapInArrow(read, schema, barrier=True)
        return self.carry(rows).mapInArrow(WriteTask(self.sink.sink(), address), REPORT)


class SparkJob:
    """A job that ends when its readers do."""

    def __init__(self, frame: DataFrame, called: str) -> None:
        self._frame, self._called = frame, called
        self._group = f"penstock-{uuid.uuid4()}"
        self._failure: Exception | None = None
        self._ended = threading.Event()
        # With a thread of the JVM's for each of Python's, settings of a job are the thread's own.
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
