"""Each run of a query that keeps rows begins with a micro-batch, new data or none.

Spark lets out what a watermark has closed in a micro-batch after the one that moved it. A run that ends in between leaves those
rows in the state store, and the next run makes no micro-batch before there are new data (Spark 4.2, 4.3).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from penstock.errors import condition_of
from penstock.spark.checkpoint import RUNS_KEY, Checkpoint
from penstock.spark.internals.plans import may_retain_rows
from penstock.spark.registration import register_source

log = logging.getLogger("penstock.pipeline")

FORMAT = "penstock_waking"


def with_initial_batch(frame: DataFrame, location: str) -> DataFrame:
    """The same rows, of which each run of the query at a checkpoint begins with a micro-batch.

    A frame that has no need of it is returned as it is, and so is one whose checkpoint began without it or cannot be read.
    """
    if not _needed(frame, location):
        return frame
    spark = frame.sparkSession
    register_source(spark, InitialBatchSource)
    # The optimizer leaves out what is empty, so no micro-batch has a task for it.
    empty = spark.readStream.format(FORMAT).schema(frame.schema).load().where("false")
    return frame.union(empty.mapInArrow(_nothing, frame.schema))


def _needed(frame: DataFrame, location: str) -> bool:
    try:
        checkpoint = Checkpoint(location)
        # As Spark does it: what was begun has its sources, whether it came to its end or not.
        last = checkpoint.last_planned()
        begun = [] if last is None else checkpoint.offsets(last)
    except Exception as error:
        # A guarantee that has need of the checkpoint has refused it by now; the others do without.
        log.info(
            "the query does not begin with a micro-batch, since its checkpoint cannot be read: %s",
            type(error).__name__,
            extra={"action": "not_woken", "error": condition_of(error)},
        )
        return False
    if last is None:
        return may_retain_rows(frame)
    return any(isinstance(offset, dict) and RUNS_KEY in offset for offset in begun)


def _nothing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return iter(())


class InitialBatchSource(DataSource):
    """A source without rows."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return FORMAT

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A streaming read."""
        return InitialBatchReader()


class InitialBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Its offset counts the runs of the query."""

    def __init__(self) -> None:
        self._run: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """Nothing to note: there is no more after the first micro-batch."""

    def getDefaultReadLimit(self) -> ReadLimit:
        """No limit."""
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        """Before the first run."""
        return {RUNS_KEY: 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """One more than the earlier runs, all through this one."""
        if self._run is None:
            self._run = int(start[RUNS_KEY]) + 1
        return {RUNS_KEY: self._run}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """No tasks."""
        return []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """No rows."""
        return iter(())


# ---- settings: Settings that a query takes with it when it starts.

_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


@contextmanager
def no_data_batches(spark: SparkSession) -> Iterator[None]:
    """Queries that start in here let out what a watermark has closed, with no need of new data; others do as the session says.

    A query copies its session's settings when it starts (Spark 4.3).
    """
    before = spark.conf.get(_NO_DATA, "true")
    spark.conf.set(_NO_DATA, "true")
    try:
        yield
    finally:
        spark.conf.set(_NO_DATA, str(before))
