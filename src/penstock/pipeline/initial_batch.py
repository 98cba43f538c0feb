"""Initial micro-batches without data, for queries that keep rows in their state.

Spark emits rows that a watermark has finalized one micro-batch after the watermark moved. If a run ends in
between, the rows stay in the state store, and the next run emits them only when new data arrives (Spark 4.2,
4.3). So each run of such a query begins with a micro-batch without data.
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
_NO_DATA_SETTING = "spark.sql.streaming.noDataMicroBatches.enabled"


def with_initial_batch(frame: DataFrame, location: str) -> DataFrame:
    """Add an empty source to a streaming DataFrame, so that each run begins with a micro-batch.

    Return the DataFrame itself if it does not need this, or if its checkpoint was started without the source
    or cannot be read.
    """
    if not _is_needed(frame, location):
        return frame
    spark = frame.sparkSession
    register_source(spark, InitialBatchSource)
    # The optimizer removes the empty part, so it needs no task.
    empty = spark.readStream.format(FORMAT).schema(frame.schema).load().where("false")
    return frame.union(empty.mapInArrow(_no_rows, frame.schema))


def _is_needed(frame: DataFrame, location: str) -> bool:
    try:
        checkpoint = Checkpoint(location)
        # As in Spark, the last logged offset says which sources the query has.
        last = checkpoint.last_planned()
        offsets = [] if last is None else checkpoint.offsets(last)
    except Exception as error:
        # A guarantee that needs the checkpoint has already refused it; the others work without it.
        log.info(
            "the query does not begin with a micro-batch without data, because its checkpoint cannot be "
            "read: %s",
            type(error).__name__,
            extra={"action": "not_woken", "error": condition_of(error)},
        )
        return False
    if last is None:
        return may_retain_rows(frame)
    return any(isinstance(offset, dict) and RUNS_KEY in offset for offset in offsets)


def _no_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return iter(())


class InitialBatchSource(DataSource):
    """Streaming data source without rows."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return InitialBatchReader()


class InitialBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader without rows; its offset is the number of the query's run."""

    def __init__(self) -> None:
        self._run: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:
        """Do nothing: nothing follows the first micro-batch."""

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def initialOffset(self) -> Json:
        return {RUNS_KEY: 0}

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        """Return the number of this run, which stays the same during the run."""
        if self._run is None:
            self._run = int(start[RUNS_KEY]) + 1
        return {RUNS_KEY: self._run}

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        return []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(())


@dataclass
class _StartingQueries:
    """The queries of a session that are starting."""

    count: int = 0
    previous_setting: str = ""
    """The session's setting before the first of them started."""


_starting: WeakKeyDictionary[SparkSession, _StartingQueries] = WeakKeyDictionary()
_setting_lock = threading.Lock()


@contextmanager
def no_data_batches(spark: SparkSession) -> Iterator[None]:
    """Enable micro-batches without data for queries that start in the block.

    A query copies its session's settings when it starts (Spark 4.3). If several queries start at the same
    time, the first one changes the setting and the last one restores it.
    """
    with _setting_lock:
        starting = _starting.setdefault(spark, _StartingQueries())
        if not starting.count:
            starting.previous_setting = str(spark.conf.get(_NO_DATA_SETTING, "true"))
            spark.conf.set(_NO_DATA_SETTING, "true")
        starting.count += 1
    try:
        yield
    finally:
        with _setting_lock:
            starting.count -= 1
            if not starting.count:
                spark.conf.set(_NO_DATA_SETTING, starting.previous_setting)
