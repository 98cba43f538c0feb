"""Python data source that only generates rows, and a sink that discards them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

NAME = "idle"
_TASKS = 2


def frame(spark: SparkSession, rows: int) -> DataFrame:
    """Return a stream with a number of rows in each micro-batch, in two tasks."""
    spark.dataSource.register(_Idle)
    return spark.readStream.format(NAME).option("rows", rows).load()


class _Idle(DataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return "id long"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return _Reader(int(self.options["rows"]))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _Writer()


class _Reader(DataSourceStreamReader):
    def __init__(self, rows: int) -> None:
        self._rows, self._batches = rows, 0

    def initialOffset(self) -> dict[str, int]:
        return {"batches": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        self._batches += 1
        return {"batches": self._batches}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(task) for task in range(_TASKS)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ids = pa.array(range(self._rows // _TASKS), pa.int64())
        yield pa.RecordBatch.from_arrays([ids], names=["id"])

    def commit(self, end: dict[str, int]) -> None:
        pass


class _Writer(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        pass
