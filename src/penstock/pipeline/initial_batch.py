"""Micro-batches without new data, for queries that keep rows in their state.

Spark emits the rows that a watermark has finalized one micro-batch after the one that moved the watermark. A
run that ends in between leaves these rows in the state store, and the next run has no micro-batch until there
is new data (Spark 4.2, 4.3). So each run begins with a micro-batch without data.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from penstock.errors import condition_of
from penstock.json_text import Json
from penstock.spark.checkpoint import RUNS_KEY, Checkpoint
from penstock.spark.internals.plan_text import may_retain_rows
from penstock.spark.session import register_source

log = logging.getLogger("penstock.pipeline")

FORMAT = "penstock_initial_batch"
_NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


def with_initial_batch(frame: DataFrame, location: str) -> DataFrame:
    """Add a source without rows to a frame, so that each run of its query begins with a micro-batch.

    Return the frame itself if it does not need this, or if its checkpoint began without it or cannot be read.
    """
    if not _is_needed(frame, location):
        return frame
    spark = frame.sparkSession
    register_source(spark, InitialBatchSource)
    # The optimizer removes empty parts, so this costs no task.
    empty = spark.readStream.format(FORMAT).schema(frame.schema).load().where("false")
    return frame.union(empty.mapInArrow(_no_rows, frame.schema))


def _is_needed(frame: DataFrame, location: str) -> bool:
    try:
        checkpoint = Checkpoint(location)
        # As in Spark, the last micro-batch that was begun, finished or not, says which sources there are.
        last = checkpoint.last_planned()
        begun = [] if last is None else checkpoint.offsets(last)
    except Exception as error:
        # A guarantee that needs the checkpoint has refused it before; the others work without it.
        log.info(
            "the query does not begin with a micro-batch without data, since its checkpoint cannot be "
            "read: %s",
            type(error).__name__,
            extra={"action": "not_woken", "error": condition_of(error)},
        )
        return False
    if last is None:
        return may_retain_rows(frame)
    return any(isinstance(offset, dict) and RUNS_KEY in offset for offset in begun)


def _no_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return iter(())


class InitialBatchSource(DataSource):
    """Data source without rows."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return InitialBatchReader()


class InitialBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader without rows whose offset counts the runs of the query."""

    def __init__(self) -> None:
        self._run: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """Do nothing: nothing follows the first micro-batch."""

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def initialOffset(self) -> Json:
        return {RUNS_KEY: 0}

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return the number of earlier runs plus one, throughout this run."""
        if self._run is None:
            self._run = int(start[RUNS_KEY]) + 1
        return {RUNS_KEY: self._run}

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(())


@dataclass
class _Starts:
    """The queries of a session that are starting."""

    count: int = 0
    before: str = ""
    """The session's setting before they began."""


_starts: WeakKeyDictionary[SparkSession, _Starts] = WeakKeyDictionary()
_changing_setting = threading.Lock()


@contextmanager
def no_data_batches(spark: SparkSession) -> Iterator[None]:
    """Enable micro-batches without data for queries that start in the block.

    A query copies its session's settings when it starts (Spark 4.3). If several start at the same time, the
    first changes the setting, and the last restores it.
    """
    with _changing_setting:
        starts = _starts.setdefault(spark, _Starts())
        if not starts.count:
            starts.before = str(spark.conf.get(_NO_DATA, "true"))
            spark.conf.set(_NO_DATA, "true")
        starts.count += 1
    try:
        yield
    finally:
        with _changing_setting:
            starts.count -= 1
            if not starts.count:
                spark.conf.set(_NO_DATA, starts.before)
