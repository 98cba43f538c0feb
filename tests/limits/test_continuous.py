"""Limits with the continuous trigger, on Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import CheckpointMismatchError, ContinuousRefusedError
from tests.support.limited_feeds import Feed, is_prefix

CONTINUOUS = penstock.Trigger.continuous("50 ms")


def test_a_query_ends_with_exactly_its_rows_and_continues_with_a_higher_limit(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path).add(40, 30)
    feed.run(25, "id % 2 = 0", trigger=CONTINUOUS)
    taken = feed.taken()
    assert sum(map(len, taken.values())) == 25
    assert all(is_prefix(places, lambda place: place % 2 == 0) for places in taken.values())
    assert feed.progress() == "25 of 25"
    assert penstock.state.limit_progress(tmp_path / "ck").reached
    assert penstock.state.show(spark, tmp_path / "ck").engine == "continuous"
    feed.add(20, 20).run(30, "id % 2 = 0", trigger=CONTINUOUS)
    assert sum(map(len, feed.taken().values())) == 30
    assert feed.progress() == "30 of 30"
    with pytest.raises(CheckpointMismatchError, match=r"LIMIT_TRIGGER\].*the continuous trigger has counted"):
        feed.start(40, "id % 2 = 0")
    lower = feed.run(9, "id % 2 = 0", trigger=CONTINUOUS)
    assert lower.status["message"].endswith("its limit of 9 rows is lower than the 30 rows that have passed")
    assert feed.progress() == "30 of 30"
    unlimited = feed.stream("id % 2 = 0").write(penstock.QueueSink("out", url=store_url))
    with pytest.raises(CheckpointMismatchError, match=r"with limit\(30\) before, but now has no limit"):
        unlimited.start(checkpoint=tmp_path / "ck", trigger=CONTINUOUS)


def test_a_query_that_ends_at_its_limit_removes_its_temporary_checkpoint(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sink = penstock.FunctionSink(lambda batch: None)
    query = (
        penstock.stream(spark, penstock.RateSource(100))
        .limit(5)
        .write(sink, guarantee="at_least_once")
        .start(trigger=CONTINUOUS)
    )
    assert list(tmp_path.glob("penstock-continuous-*"))
    assert query.awaitTermination(60)
    assert query.status["message"] == "TERMINATED: its limit of 5 rows is reached"
    assert not list(tmp_path.glob("penstock-continuous-*"))


def test_limits_that_the_continuous_trigger_cannot_count_are_refused(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed, sink = Feed(spark, store_url, tmp_path), penstock.QueueSink("out", url=store_url)
    per_key = feed.stream().limit(1, per=["id"])
    not_last = feed.stream().limit(1).transform(lambda df: df.where("id > 1"))
    for stream, why in ((per_key, "keeps state"), (not_last, "after the last transform")):
        with pytest.raises(ContinuousRefusedError, match=why) as found:
            stream.write(sink).start(trigger=CONTINUOUS)
        assert found.value.condition == "CONTINUOUS_REFUSED.LIMIT"
    feed.add(5, 5).run(3)
    with pytest.raises(CheckpointMismatchError, match="micro-batches count"):
        feed.start(5, trigger=CONTINUOUS)
