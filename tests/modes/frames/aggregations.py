"""Aggregations, and operators above one: deduplications, sorting, limits, other aggregations."""

from __future__ import annotations

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from tests.modes.frames.frame import (
    CHAIN,
    EACH_KEY,
    FOR_EVER,
    NO_AGGREGATION,
    ROCKSDB,
    WITHOUT_WATERMARK,
    Inputs,
    says,
)


def largest(values: pd.Series) -> int:
    return int(values.max())


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
def event_time_recreated(t: Inputs) -> DataFrame:
    return (
        t.timed.select(F.col("ts").cast("string").cast("timestamp").alias("t"))
        .groupBy(F.window("t", "1 minute"))
        .count()
    )


@says(update=("PENSTOCK_SESSION_WINDOW_IN_UPDATE",), complete=FOR_EVER)
def sessions(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.session_window("ts", "1 minute"), "k").count()


_OF_ALL_ROWS = ("PENSTOCK_SESSIONS_OF_ALL_ROWS",)


@says(
    append=_OF_ALL_ROWS,
    update=("PENSTOCK_SESSION_WINDOW_IN_UPDATE", *_OF_ALL_ROWS),
    complete=(*_OF_ALL_ROWS, *FOR_EVER),
)
def sessions_of_all_rows(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.session_window("ts", "1 minute")).count()


@says(
    append=_OF_ALL_ROWS,
    update=("PENSTOCK_SESSION_WINDOW_IN_UPDATE", *_OF_ALL_ROWS),
    complete=(*_OF_ALL_ROWS, *FOR_EVER),
)
def sessions_by_a_literal(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.session_window("ts", "1 minute"), F.lit(1)).count()


@says(update=("PENSTOCK_SESSION_WINDOW_IN_UPDATE",), complete=FOR_EVER)
def sessions_by_a_constant_column(t: Inputs) -> DataFrame:
    return t.timed.withColumn("all", F.lit(1)).groupBy(F.session_window("ts", "1 minute"), "all").count()


@says(
    append=("PENSTOCK_DISTINCT_AGGREGATE", *WITHOUT_WATERMARK),
    update=("PENSTOCK_DISTINCT_AGGREGATE", *EACH_KEY),
    complete=("PENSTOCK_DISTINCT_AGGREGATE", *EACH_KEY),
)
def distinct_values(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").agg(F.count_distinct("value"))


@says(append=WITHOUT_WATERMARK, update=EACH_KEY, complete=EACH_KEY)
def distinct_in_sql(t: Inputs) -> DataFrame:
    return t.events.sparkSession.sql("SELECT DISTINCT k FROM {events}", events=t.events)


@says(complete=FOR_EVER)
def distinct_in_sql_with_event_time(t: Inputs) -> DataFrame:
    return t.events.sparkSession.sql("SELECT DISTINCT ts AS seen, k FROM {events}", events=t.timed)


@says(append=(*WITHOUT_WATERMARK, *FOR_EVER), update=FOR_EVER, complete=FOR_EVER)
def windows_by_another_name(t: Inputs) -> DataFrame:
    return t.events.select(F.window("ts", "1 minute").alias("minute")).groupBy("minute").count()


@says(append=WITHOUT_WATERMARK, update=EACH_KEY, complete=EACH_KEY)
def count_by_a_column_called_window(t: Inputs) -> DataFrame:
    return t.events.groupBy(F.col("k").alias("window")).count()


_SUBTOTALS = ("PENSTOCK_SUBTOTALS_OVER_TIME",)


@says(append=_SUBTOTALS, update=_SUBTOTALS, complete=FOR_EVER)
def windows_rolled_up(t: Inputs) -> DataFrame:
    return t.timed.withColumn("minute", F.window("ts", "1 minute")).rollup("minute", "k").count()


@says(complete=FOR_EVER)
def windows_in_grouping_sets(t: Inputs) -> DataFrame:
    return (
        t.timed.select(F.window("ts", "1 minute").alias("minute"), "k")
        .groupingSets([["minute", "k"], ["minute"]], "minute", "k")
        .count()
    )


_IN_PYTHON = ("PENSTOCK_PYTHON_AGGREGATE",)


@says(append=_IN_PYTHON, update=_IN_PYTHON, complete=(*_IN_PYTHON, *FOR_EVER))
def aggregated_in_python(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.window("ts", "1 minute")).agg(F.pandas_udf(largest, "long")("value"))


@says(complete=FOR_EVER)
def list_reduced_in_python(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.window("ts", "1 minute"), "k").agg(
        F.udf(max, "long")(F.collect_list("value")), F.udf(abs, "long")("k")
    )


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


@says(update=EACH_KEY, append=WITHOUT_WATERMARK, complete=EACH_KEY)
def approximately_distinct_values(t: Inputs) -> DataFrame:
    return t.events.groupBy("k").agg(F.approx_count_distinct("value").alias("values"))


_NO_DELAY = ("PENSTOCK_DEDUPLICATION_WITHOUT_WATERMARK",)


@says(append=_NO_DELAY, update=_NO_DELAY, complete=(*_NO_DELAY, *NO_AGGREGATION))
def deduplicated_within_no_watermark(t: Inputs) -> DataFrame:
    return t.events.dropDuplicatesWithinWatermark(["k"])


@says(complete=FOR_EVER)
def latest_in_windows(t: Inputs) -> DataFrame:
    return t.timed.groupBy(F.window("ts", "1 minute"), "k").agg(F.max_by("value", "ts").alias("value"))


@says(update=("PENSTOCK_SESSION_WINDOW_IN_UPDATE",), complete=FOR_EVER)
def sessions_by_another_name(t: Inputs) -> DataFrame:
    return (
        t.timed.select(F.session_window("ts", "1 minute").alias("visit"), "k").groupBy("visit", "k").count()
    )


@says(append=WITHOUT_WATERMARK, update=EACH_KEY, complete=EACH_KEY)
def count_by_a_column_called_session_window(t: Inputs) -> DataFrame:
    return t.events.groupBy(F.col("k").alias("session_window")).count()


@says(
    append=WITHOUT_WATERMARK,
    update=EACH_KEY,
    complete=(*FOR_EVER, *EACH_KEY),
)
def windows_and_counts_united(t: Inputs) -> DataFrame:
    return t.windows.select("k", "count").union(t.events.groupBy("k").count())


_POLICY = ("PENSTOCK_WATERMARK_POLICY_MIN",)


@says(
    append=_POLICY,
    update=(*_POLICY, "PENSTOCK_SESSION_WINDOW_IN_UPDATE"),
    complete=(*_POLICY, *FOR_EVER, *FOR_EVER),
)
def windows_and_sessions_united(t: Inputs) -> DataFrame:
    sessions = t.timed.groupBy(F.session_window("ts", "1 minute"), "k").count()
    return t.windows.select("window.start", "k", "count").union(
        sessions.select("session_window.end", "k", "count")
    )


@says(complete=("PENSTOCK_ROWS_BESIDE_GROUPS", *FOR_EVER))
def windows_and_events_united(t: Inputs) -> DataFrame:
    return t.windows.select("window.start", "k", "count").union(t.events.select("ts", "k", "value"))


@says(append=_NO_DELAY, update=_NO_DELAY, complete=(*_NO_DELAY, *NO_AGGREGATION))
def deduplicated_within_a_lost_watermark(t: Inputs) -> DataFrame:
    return t.timed.select("k", "value").dropDuplicatesWithinWatermark(["k"])


_OF_RESULTS = ("PENSTOCK_DEDUPLICATION_OF_RESULTS", *CHAIN)


@says(
    append=("PENSTOCK_ROCKSDB_CHAIN",),
    update=_OF_RESULTS,
    complete=(*_OF_RESULTS, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def windows_deduplicated_in_rocksdb(t: Inputs) -> DataFrame:
    return t.windows.toDF("minute", "who", "count").dropDuplicatesWithinWatermark(["minute", "who"])


@says(
    update=_OF_RESULTS,
    complete=(*_OF_RESULTS, *FOR_EVER),
    spark__sql__streaming__stateStore__providerClass=ROCKSDB,
)
def windows_repartitioned_and_deduplicated_in_rocksdb(t: Inputs) -> DataFrame:
    return t.windows.repartition(2).dropDuplicates(["window", "k"])
