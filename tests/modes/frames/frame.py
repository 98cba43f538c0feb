"""A query for the checks of output modes, and the streams that queries are made of."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

NO_AGGREGATION = ("PENSTOCK_COMPLETE_WITHOUT_AGGREGATION",)
FOR_EVER = ("PENSTOCK_STATE_FOR_EVER",)
EACH_KEY = ("PENSTOCK_STATE_FOR_EACH_KEY",)
CHAIN = ("PENSTOCK_STATEFUL_AFTER_STATEFUL",)
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
WITHOUT_WATERMARK = ("PENSTOCK_AGGREGATION_WITHOUT_WATERMARK",)


@dataclass(frozen=True)
class Inputs:
    """Two streams and a batch, of ts, k and value."""

    events: DataFrame
    others: DataFrame
    batch: DataFrame

    @property
    def timed(self) -> DataFrame:
        return self.events.withWatermark("ts", "10 seconds")

    @property
    def timed_others(self) -> DataFrame:
        return self.others.withWatermark("ts2", "10 seconds")

    @property
    def windows(self) -> DataFrame:
        return self.timed.groupBy(F.window("ts", "1 minute"), "k").count()


@dataclass(frozen=True)
class Frame:
    """A query, and what is said of it."""

    name: str
    build: Callable[[Any], DataFrame]
    append: tuple[str, ...] = ()
    update: tuple[str, ...] = ()
    complete: tuple[str, ...] = NO_AGGREGATION
    settings: dict[str, str] = field(default_factory=dict)

    def codes(self, mode: str) -> tuple[str, ...]:
        return tuple(getattr(self, mode))

    @property
    def source(self) -> str:
        """The query as the docs show it."""
        text = textwrap.dedent(inspect.getsource(self.build))
        text = text[text.index("return ") + len("return ") :].strip()
        return textwrap.dedent(text[1:-1].strip("\n")).rstrip() if text.startswith("(\n") else text


FRAMES: dict[str, Frame] = {}
Build = Callable[[Inputs], DataFrame]


def says(
    *,
    append: tuple[str, ...] = (),
    update: tuple[str, ...] = (),
    complete: tuple[str, ...] = NO_AGGREGATION,
    **settings: str,
) -> Callable[[Build], Build]:
    def note(build: Build) -> Build:
        name = build.__name__
        keys = {key.replace("__", "."): value for key, value in settings.items()}
        FRAMES[name] = Frame(name, build, append, update, complete, keys)
        return build

    return note


@contextmanager
def settings_of(spark: SparkSession, name: str) -> Iterator[None]:
    """The session with the settings that a query is about."""
    settings = FRAMES[name].settings if name in FRAMES else {}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key in settings:
            spark.conf.unset(key)


def inputs(spark: SparkSession, folder: Path) -> Inputs:
    """Streams that a query can really run over."""
    for name in ("events", "others"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        second = 1_700_000_000_000_000
        times = pa.array([second, second + 30_000_000, second + 90_000_000], pa.timestamp("us", tz="UTC"))
        table = pa.table({"ts": times, "k": [1, 2, 1], "value": [10, 20, 30]})
        if not (folder / name / "0.parquet").exists():
            pq.write_table(table, folder / name / "0.parquet")
    schema = "ts timestamp, k bigint, value bigint"
    events = spark.readStream.schema(schema).parquet(str(folder / "events"))
    others = spark.readStream.schema(schema).parquet(str(folder / "others")).toDF("ts2", "k2", "value2")
    batch = spark.range(3).select(F.col("id").alias("k2"), F.lit("x").alias("name"))
    return Inputs(events, others, batch)
