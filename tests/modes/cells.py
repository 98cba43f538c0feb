"""The table of queries, modes, sinks and triggers: the verdict on each, and what Spark does when it is
started.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery

import penstock
from penstock.modes.checking.report import MODES
from tests.modes.frames import FRAMES, Inputs
from tests.modes.live import LIVE, Live

SECONDS = 60
_EPOCHS = 2
"""A query that cannot begin a second epoch has no more than one."""
NOW = {"availableNow": True}
INTERVALS = {"continuous": "100 milliseconds", "realTime": "500 milliseconds"}
_REAL_TIME = {
    "spark.sql.streaming.realTimeMode.minBatchDuration": "100ms",
    # All tasks of all stages run at once.
    "spark.sql.shuffle.partitions": "1",
}
_SINKS = (
    "console",
    "memory",
    "noop",
    "foreach",
    "foreachBatch",
    "parquet",
    "json",
    "python_sink",
    "penstock",
)
LOOKED_UP = (
    "org.apache.spark.sql.execution.datasources.noop.NoopDataSource",
    "org.apache.spark.sql.execution.streaming.ConsoleSinkProvider",
    "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat",
    "binaryFile",
    "jdbc",
    "rate",
)
"""Formats that are asked what they can, by their class or their name."""
_CONTINUOUS_SINKS = ("noop", "memory", "foreach", "foreachBatch", "parquet", "python_sink")


@dataclass(frozen=True)
class Cell:
    query: str
    mode: str
    sink: str = "noop"
    trigger: str = "availableNow"

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {self.trigger: INTERVALS.get(self.trigger, True)}

    def __str__(self) -> str:
        return f"{self.query}-{self.mode}-{self.sink}-{self.trigger}"


def _cells() -> Iterator[Cell]:
    for name in FRAMES:
        yield from (Cell(name, mode) for mode in MODES)
    for sink in _SINKS:
        for name in ("filtered", "count_by_key"):
            yield from (Cell(name, mode, sink) for mode in MODES if sink != "noop")
    yield from (Cell("windows", mode, "foreachBatch", "once") for mode in MODES)
    for name in ("rate", "rate_counted", "rate_now", "rate_mapped_in_arrow"):
        yield from (Cell(name, mode, "noop", "continuous") for mode in MODES)
    for sink in _CONTINUOUS_SINKS:
        yield from (Cell("rate", mode, sink, "continuous") for mode in ("append", "update") if sink != "noop")
    yield Cell("filtered", "append", "noop", "continuous")
    for sink in LOOKED_UP:
        yield Cell("filtered", "append", sink)
        yield from (Cell("count_by_key", mode, sink) for mode in ("update", "complete"))
    yield from (Cell("live", mode, "console", "realTime") for mode in MODES)
    yield from (
        Cell(name, "update", "console", "realTime") for name in ("rate", "filtered", *LIVE) if name != "live"
    )
    for sink in ("foreach", "foreachBatch", "noop", "memory", "parquet", "python_sink"):
        yield Cell("live", "update", sink, "realTime")


CELLS = list(_cells())
OFTEN = (
    "filtered", "mapped_in_arrow", "count_by_key", "count_by_hour_of_event_time", "windows",
    "windows_without_watermark", "event_time_recreated", "sessions", "distinct_values", "deduplicated",
    "deduplicated_within_watermark", "results_deduplicated", "sorted_rows", "sorted_counts", "limited",
    "limited_counts", "rows_skipped", "sampled", "intersected", "stream_taken_away",
    "united_with_a_batch", "rows_numbered", "ranked", "joined", "left_joined", "left_joined_in_a_range",
    "semi_joined", "anti_joined", "batch_left_joined", "windows_of_joined", "function_in_append",
    "function_in_update", "function_after_windows", "two_functions", "transformed_with_state",
    "transformed_without_rocksdb", "windows_of_windows", "windows_deduplicated", "live", "live_counted",
    "live_in_python", "live_counts_united", "rate", "rate_counted", "rate_now", "rate_mapped_in_arrow",
)  # fmt: skip
"""The queries that are started in every run of the tests."""


class PythonSink(DataSource):
    """A sink as people write them."""

    @classmethod
    def name(cls) -> str:
        return "python_sink"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - Spark's name
        return _Writer()


class _Writer(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: Any, batchId: int) -> None: ...  # noqa: N803 - Spark's name

    def abort(self, messages: Any, batchId: int) -> None: ...  # noqa: N803 - Spark's name


def frame_of(spark: SparkSession, streams: Inputs, name: str) -> DataFrame:
    if name in LIVE:
        return LIVE[name].build(Live(spark))
    if name == "batch":
        return streams.batch
    if not name.startswith("rate"):
        return FRAMES[name].build(streams)
    rate = spark.readStream.format("rate").option("rowsPerSecond", 10).load()
    return {
        "rate": rate.select("value"),
        "rate_counted": rate.groupBy((F.col("value") % 3).alias("k")).count(),
        "rate_now": rate.select("value", F.current_timestamp().alias("now")),
        "rate_mapped_in_arrow": rate.mapInArrow(lambda batches: batches, rate.schema),
    }[name]


def refusal_of(cell: Cell, df: DataFrame, folder: Path) -> str | None:
    """Start the query for real: why it did not come through its first micro-batches, or None."""
    writer = df.writeStream.outputMode(cell.mode).trigger(**cell.arguments)  # type: ignore[arg-type]  # overloads
    writer = writer.option("checkpointLocation", tempfile.mkdtemp(dir=folder))
    if cell.sink == "penstock table":
        return _refusal_of_a_table(cell, df, folder)
    if cell.sink == "foreach":
        writer = writer.foreach(_take)
    elif cell.sink == "foreachBatch":
        writer = writer.foreachBatch(lambda batch, _: batch.write.format("noop").mode("overwrite").save())
    else:
        writer = writer.format(cell.sink)
    if cell.sink in ("parquet", "json", "binaryFile") or cell.sink.endswith("FileFormat"):
        writer = writer.option("path", tempfile.mkdtemp(dir=folder))
    if cell.sink == "memory":
        writer = writer.queryName(f"cell_{time.time_ns()}")
    if cell.sink == "penstock":
        url = f"sqlite:///{tempfile.mkdtemp(dir=folder)}/penstock.db"
        with penstock.connect(url) as store:
            store.create_queue("sink", df.schema)
        writer = writer.option("url", url).option("queue", "sink")
    try:
        with _settings(df.sparkSession, _REAL_TIME if cell.trigger == "realTime" else {}):
            query = writer.start()
    except (PySparkException, Py4JError, ValueError) as error:
        return str(error)
    with _stopped(query):
        if cell.trigger in INTERVALS:
            _until_an_epoch(query)
        else:
            _until_the_end(query)
        error = query.exception()
    return None if error is None else str(error)


def _refusal_of_a_table(cell: Cell, df: DataFrame, folder: Path) -> str | None:
    place = Path(tempfile.mkdtemp(dir=folder))
    sink = penstock.TableSink("cell", url=f"sqlite:///{place}/penstock.db")
    pipeline = penstock.stream(df.sparkSession, df).write(sink, output_mode=cell.mode)
    query = pipeline.start(checkpoint=place / "checkpoint", trigger=penstock.Trigger.available_now())
    try:
        assert query.awaitTermination(SECONDS), query.status
    except PySparkException as error:
        return str(error)
    finally:
        query.stop()
    return None


def _take(row: Any) -> None: ...


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, str(value))


@contextmanager
def _stopped(query: StreamingQuery) -> Iterator[None]:
    try:
        yield
    finally:
        query.stop()


def _until_the_end(query: StreamingQuery) -> None:
    with suppress(PySparkException):
        assert query.awaitTermination(SECONDS), query.status


def _until_an_epoch(query: StreamingQuery) -> None:
    """A task of the continuous trigger tells nothing but its offsets: wait until those of some epochs are
    committed.

    The real-time trigger reports its first micro-batch when it has ended.
    """
    execution = query._jsq.streamingQuery() if hasattr(query._jsq, "streamingQuery") else query._jsq
    deadline = time.monotonic() + SECONDS
    while query.isActive and execution.lastProgress() is None and time.monotonic() < deadline:
        latest = execution.commitLog().getLatestBatchId()
        if latest.isDefined() and latest.get() >= _EPOCHS:
            return
        time.sleep(0.02)
