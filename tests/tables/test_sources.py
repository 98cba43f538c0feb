"""Tables whose rows come from outside their own store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.errors import CheckpointMismatchError, InvalidOptionError
from penstock.testing import replay_last_batch
from tests.support.sql_tables import NOW, Feed, named, rows, totals

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string()), ("v", pa.int64())])


def test_a_consumer_of_another_store_follows_the_commits(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    """The table's store has a mark of its own for it."""
    feed = Feed(spark, f"sqlite:///{tmp_path}/elsewhere.db", tmp_path, SCHEMA)
    sink = penstock.TableSink(named(store_url, "totals"), ["k"], store_url)
    for number in range(3):
        feed.add({"id": number, "k": "a", "v": 10**number}).run(sink, totals, mode="update")
        replay_last_batch(tmp_path / "ck")
    feed.run(sink, totals, mode="update")
    assert rows(store_url, "totals") == [("a", 111, 3)]
    assert feed.store.consumer("c").lag("in").rows == 0


def test_micro_batches_of_any_replayable_source_are_recorded_in_the_ledger(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    sink = penstock.TableSink(named(store_url, "plain"), url=store_url)
    frame = spark.readStream.schema("id bigint, name string").json(str(files))
    pipeline = penstock.stream(spark, frame).write(sink)
    for number in range(2):
        (files / f"{number}.json").write_text(f'{{"id": {number}, "name": "x"}}\n')
        for _ in range(2):
            pipeline.start(checkpoint=tmp_path / "ck", trigger=NOW).awaitTermination()
            replay_last_batch(tmp_path / "ck")
    assert rows(store_url, "plain") == [(0, "x"), (1, "x")]


def test_the_app_id_of_another_checkpoint_is_refused(
    spark: SparkSession, store_url: str, tmp_path: Path
) -> None:
    feed = Feed(spark, store_url, tmp_path, SCHEMA)
    sink = feed.table("plain", app_id="mine")
    feed.add({"id": 1}).run(sink)
    feed.store.consumer("c").seek("in", to="earliest")
    with pytest.raises(CheckpointMismatchError, match="the checkpoint is an old copy, or a new one"):
        feed.run(sink, checkpoint="other")
    assert rows(store_url, "plain", "id") == [(1,)]


@pytest.fixture
def changes(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """A feed of which each pair of ``shop`` and ``id`` is a row."""
    url = f"sqlite:///{tmp_path}/changes.db"
    penstock.connect(url, create=True).close()
    schema = SCHEMA.append(pa.field("shop", pa.string()))
    feed = penstock.QueueFeed.create(
        "changes", schema, penstock.ChangeContract(["shop", "id"], whole_commits=True), store=url
    )
    return penstock.changes.read_stream(spark, feed)


@pytest.mark.parametrize(
    "change",
    [
        lambda df: df,
        lambda df: df.where("v > 0").withColumn("v", F.col("v") + 1),
        lambda df: df.withColumnRenamed("shop", "place").select(
            "id", "place", "k", "_change_type", "_commit_version"
        ),
    ],
)
@pytest.mark.parametrize("keys", [["id"], ["k"]])
@pytest.mark.parametrize("delta", [False, True])
def test_keys_under_which_rows_of_a_feed_could_replace_each_other_are_refused(
    spark: SparkSession,
    changes: DataFrame,
    tmp_path: Path,
    change: Callable[[DataFrame], DataFrame],
    keys: list[str],
    delta: bool,
) -> None:
    url = f"delta://{tmp_path}/lake" if delta else f"sqlite:///{tmp_path}/store.db"
    pipeline = penstock.stream(spark, change(changes)).write(
        penstock.TableSink("t", keys, url, apply_changes=True)
    )
    with pytest.raises(
        InvalidOptionError, match=r"LOSES_CHANGES\].*two of its rows with the same keys"
    ) as refused:
        pipeline.start(checkpoint=tmp_path / "ck", trigger=NOW)
    assert refused.value.parameters["option"] == "keys"


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        (["id", "shop"], lambda df: df),
        (["id", "shop", "k"], lambda df: df),
        (["id", "place"], lambda df: df.withColumnRenamed("shop", "place")),
        (["key"], lambda df: df.withColumn("key", F.concat("shop", "id")).drop("shop", "id")),
        (["k"], lambda df: df.select("k", "v", "_change_type", "_commit_version")),
        (
            ["k"],
            lambda df: df.select(
                F.col("id").alias("id", metadata={}), "k", "_change_type", "_commit_version"
            ),
        ),
    ],
)
def test_keys_that_contain_the_row_id_of_the_feed_are_accepted(
    spark: SparkSession,
    changes: DataFrame,
    tmp_path: Path,
    keys: list[str],
    change: Callable[[DataFrame], DataFrame],
) -> None:
    sink = penstock.TableSink("t", keys, f"sqlite:///{tmp_path}/store.db", apply_changes=True)
    assert sink.refusal(change(changes), "append") is None
