"""``read`` and ``read_stream`` pass the options on to the passes."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.errors import InvalidChangeOptionError
from tests.support.change_frames import Sink

BASE = 1_700_000_000 // 3600 * 3600
TIMES = (BASE + 10, BASE + 8, BASE + 8, BASE + 7210)
"""Of the commits, in seconds: they go backwards, stand still, and come two hours later."""


@pytest.fixture
def feed(tmp_path: Path) -> penstock.SnapshotFeed:
    """Each snapshot is a row with the snapshot's number, which is a commit of its own."""
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for version, time in enumerate(TIMES, 1):
        path = folder / f"{version}.parquet"
        pq.write_table(pa.table({"id": [1], "n": [version]}), path)
        os.utime(path, (time, time))
    return penstock.SnapshotFeed(str(folder), "id")


def shown(df: DataFrame, folder: Path) -> Counter[tuple[object, ...]]:
    return Sink(folder).run(df.select("n", "_change_type", "_commit_version"))


def hourly(spark: SparkSession, feed: penstock.SnapshotFeed, **more: str) -> DataFrame:
    one_each = {"maxCommitsPerTrigger": 1}
    return penstock.changes.read_stream(
        spark, feed, deduplication_mode="netChanges", net_window="1 hour", options=one_each, **more
    )


def test_the_url_of_a_feed_is_not_replaced_by_an_option(
    spark: SparkSession, feed: penstock.SnapshotFeed
) -> None:
    with pytest.raises(InvalidChangeOptionError, match="options has a url"):
        penstock.changes.read(spark, feed, options={"URL": "snapshots:/tmp/other?row_id=id"})


def test_a_delay_for_commit_times_that_go_backwards(
    spark: SparkSession, feed: penstock.SnapshotFeed, tmp_path: Path
) -> None:
    found = shown(hourly(spark, feed, watermark_delay="5 seconds"), tmp_path)
    assert found == Counter([(3, "insert", 3)])


def test_without_a_delay_a_commit_time_that_goes_backwards_fails_the_query(
    spark: SparkSession, feed: penstock.SnapshotFeed, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"LATE_COMMIT.*watermark_delay"):
        shown(hourly(spark, feed), tmp_path)


def test_the_strategy_and_the_kept_watermark(spark: SparkSession, feed: penstock.SnapshotFeed) -> None:
    def plan(**more: object) -> str:
        df = penstock.changes.read_stream(spark, feed, **more)  # type: ignore[arg-type]  # as it comes
        return str(df._jdf.queryExecution().analyzed().toString())

    assert "EventTimeWatermark" not in plan()
    assert "Aggregate" not in plan(strategy="micro_batch", keep_watermark=True)
    kept = plan(keep_watermark=True, watermark_delay="5 seconds")
    assert re.search(r"EventTimeWatermark .*_commit_timestamp#\d+: timestamp, 5 seconds", kept), kept
    assert "Aggregate" in plan(strategy="watermark")


def test_a_batch_of_net_changes_in_windows(spark: SparkSession, feed: penstock.SnapshotFeed) -> None:
    df = penstock.changes.read(spark, feed, deduplication_mode="netChanges", net_window="1 hour")
    rows = Counter((row.n, row._change_type, row._commit_version) for row in df.collect())
    assert rows == Counter([(3, "insert", 3), (3, "delete", 4), (4, "insert", 4)])
