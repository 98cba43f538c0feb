"""Delta feeds through Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock as ps
from penstock.changes.feeds.delta import DeltaFeed
from tests.changes.feeds.delta_tables import History, changes, check_replay, passed, rows, switch
from tests.changes.frames import Sink, collected, tuples
from tests.support.waiting import wait_until


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


@pytest.mark.crash
def test_a_stream_that_is_killed_in_its_course_gives_every_change_once(
    tmp_path: Path, run_child: Callable[..., Any]
) -> None:
    made(tmp_path / "table", feed=True, commits=3)
    feed = DeltaFeed(tmp_path / "table", "id")
    expected = Counter(
        (row["id"], row["_change_type"], row["_commit_version"])
        for row in passed(feed, changes(feed)).to_pylist()
    )
    url = f"sqlite:///{tmp_path}/store.db"
    schema = pa.schema([("id", pa.int64()), ("change", pa.string()), ("version", pa.int64())])
    with ps.connect(url, create=True) as store:
        queue = store.create_queue("out", schema)

        def there() -> Counter[tuple[Any, ...]]:
            return Counter(tuple(row.values()) for row in queue.read(0, 0).to_pylist())

        def child(number: int) -> Any:
            return run_child(
                "tests.changes.feeds.delta_child",
                tmp_path / f"spark-{number}",
                feed.path,
                url,
                tmp_path / "ck",
            )

        first = child(0)
        wait_until(lambda: there() or first.returncode is not None, 120, "the first rows are there")
        first.kill_tree()
        found = there()
        assert found, first.output
        assert found < expected, "it was killed too late"
        second = child(1)
        assert second.wait() == 0, second.output
        assert there() == expected
