"""A query with a limit lets exactly so many rows through, and ends by itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import (
    CheckpointNotFoundError,
    InvalidInputError,
    InvalidOptionError,
    NotFoundError,
    OutputModeRefusedError,
)
from tests.support.limited_feeds import NOW, Feed, is_prefix
from tests.support.made_checkpoints import CASES, settings
from tests.support.spark_queues import one_store
from tests.support.sql_tables import rows
from tests.support.waiting import wait_until


def test_a_query_ends_with_its_rows_and_reads_no_more(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path).add(30, 60)
    query = feed.run(25, maxRowsPerTrigger=10)
    taken = feed.taken()
    assert sum(map(len, taken.values())) == 25
    assert all(is_prefix(places) for places in taken.values())
    assert feed.offsets() == [len(taken[0]), len(taken[1])], "right behind the last rows that counted"
    assert sum(progress.numInputRows for progress in query.recentProgress) == 25
    assert (feed.progress(), query.exception()) == ("25 of 25", None)


@one_store
def test_a_query_with_a_filter_ends_in_the_micro_batch_that_reaches_the_limit(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path).add(40, 80)
    feed.run(15, "id % 2 = 0", maxRowsPerTrigger=12)
    taken = feed.taken()
    assert sum(map(len, taken.values())) == 15
    assert all(is_prefix(places, lambda place: place % 2 == 0) for places in taken.values())
    assert sum(feed.offsets()) == 36, "6 rows of 12 pass, so the third micro-batch reaches 15"


@one_store
def test_a_running_query_waits_for_the_remaining_rows_of_its_limit(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(4)
    query = feed.start(6)
    query.processAllAvailable()
    assert (query.isActive, feed.progress()) == (True, "4 of 6")
    feed.add(5)
    assert query.awaitTermination(60)
    assert (feed.taken(), feed.offsets(), feed.progress()) == ({0: list(range(6))}, [6], "6 of 6")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metadata").write_text('{"id": "1"}')
    with pytest.raises(NotFoundError, match="has no limit"):
        penstock.limits.limit_progress(tmp_path / "other")
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint at"):
        penstock.limits.limit_progress(tmp_path / "nowhere")


@one_store
def test_a_query_kept_running_after_its_limit_drops_further_rows(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(4)
    query = feed.start(6, on_limit="keep")
    feed.add(5)
    query.processAllAvailable()
    assert (query.isActive, feed.offsets(), feed.progress()) == (True, [9], "6 of 6")
    assert query.stop()
    assert sum(map(len, feed.taken().values())) == 6


@one_store
def test_a_query_on_a_source_that_is_not_a_queue_stops_too(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path)
    rate = penstock.stream(spark, penstock.RateSource(rows_per_second=100))
    named = rate.transform(lambda df: df.selectExpr("value as id", "'rate' as name"))

    def run(n: int) -> None:
        query = (
            named.limit(n).write(penstock.QueueSink("out", url=store_url)).start(checkpoint=tmp_path / "ck")
        )
        assert query.awaitTermination(60)

    run(7)
    assert (sorted(feed.taken()[0]), feed.progress()) == (list(range(7)), "7 of 7")
    # The source has a micro-batch of its own in flight, maybe, which this finishes.
    run(7)
    run(9)
    assert (len(feed.taken()[0]), feed.progress()) == (9, "9 of 9")


@one_store
def test_a_table_gets_exactly_the_rows_of_a_limit_in_the_middle_of_the_pipeline(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(20)
    after = feed.stream(maxRowsPerTrigger=4).limit(10).transform(lambda df: df.where("id % 2 = 0"))
    query = after.write(penstock.TableSink("evens", url=store_url)).start(checkpoint=tmp_path / "ck")
    assert query.awaitTermination(60)
    assert rows(store_url, "evens", "id") == [(0,), (2,), (4,), (6,), (8,)]
    assert (feed.offsets(), feed.progress()) == ([10], "10 of 10")


@one_store
def test_rows_are_not_counted_by_index_if_some_may_have_been_lost(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(10)
    feed.start(8, failOnDataLoss=False, trigger=NOW, maxRowsPerTrigger=3).awaitTermination()
    assert sum(map(len, feed.taken().values())) == 8
    assert feed.offsets() == [9], "a whole micro-batch"


@one_store
def test_a_limit_after_an_aggregation_in_complete_mode_applies_to_each_micro_batch(
    spark: SparkSession, store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.pipeline")
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(6)
    groups = feed.stream(maxRowsPerTrigger=3).transform(lambda df: df.groupBy("id").count())
    sink = penstock.TableSink("groups", url=store_url)
    query = groups.limit(2).write(sink, output_mode="complete").start(checkpoint=tmp_path / "ck", trigger=NOW)
    query.awaitTermination()
    assert len(rows(store_url, "groups")) == 2
    assert feed.offsets() == [6], "it did not stop at two rows"
    assert "limit_per_trigger" in [getattr(record, "action", "") for record in caplog.records]


@one_store
def test_a_limit_before_an_aggregation_in_complete_mode_counts_the_rows_of_the_stream(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(12)
    totals = feed.stream(maxRowsPerTrigger=4).limit(6).transform(lambda df: df.groupBy().count())
    query = totals.write(penstock.TableSink("totals", url=store_url), output_mode="complete").start(
        checkpoint=tmp_path / "ck"
    )
    assert query.awaitTermination(60), "it ends by itself"
    assert rows(store_url, "totals") == [(6,)]
    assert (feed.progress(), feed.offsets()) == ("6 of 6", [6])


@one_store
def test_update_mode_and_complete_mode_without_aggregation_are_refused_in_sparks_words(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path)
    limited = feed.stream().limit(2)
    sink = penstock.TableSink("t", keys=["id"], url=store_url)
    report = penstock.modes.check(limited.to_df())
    for mode, code, words in [
        ("update", "PENSTOCK_LIMIT_IN_UPDATE", "Limits are not supported on streaming DataFrames/Datasets"),
        ("complete", "PENSTOCK_COMPLETE_WITHOUT_AGGREGATION", "no streaming aggregations"),
    ]:
        with pytest.raises(OutputModeRefusedError, match=code):
            limited.write(sink, output_mode=mode).start(checkpoint=tmp_path / "ck")
        (sparks_error,) = (problem.spark for problem in report[mode].problems if problem.code == code)
        assert words in str(sparks_error)


@one_store
def test_invalid_limits_are_refused(spark: SparkSession, store_url: str, tmp_path: Path) -> None:
    stream = Feed(spark, store_url, tmp_path).stream()
    for wrong in (0, -1, 2**31, 1.0, True, "10"):
        with pytest.raises(InvalidOptionError, match=r"OPTION.VALUE\].*a limit is a whole number"):
            stream.limit(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"OPTION.VALUE\].*Did you mean 'stop'"):
        stream.limit(1, on_limit="stp")
    with pytest.raises(InvalidOptionError, match=r"OPTION.CONFLICT\].*with per, each key has its own"):
        stream.limit(1, per=["id"], on_limit="stop")
    with pytest.raises(InvalidOptionError, match=r"OPTION.MISSING\].*pass per"):
        stream.limit(1, ttl="1 hour")
    with pytest.raises(InvalidInputError, match=r"SEVERAL_LIMITS\].*already has a limit"):
        stream.limit(1).limit(2)
    inside = stream.transform(lambda df: df.limit(3)).limit(1).write(penstock.QueueSink("out", url=store_url))
    with pytest.raises(
        InvalidInputError, match=r"SEVERAL_LIMITS\].*a pipeline has one limit, but the plan of this one has 2"
    ):
        inside.start(checkpoint=tmp_path / "ck")


@one_store
def test_with_rocksdb_state_the_count_is_read_by_spark(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    provider = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.set(provider, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    try:
        feed = Feed(spark, store_url, tmp_path, partitions=1).add(30)
        feed.start(20, "id % 2 = 0", trigger=NOW, maxRowsPerTrigger=10).awaitTermination()
        assert feed.progress() == "15 of 20"
        feed.add(40)
        feed.run(20, "id % 2 = 0", maxRowsPerTrigger=10)
    finally:
        spark.conf.unset(provider)
    assert sum(map(len, feed.taken().values())) == 20
    assert feed.offsets()[0] >= 40
    assert feed.progress() == "20 of 20"
    wait_until(lambda: not spark.streams.active, 30, "no query runs on")


@one_store
def test_the_count_in_state_files_with_unique_names_is_read_by_a_session_without_that_setting(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(30)
    with settings(spark, CASES["windows with state ids"].settings):
        feed.start(20, "id % 2 = 0", trigger=NOW, maxRowsPerTrigger=10).awaitTermination()
    assert feed.progress() == "15 of 20"
    shown = penstock.state.show(spark, tmp_path / "ck")
    assert (str(shown.limit), shown.unknown) == ("15 of 20", ())
