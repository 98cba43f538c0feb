"""Delta feeds through Spark."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.feeds.delta import DeltaFeed
from tests.feeds.delta.tables import History, check_replay, rows, switch
from tests.support.change_frames import Sink, collected, tuples
from tests.support.feed_reading import changes, passed
from tests.support.object_store import SECRET


def made(path: Path, *, feed: bool, commits: int = 2) -> History:
    history = History(path, feed=feed, partitioned=True)
    for number in range(commits):
        history.append(rows((number, "b/ c=%25", 1.0), (number + 100, None, 0.0)))
        history.merge(rows((number, "a", 2.0), (100, "a", 3.0), (number + 200, "a", 0.0)))
    return history


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
def test_a_batch_and_a_stream_give_the_same_changes(
    spark: SparkSession, tmp_path: Path, feed_on: bool
) -> None:
    history = made(tmp_path / "table", feed=feed_on)
    feed = DeltaFeed(tmp_path / "table", "id")
    opened = feed.open()
    expected = Counter(tuples(passed(opened, changes(opened), updates=True)))
    batch = penstock.changes.read(spark, feed, compute_updates=True, options={"rowsPerTask": 3})
    assert collected(batch) == expected
    check_replay(tmp_path / "table", batch.toArrow())
    options = {} if feed_on else {"maxCommitsPerTrigger": 1}
    sink = Sink(tmp_path)
    assert (
        sink.run(penstock.changes.read_stream(spark, feed.url, compute_updates=True, options=options))
        == expected
    )
    assert len(sink.batches) == (1 if feed_on else history.table.version() + 1)


def test_a_query_created_before_the_feed_was_turned_off_omits_unchanged_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    history = made(tmp_path / "table", feed=True, commits=1)
    feed = DeltaFeed(tmp_path / "table", "id")
    query = penstock.changes.read(spark, feed)
    switch(tmp_path / "table", False)
    history.update(rows())
    with pytest.raises(Exception, match="ROWS_OVERWRITTEN"):
        query.count()
    check_replay(tmp_path / "table", penstock.changes.read(spark, feed).toArrow())


def test_a_stream_stops_at_an_overwrite_and_gives_only_the_changed_rows_when_it_is_started_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    history = History(tmp_path / "table", feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0), (3, "c", 3.0)))
    feed = DeltaFeed(tmp_path / "table", "id")
    sink = Sink(tmp_path / "sink")
    frame = penstock.changes.read_stream(spark, feed, compute_updates=True)
    sink.run(frame)
    history.overwrite(rows((1, "a", 1.0), (2, "b", 5.0), (4, "d", 4.0)))
    sink.batches.clear()
    with pytest.raises(Exception, match="ROWS_OVERWRITTEN"):
        sink.run(frame)
    sink.batches.clear()
    found = sink.run(penstock.changes.read_stream(spark, feed, compute_updates=True))
    assert {(row[0], row[3]) for row in found.elements()} == {
        (2, "update_preimage"),
        (2, "update_postimage"),
        (3, "delete"),
        (4, "insert"),
    }


def test_spark_reads_a_delta_table_without_showing_the_credentials(
    spark: SparkSession, storage: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    history = History("s3://lake/spark", feed=False, partitioned=True, storage=storage)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0)))
    history.merge(rows((1, "a", 1.5), (4, "a", 0.0)))
    feed = DeltaFeed(history.path, "id", storage)
    with caplog.at_level(logging.INFO):
        frame = penstock.changes.read(spark, feed, compute_updates=True)
        check_replay(history.path, frame.toArrow(), storage=storage)
        plan = frame._jdf.queryExecution().toString()
    for text in (plan, caplog.text, str(frame.schema)):
        assert SECRET not in text
