"""Delta feeds through Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock as ps
from penstock.changes.feeds.delta import DeltaFeed
from tests.changes.feeds.delta_tables import History, changes, check_replay, passed, rows, switch
from tests.changes.frames import Sink, collected, tuples


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
    expected = Counter(tuples(passed(feed, changes(feed), updates=True)))
    batch = ps.changes.read(spark, feed, compute_updates=True, options={"rowsPerTask": 3})
    assert collected(batch) == expected
    check_replay(feed, tmp_path / "table", batch.toArrow())
    options = {} if feed_on else {"maxCommitsPerTrigger": 1}
    sink = Sink(tmp_path)
    assert (
        sink.run(ps.changes.read_stream(spark, feed.url, compute_updates=True, options=options)) == expected
    )
    assert len(sink.batches) == (1 if feed_on else history.table.version() + 1)


def test_a_query_that_was_made_before_the_feed_was_turned_off_does_not_give_unchanged_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    history = made(tmp_path / "table", feed=True, commits=1)
    feed = DeltaFeed(tmp_path / "table", "id")
    query = ps.changes.read(spark, feed)
    switch(tmp_path / "table", False)
    history.update(rows())
    with pytest.raises(Exception, match="FEED_NOT_ENABLED"):
        query.count()
    check_replay(feed, tmp_path / "table", ps.changes.read(spark, feed).toArrow())
