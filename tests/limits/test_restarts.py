"""A limit counts across all runs of a query; another limit continues from the count."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import penstock
from penstock.errors import CheckpointMismatchError, CommitRefusedError
from penstock.pipeline import micro_batches
from penstock.testing import replay_last_batch
from tests.support.limited_feeds import NOW, Feed, is_prefix
from tests.support.spark_queues import one_store

SIZES = st.integers(1, 9)


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    limit=st.integers(1, 20),
    size=SIZES,
    filtered=st.booleans(),
    runs=st.lists(st.tuples(SIZES, SIZES, st.booleans()), min_size=1, max_size=3),
)
def test_exactly_the_limit_passes_with_any_micro_batches_partitions_and_restarts(
    spark: SparkSession, limit: int, size: int, filtered: bool, runs: list[tuple[int, int, bool]]
) -> None:
    """Each run finds more rows; after some of them Spark forgets its last micro-batch, and repeats it."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        feed = Feed(spark, f"sqlite:///{folder}/store.db", folder, partitions=2)
        where = "id % 3 != 1" if filtered else None
        for first, second, forget in runs:
            feed.add(first, second)
            feed.start(limit, where, trigger=NOW, maxRowsPerTrigger=size).awaitTermination()
            if forget and any((folder / "ck/commits").glob("[0-9]*")):
                replay_last_batch(folder / "ck")
        feed.start(limit, where, trigger=NOW, maxRowsPerTrigger=size).awaitTermination()
        taken = feed.taken()
        there = [
            sum(1 for place in range(sum(run[p] for run in runs)) if _passes(p, place, filtered))
            for p in (0, 1)
        ]
        assert sum(map(len, taken.values())) == min(limit, sum(there))
        for partition, places in taken.items():
            assert is_prefix(places, lambda place, p=partition: _passes(p, place, filtered))
        if not filtered:
            assert feed.offsets() == [len(taken.get(partition, ())) for partition in (0, 1)]
        feed.store.close()


def _passes(partition: int, place: int, filtered: bool) -> bool:
    return not filtered or (partition * 10_000 + place) % 3 != 1


@one_store
def test_a_query_whose_limit_is_reached_ends_immediately(
    spark: SparkSession, store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    feed = Feed(spark, store_url, tmp_path).add(10, 10)
    first = feed.run(8)
    again = feed.start(8)
    assert (again.isActive, again.awaitTermination(1), again.stop()) == (False, True, True)
    assert (again.id, again.recentProgress, again.lastProgress) == (first.id, [], None)
    assert "ends immediately: its limit of 8 rows is reached" in again.status["message"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "penstock.limits"):
        lower = feed.start(5)
    assert not lower.isActive
    assert "its limit of 5 rows is lower than the 8 rows that have passed" in caplog.text
    assert (sum(map(len, feed.taken().values())), sum(feed.offsets())) == (8, 8)


@one_store
def test_the_consumer_is_advanced_when_the_query_ends_immediately(
    spark: SparkSession, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous run was killed right after its last commit."""
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(10)
    pipeline = feed.stream().limit(4).write(penstock.FunctionSink(lambda _rows: None))

    def run() -> None:
        query = pipeline.start(checkpoint=tmp_path / "ck", trigger=penstock.Trigger.processing_time("1 hour"))
        assert query.awaitTermination(60)

    with monkeypatch.context() as killed:
        killed.setattr(micro_batches, "sync_consumers", lambda *_: None)
        run()
    assert feed.offsets() == [0]
    run()
    assert feed.offsets() == [4]


@one_store
def test_a_higher_limit_continues_from_the_count(spark: SparkSession, store_url: str, tmp_path: Path) -> None:
    feed = Feed(spark, store_url, tmp_path).add(10, 10)
    feed.run(8)
    feed.run(13, maxRowsPerTrigger=2)
    taken = feed.taken()
    assert sum(map(len, taken.values())) == 13
    assert (feed.offsets(), feed.progress()) == ([len(taken[0]), len(taken[1])], "13 of 13")


@one_store
def test_a_micro_batch_is_repeated_with_the_limit_it_was_planned_with(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    """With a higher one it would have rows that the sink, which has the micro-batch already, would not
    write.
    """
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(20)
    feed.run(5, "id >= 0", maxRowsPerTrigger=4)
    replay_last_batch(tmp_path / "ck")
    assert feed.progress() == "4 of 5"
    for other in (9, 2):
        with pytest.raises(CommitRefusedError, match=r"start the query once with limit\(5\)"):
            feed.start(other, "id >= 0")
    feed.run(5, "id >= 0", maxRowsPerTrigger=4)
    feed.run(9, "id >= 0", maxRowsPerTrigger=4)
    assert feed.taken() == {0: [*range(5), *range(8, 12)]}, (
        "behind the micro-batch that reached the first limit"
    )


@one_store
def test_a_micro_batch_after_the_limit_is_finished_before_another_limit_continues(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(12)
    feed.start(5, "id >= 0", trigger=NOW, on_limit="keep", maxRowsPerTrigger=4).awaitTermination()
    replay_last_batch(tmp_path / "ck")
    feed.add(8)
    with pytest.raises(CommitRefusedError, match=r"start the query once with limit\(5\)"):
        feed.start(9, "id >= 0")
    feed.run(5, "id >= 0", maxRowsPerTrigger=4)
    numbers = {path.name for path in (tmp_path / "ck/offsets").glob("[0-9]*")}
    assert numbers == {"0", "1", "2"}, "no further one has begun"
    feed.run(9, "id >= 0", maxRowsPerTrigger=4)
    assert feed.taken() == {0: [*range(5), *range(12, 16)]}


@one_store
def test_a_checkpoint_of_a_query_without_a_limit_is_refused_with_one(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(3)
    plain = feed.stream().write(penstock.QueueSink("out", url=store_url))
    plain.start(checkpoint=tmp_path / "ck", trigger=NOW).awaitTermination()
    with pytest.raises(CheckpointMismatchError, match=r"MISMATCH.LIMIT\].*has run without a limit before"):
        feed.start(5)
    assert not (tmp_path / "ck/penstock").exists()


@one_store
def test_a_limit_that_was_removed_is_missed_before_a_micro_batch_is_planned_without_it(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(10)
    feed.run(4, trigger=NOW)
    unlimited = feed.stream().write(penstock.QueueSink("out", url=store_url))
    with pytest.raises(CheckpointMismatchError, match=r"MISMATCH.LIMIT\].*has run with limit\(4\) before"):
        unlimited.start(checkpoint=tmp_path / "ck", trigger=NOW)
    feed.run(6, trigger=NOW)
    assert (feed.progress(), feed.taken(), feed.offsets()) == ("6 of 6", {0: [0, 1, 2, 3, 4, 5]}, [6])


@one_store
def test_the_limit_is_stored_with_the_checkpoint(spark: SparkSession, store_url: str, tmp_path: Path) -> None:
    feed = Feed(spark, store_url, tmp_path, partitions=1).add(3)
    feed.start(2, trigger=NOW).awaitTermination()
    assert json.loads((tmp_path / "ck/penstock/limit.json").read_text()) == {"version": 1, "rows": 2}
