"""Spark jobs whose tasks get numbers, for example of files, which the tasks open themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from penstock.errors import PenstockError
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.location import translate_error

Part = TypeVar("Part")
_TASKS_PER_CORE = 4
_REPORT_DDL = "number bigint, result binary, attempt int"
_REPORT_SCHEMA = pa.schema([("number", pa.int64()), ("result", pa.binary()), ("attempt", pa.int32())])


def task_count(spark: SparkSession, count: int) -> int:
    """Return the number of tasks for ``count`` parts; few, since each task loads the data of all parts."""
    return max(1, min(count, _TASKS_PER_CORE * spark.sparkContext.defaultParallelism))


def assign_to_tasks(parts: Iterable[Part], size: Callable[[Part], int], limit: int) -> list[list[Part]]:
    """Divide parts among tasks: each gets a single part, or parts with a total size of at most ``limit``."""
    tasks: list[list[Part]] = []
    total = 0
    for part in parts:
        if not tasks or total + size(part) > limit:
            tasks.append([])
            total = 0
        tasks[-1].append(part)
        total += size(part)
    return tasks


class NumberedTask(ABC):
    """Function for ``mapInArrow``, which gets numbers and reports a result for each, as bytes."""

    target: FileTarget
    failed_action: str
    """A clause for messages that says what failed."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(batches))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            report = {
                "number": [number],
                "result": [self.run_one(number)],
                "attempt": [context.attemptNumber()],
            }
            yield pa.RecordBatch.from_pydict(report, schema=_REPORT_SCHEMA)

    def run_one(self, number: int) -> bytes:
        """Return the result for a number; translate errors to Penstock's errors, without secrets."""
        try:
            return self.result(number)
        except PenstockError:
            raise
        except Exception as error:
            what = self.failure_of(number)
            raise translate_error(error, self.target.table, what, self.target.io.properties) from None

    def failure_of(self, number: int) -> str:
        """Return the clause for messages that says what failed for a number."""
        return self.failed_action

    @abstractmethod
    def result(self, number: int) -> bytes:
        """Return the result for a number."""

    def reports(self, spark: SparkSession, count: int) -> list[Any]:
        """Run a task for each number below ``count``, and return their reports."""
        if not count:
            return []
        numbers = spark.range(0, count, 1, task_count(spark, count))
        return sorted(numbers.mapInArrow(self, _REPORT_DDL).collect(), key=lambda report: report.number)
