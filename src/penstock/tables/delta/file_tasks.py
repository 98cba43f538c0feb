"""Spark jobs on files of a Delta table: each task gets numbers of files, which it opens itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.error_boundary import iterate_in_worker

if TYPE_CHECKING:
    from penstock.tables.delta.stage import DeltaStage


class FileTask(ABC):
    """A function of ``mapInArrow`` that takes numbers of files."""

    stage: DeltaStage

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(batches))

    def _run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with self.stage.place.translating_errors():
                    yield from self.results(number)

    @abstractmethod
    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield what is found or done for one number."""

    def job(self, spark: SparkSession, count: int, schema: str) -> DataFrame:
        """Return the results for the numbers below ``count``."""
        parts = min(count, spark.sparkContext.defaultParallelism)
        return spark.range(0, count, 1, parts).mapInArrow(self, schema)
