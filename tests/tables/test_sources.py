"""Tables whose rows come from elsewhere than their own store."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock as ps
from penstock.errors import CheckpointMismatch
from penstock.testing import replay_last_batch
from tests.tables.support import NOW, Feed, named, rows, totals

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("v", pa.int64())])


def test_a_consumer_of_another_store_follows(spark: SparkSession, store_url: str, tmp_path: Path) -> None:
    """The table's store has a mark of its own for it."""
    feed = Feed(spark, f"sqlite:///{tmp_path}/elsewhere.db", tmp_path, SCHEMA)
    sink = ps.TableSink(named(store_url, "totals"), ["k"], store_url)
    for number in range(3):
        feed.add({"id": number, "k": "a", "v": 10**number}).run(sink, totals, mode="update")
        replay_last_batch(tmp_path / "ck")
    feed.run(sink, totals, mode="update")
    assert rows(store_url, "totals") == [("a", 111, 3)]
    assert feed.store.consumer("c").lag("in").rows == 0


def test_any_replayable_source_is_counted_by_the_ledger(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    sink = ps.TableSink(named(store_url, "plain"), url=store_url)
    frame = spark.readStream.schema("id bigint, name string").json(str(files))
    pipeline = ps.stream(spark, frame).write(sink)
    for number in range(2):
        (files / f"{number}.json").write_text(f'{{"id": {number}, "name": "x"}}\n')
        for _ in range(2):
            pipeline.start(checkpoint=tmp_path / "ck", trigger=NOW).awaitTermination()
            replay_last_batch(tmp_path / "ck")
    assert rows(store_url, "plain") == [(0, "x"), (1, "x")]


def test_an_app_id_of_another_checkpoint_is_refused(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, SCHEMA)
    sink = feed.table("plain", app_id="mine")
    feed.add({"id": 1}).run(sink)
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(CheckpointMismatch, match="the checkpoint is an old copy, or a new one"):
        feed.run(sink, checkpoint="other")
    assert rows(store_url, "plain", "id") == [(1,)]
