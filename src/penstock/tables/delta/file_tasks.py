"""Spark jobs on files of a Delta table, whose tasks get file numbers and open the files themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.error_boundary import iterate_in_worker

if TYPE_CHECKING:
    from penstock.tables.delta.stage import DeltaStage

_TASKS_PER_CORE = 4


class FileTask(ABC):
    """The work of a Spark task on numbered files."""

    stage: DeltaStage

    def run(self, numbers: Iterable[int]) -> Iterator[pa.RecordBatch]:
        """Yield the results for the given numbers."""
        for number in numbers:
            with self.stage.location.translating_errors():
                yield from self.results(number)

    @abstractmethod
    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the results for one number."""

    def job(self, spark: SparkSession, count: int, schema: str) -> DataFrame:
        """Return the results for the numbers below ``count``.

        Numbers are assigned to tasks round-robin, so the files with the most work should come first.
        """
        tasks = min(count, _TASKS_PER_CORE * spark.sparkContext.defaultParallelism)
        return spark.range(0, tasks, 1, tasks).mapInArrow(_RoundRobinTask(self, count, tasks), schema)


@dataclass(frozen=True)
class _RoundRobinTask:
    """Function for ``mapInArrow``, which gets the first number of a task."""

    task: FileTask
    count: int
    tasks: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        starts = (number for batch in batches for number in batch.column(0).to_pylist())
        numbers = (number for start in starts for number in range(start, self.count, self.tasks))
        return iterate_in_worker(self.task.run(numbers))
