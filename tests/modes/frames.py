"""Queries for the checks of output modes, each with the codes that are said of it in append, update and complete mode."""

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
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming import StatefulProcessor

NO_AGGREGATION = ("PENSTOCK_COMPLETE_WITHOUT_AGGREGATION",)
FOR_EVER = ("PENSTOCK_STATE_FOR_EVER",)
EACH_KEY = ("PENSTOCK_STATE_FOR_EACH_KEY",)
CHAIN = ("PENSTOCK_STATEFUL_AFTER_STATEFUL",)
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
    build: Callable[[Inputs], DataFrame]
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


def _pandas(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    import pandas

    yield pandas.DataFrame({"k": [key[0]]})


class _Processor(StatefulProcessor):
    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Any, timer: Any) -> Iterator[Any]:  # noqa: N802 - Spark's name
        import pandas

        for _ in rows:
            pass
        yield pandas.DataFrame({"k": [key[0]]})

    def close(self) -> None: ...


def _with_state(frame: DataFrame, mode: str) -> DataFrame:
    return frame.groupBy("k").applyInPandasWithState(_pandas, "k long", "n long", mode, "NoTimeout")


def _transformed(frame: DataFrame, mode: str) -> DataFrame:
    return frame.groupBy("k").transformWithStateInPandas(_Processor(), "k long", mode, "none")


# Without state.


@says()
def filtered(t: Inputs) -> DataFrame:
    return t.events.where("value > 10").select("k", "value")


@says()
def repartitioned(t: Inputs) -> DataFrame:
    return t.events.repartition(2)


@says()
def mapped_in_arrow(t: Inputs) -> DataFrame:
    return t.events.mapInArrow(lambda batches: batches, t.events.schema)


@says()
def applied_in_pandas(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").applyInPandas(lambda frame: frame, t.events.schema)


@says()
def united(t: Inputs) -> DataFrame:
    return t.events.union(t.others)


@says()
def joined_with_a_batch(t: Inputs) -> DataFrame:
    return t.events.join(t.batch, F.expr("k = k2"))


@says()
def left_joined_with_a_batch(t: Inputs) -> DataFrame:
    return t.events.join(t.batch, F.expr("k = k2"), "left_outer")


@says()
def text_that_looks_like_a_plan(t: Inputs) -> DataFrame:
    return t.events.where("'a\n+- ~Aggregate [k]' != ''")


# Aggregations.


@says(append=WITHOUT_WATERMARK, update=EACH_KEY, complete=EACH_KEY)
def count_by_key(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").count()


@says(append=WITHOUT_WATERMARK, complete=())
def count_of_all(t: Inputs) -> DataFrame:
    return t.events.agg(F.count("*").alias("n"))


@says(append=(*WITHOUT_WATERMARK, *FOR_EVER), update=FOR_EVER, complete=FOR_EVER)
def windows_without_watermark(t: Inputs) -> DataFrame:
    return t.events.groupBy(F.window("ts", "1 minute")).count()


@says(complete=FOR_EVER)
def windows(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.window("ts", "1 minute"), "k").count()


@says(complete=FOR_EVER)
def count_by_event_time(t: Inputs) -> DataFrame:
    return t.timed.groupBy("ts").count()


@says(append=("PENSTOCK_WATERMARK_NOT_IN_GROUPING",), update=EACH_KEY, complete=EACH_KEY)
def count_by_key_with_watermark(t: Inputs) -> DataFrame:
    return t.timed.groupBy("k").count()


@says(append=("PENSTOCK_WATERMARK_NOT_IN_GROUPING",), update=EACH_KEY, complete=EACH_KEY)
def count_by_hour_of_event_time(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.date_trunc("hour", "ts")).count()


@says(append=("PENSTOCK_EVENT_TIME_LOST", *FOR_EVER), update=FOR_EVER, complete=FOR_EVER)
def event_time_made_anew(t: Inputs) -> DataFrame:
    return (
        t.timed.select(F.col("ts").cast("string").cast("timestamp").alias("t"))
        .groupBy(F.window("t", "1 minute"))
        .count()
    )


@says(update=("PENSTOCK_SESSION_WINDOW_IN_UPDATE",), complete=FOR_EVER)
def sessions(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.session_window("ts", "1 minute"), "k").count()


@says(
    append=("PENSTOCK_DISTINCT_AGGREGATE", *WITHOUT_WATERMARK),
    update=("PENSTOCK_DISTINCT_AGGREGATE", *EACH_KEY),
    complete=("PENSTOCK_DISTINCT_AGGREGATE", *EACH_KEY),
)
def distinct_values(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").agg(F.count_distinct("value"))


# Deduplications.


@says(append=FOR_EVER, update=FOR_EVER, complete=(*FOR_EVER, *NO_AGGREGATION))
def distinct_rows(t: Inputs) -> DataFrame:
    return t.events.distinct()


@says(append=FOR_EVER, update=FOR_EVER, complete=(*FOR_EVER, *NO_AGGREGATION))
def deduplicated(t: Inputs) -> DataFrame:
    return t.events.dropDuplicates(["k"])


@says()
def deduplicated_with_event_time(t: Inputs) -> DataFrame:
    return t.timed.dropDuplicates(["k", "ts"])


@says()
def deduplicated_within_watermark(t: Inputs) -> DataFrame:
    return t.timed.dropDuplicatesWithinWatermark(["k"])


@says(
    append=FOR_EVER,
    update=(*FOR_EVER, "PENSTOCK_DEDUPLICATION_OF_RESULTS"),
    complete=(*FOR_EVER, *FOR_EVER, "PENSTOCK_DEDUPLICATION_OF_RESULTS"),
)
def results_deduplicated(t: Inputs) -> DataFrame:
    return t.windows.dropDuplicates(["k"])


@says(complete=FOR_EVER)
def aggregation_of_deduplicated(t: Inputs) -> DataFrame:
    return t.timed.dropDuplicates(["k", "ts"]).groupBy(F.window("ts", "1 minute")).count()


# Sorting and limits.


@says(append=("PENSTOCK_SORT",), update=("PENSTOCK_SORT",), complete=("PENSTOCK_SORT", *NO_AGGREGATION))
def sorted_rows(t: Inputs) -> DataFrame:
    return t.events.orderBy("k")


@says(append=("PENSTOCK_SORT", *WITHOUT_WATERMARK), update=("PENSTOCK_SORT", *EACH_KEY), complete=EACH_KEY)
def sorted_counts(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").count().orderBy("k")


@says(append=("PENSTOCK_SORT",), update=("PENSTOCK_SORT",), complete=("PENSTOCK_SORT", *NO_AGGREGATION))
def sorted_within_partitions(t: Inputs) -> DataFrame:
    return t.events.sortWithinPartitions("k")


@says(update=("PENSTOCK_LIMIT_IN_UPDATE",))
def limited(t: Inputs) -> DataFrame:
    return t.events.limit(2)


@says(append=WITHOUT_WATERMARK, update=("PENSTOCK_LIMIT_IN_UPDATE", *EACH_KEY), complete=EACH_KEY)
def limited_counts(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").count().limit(1)


@says(append=("PENSTOCK_OFFSET",), update=("PENSTOCK_OFFSET",), complete=("PENSTOCK_OFFSET", *NO_AGGREGATION))
def rows_skipped(t: Inputs) -> DataFrame:
    return t.events.offset(1)


# Operators that no stream has.


@says(append=("PENSTOCK_SAMPLE",), update=("PENSTOCK_SAMPLE",), complete=("PENSTOCK_SAMPLE", *NO_AGGREGATION))
def sampled(t: Inputs) -> DataFrame:
    return t.events.sample(0.5)


@says(
    append=("PENSTOCK_INTERSECT",),
    update=("PENSTOCK_INTERSECT",),
    complete=("PENSTOCK_INTERSECT", *NO_AGGREGATION),
)
def intersected(t: Inputs) -> DataFrame:
    return t.events.select("k").intersect(t.others.select("k2"))


@says(
    append=("PENSTOCK_EXCEPT_STREAM",),
    update=("PENSTOCK_EXCEPT_STREAM",),
    complete=("PENSTOCK_EXCEPT_STREAM", *NO_AGGREGATION),
)
def stream_taken_away(t: Inputs) -> DataFrame:
    return t.events.select("k").subtract(t.others.select("k2"))


@says(
    append=("PENSTOCK_UNION_WITH_BATCH",),
    update=("PENSTOCK_UNION_WITH_BATCH",),
    complete=("PENSTOCK_UNION_WITH_BATCH", *NO_AGGREGATION),
)
def united_with_a_batch(t: Inputs) -> DataFrame:
    return t.events.select("k").union(t.batch.select("k2"))


@says(
    append=("PENSTOCK_EXPRESSION",),
    update=("PENSTOCK_EXPRESSION",),
    complete=("PENSTOCK_EXPRESSION", *NO_AGGREGATION),
)
def rows_numbered(t: Inputs) -> DataFrame:
    return t.events.withColumn("number", F.monotonically_increasing_id())


@says(
    append=("NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING",),
    update=("NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING",),
    complete=("NON_TIME_WINDOW_NOT_SUPPORTED_IN_STREAMING", *NO_AGGREGATION),
)
def ranked(t: Inputs) -> DataFrame:
    return t.events.withColumn("rank", F.row_number().over(Window.partitionBy("k").orderBy("ts")))


# Joins.
_RANGE = "k = k2 and ts between ts2 and ts2 + interval 1 minute"
_ENDLESS = ("PENSTOCK_JOIN_STATE_FOR_EVER",)
_UNBOUND = ("PENSTOCK_OUTER_JOIN_WITHOUT_TIME",)
_MODE = ("PENSTOCK_JOIN_MODE",)


@says(append=_ENDLESS, update=_ENDLESS, complete=(*NO_AGGREGATION, *_ENDLESS))
def joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"))


@says(
    append=(*_ENDLESS, "PENSTOCK_WATERMARK_POLICY_MIN"),
    update=(*_ENDLESS, "PENSTOCK_WATERMARK_POLICY_MIN"),
    complete=(*NO_AGGREGATION, *_ENDLESS, "PENSTOCK_WATERMARK_POLICY_MIN"),
)
def joined_with_watermarks(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2"))


_POLICY = ("PENSTOCK_WATERMARK_POLICY_MIN",)


@says(append=_POLICY, update=_POLICY, complete=(*NO_AGGREGATION, *_POLICY))
def joined_in_a_range(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE))


@says(
    append=("PENSTOCK_WATERMARK_POLICY_MAX",),
    update=("PENSTOCK_WATERMARK_POLICY_MAX",),
    complete=(*NO_AGGREGATION, "PENSTOCK_WATERMARK_POLICY_MAX"),
    spark__sql__streaming__multipleWatermarkPolicy="max",
)
def joined_by_the_fastest_watermark(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE))


@says(append=_UNBOUND, update=(*_MODE, *_UNBOUND), complete=(*NO_AGGREGATION, *_UNBOUND))
def left_joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"), "left_outer")


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def left_joined_in_a_range(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE), "left_outer")


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def full_joined_at_equal_times(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr("k = k2 and ts = ts2"), "full_outer")


@says(append=_UNBOUND, update=_UNBOUND, complete=(*NO_AGGREGATION, *_UNBOUND))
def semi_joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"), "left_semi")


_ANTI = ("PENSTOCK_ANTI_JOIN",)


@says(append=_ANTI, update=_ANTI, complete=(*NO_AGGREGATION, *_ANTI))
def anti_joined(t: Inputs) -> DataFrame:
    return t.events.join(t.others, F.expr("k = k2"), "left_anti")


_BATCH = ("PENSTOCK_JOIN_WITH_BATCH",)


@says(append=_BATCH, update=_BATCH, complete=(*NO_AGGREGATION, *_BATCH))
def batch_left_joined(t: Inputs) -> DataFrame:
    return t.batch.join(t.events, F.expr("k = k2"), "left_outer")


@says(
    append=_POLICY,
    update=_POLICY,
    complete=(*_MODE, *FOR_EVER, *_POLICY),
)
def windows_of_joined(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE)).groupBy(F.window("ts", "1 minute")).count()


# Stateful functions.


@says(update=("PENSTOCK_FUNCTION_MODE",))
def function_in_append(t: Inputs) -> DataFrame:
    return _with_state(t.events, "append")


@says(append=("PENSTOCK_FUNCTION_MODE",))
def function_in_update(t: Inputs) -> DataFrame:
    return _with_state(t.events, "update")


_AFTER = ("PENSTOCK_FUNCTION_AFTER_AGGREGATION",)


@says(append=_AFTER, update=(*_AFTER, *CHAIN), complete=(*_AFTER, *CHAIN, *FOR_EVER))
def function_after_windows(t: Inputs) -> DataFrame:
    return _with_state(t.windows.drop("window"), "append")


_COUNTED = ("PENSTOCK_FUNCTION_UPDATE_WITH_AGGREGATION",)


@says(append=(*WITHOUT_WATERMARK, *_COUNTED), update=(*_COUNTED, *EACH_KEY), complete=(*_COUNTED, *EACH_KEY))
def function_in_update_counted(t: Inputs) -> DataFrame:
    return _with_state(t.events, "update").groupBy("k").count()


_SEVERAL = ("PENSTOCK_SEVERAL_STATEFUL_FUNCTIONS",)


@says(
    append=_SEVERAL,
    update=(*_SEVERAL, "PENSTOCK_FUNCTION_MODE", "PENSTOCK_FUNCTION_MODE"),
    complete=(*_SEVERAL, *NO_AGGREGATION),
)
def two_functions(t: Inputs) -> DataFrame:
    return _with_state(_with_state(t.events, "append"), "append")


_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_NEEDS = ("PENSTOCK_FUNCTION_NEEDS_ROCKSDB",)


@says(
    append=_NEEDS,
    update=(*_NEEDS, "PENSTOCK_FUNCTION_MODE_DIFFERS"),
    complete=(*_NEEDS, *NO_AGGREGATION),
)
def transformed_without_rocksdb(t: Inputs) -> DataFrame:
    return _transformed(t.events, "append")


@says(update=("PENSTOCK_FUNCTION_MODE_DIFFERS",), spark__sql__streaming__stateStore__providerClass=_ROCKSDB)
def transformed_with_state(t: Inputs) -> DataFrame:
    return _transformed(t.events, "append")


# One stateful operator above another.


@says(update=CHAIN, complete=(*CHAIN, *FOR_EVER, *FOR_EVER))
def windows_of_windows(t: Inputs) -> DataFrame:
    return t.windows.groupBy(F.window(F.window_time("window"), "5 minutes")).count()


@says(
    append=(*WITHOUT_WATERMARK, *WITHOUT_WATERMARK),
    update=(*CHAIN, *EACH_KEY, *EACH_KEY),
    complete=(*CHAIN, *EACH_KEY, *EACH_KEY),
)
def counts_counted(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").count().groupBy("count").agg(F.count("*").alias("keys"))


@says(
    append=(),
    update=("PENSTOCK_DEDUPLICATION_OF_RESULTS", *CHAIN),
    complete=("PENSTOCK_DEDUPLICATION_OF_RESULTS", *CHAIN, *FOR_EVER),
)
def windows_deduplicated(t: Inputs) -> DataFrame:
    return t.windows.dropDuplicates(["window", "k"])


# What the fixes of problems come to.


@says(update=EACH_KEY, append=WITHOUT_WATERMARK, complete=EACH_KEY)
def approximately_distinct_values(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").agg(F.approx_count_distinct("value").alias("values"))


_NO_DELAY = ("PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK",)


@says(append=_NO_DELAY, update=_NO_DELAY, complete=(*_NO_DELAY, *NO_AGGREGATION))
def deduplicated_within_no_watermark(t: Inputs) -> DataFrame:
    return t.events.dropDuplicatesWithinWatermark(["k"])


@says()
def sampled_by_hash(t: Inputs) -> DataFrame:
    return t.events.where("pmod(xxhash64(k), 2) = 0")


@says(append=_POLICY, update=_POLICY, complete=(*NO_AGGREGATION, *_POLICY))
def semi_joined_in_a_range(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE), "left_semi")


@says(append=_POLICY, update=(*_MODE, *_POLICY), complete=(*NO_AGGREGATION, *_POLICY))
def without_a_match(t: Inputs) -> DataFrame:
    return t.timed.join(t.timed_others, F.expr(_RANGE), "left_outer").where("k2 is null")


@says(complete=FOR_EVER)
def latest_in_windows(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.window("ts", "1 minute"), "k").agg(F.max_by("value", "ts").alias("value"))


@says()
def rows_with_a_uuid(t: Inputs) -> DataFrame:
    return t.events.withColumn("id", F.expr("uuid()"))


@says(append=WITHOUT_WATERMARK, update=EACH_KEY, complete=EACH_KEY)
def function_in_append_counted(t: Inputs) -> DataFrame:
    return _with_state(t.events, "append").groupBy("k").count()


@says(spark__sql__streaming__stateStore__providerClass=_ROCKSDB, append=("PENSTOCK_FUNCTION_MODE_DIFFERS",))
def transformed_in_update(t: Inputs) -> DataFrame:
    return _transformed(t.events, "update")


_TWICE = ("PENSTOCK_FUNCTION_MODE_DIFFERS", "PENSTOCK_FUNCTION_MODE_DIFFERS")


@says(spark__sql__streaming__stateStore__providerClass=_ROCKSDB, update=_TWICE)
def transformed_twice(t: Inputs) -> DataFrame:
    return _transformed(_transformed(t.events, "append"), "append")


@says(
    append=(),
    update=("PENSTOCK_FUNCTION_MODE_DIFFERS", *CHAIN),
    complete=(*CHAIN, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=_ROCKSDB,
)
def transformed_after_windows(t: Inputs) -> DataFrame:
    return _transformed(t.windows.drop("window"), "append")
