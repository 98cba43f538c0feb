"""Checkpoints: lost ones, new ones under an old name, those that the session's setting makes, both log
formats.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock import Store
from penstock.errors import CommitRefusedError
from penstock.spark.checkpoint import Checkpoint, parse_offsets, redact_location
from penstock.testing import replay_last_batch
from tests.support.spark_queues import (
    fill,
    ids_in,
    make_queue,
    one_store,
    refusal,
    run,
    stream,
)

SETTING = "spark.sql.streaming.checkpointLocation"


@pytest.fixture
def setting(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    spark.conf.set(SETTING, str(tmp_path / "checkpoints"))
    yield tmp_path / "checkpoints"
    spark.conf.unset(SETTING)


# Lost checkpoints.


def test_a_stateless_query_continues_with_a_new_checkpoint(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    consumer = queue.register(store.create_consumer("billing").name)
    frame = stream(spark, store_url, consumer="billing")
    for number in range(2):
        fill(queue, [number])
        run(frame, store_url, "out", tmp_path / "ck")
        shutil.rmtree(tmp_path / "ck")
    assert ids_in(out) == [0, 1]
    assert consumer.offsets("orders") == {0: 2}


def test_a_stateful_query_is_refused_with_a_new_checkpoint(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    consumer = queue.register(store.create_consumer("billing").name)
    frame = stream(spark, store_url, consumer="billing").dropDuplicates(["id"])
    fill(queue, [1])
    run(frame, store_url, "out", tmp_path / "ck")
    fill(queue, [1, 2])
    said = refusal(lambda: run(frame, store_url, "out", tmp_path / "ck2"))
    assert "CONSUMER_BOUND" in said
    assert "allowNewCheckpoint=true" in said
    assert ids_in(out) == [1], "refused before anything is visible"
    assert consumer.offsets("orders") == {0: 1}
    run(frame, store_url, "out", tmp_path / "ck3", allowNewCheckpoint=True)
    assert sorted(ids_in(out)) == [1, 1, 2], "with empty state"
    assert consumer.offsets("orders") == {0: 3}


# Application ids.


@pytest.mark.parametrize("guarantee", ["exactly_once", "idempotent"])
@pytest.mark.parametrize("source", ["queue", "files"])
@one_store
def test_a_new_checkpoint_needs_a_new_app_id(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path, source: str, guarantee: str
) -> None:
    """Its batch ids start again at zero: the ledger would take them for repeats, and drop their rows."""
    queue, out = make_queue(store), make_queue(store, "out")
    fill(queue, [1])
    files = tmp_path / "files"
    files.mkdir()
    (files / "1.json").write_text('{"id": 1}\n')
    frame: DataFrame = (
        stream(spark, store_url)
        if source == "queue"
        else spark.readStream.schema("id bigint").json(str(files))
    )
    options = {"appId": "nightly", "guarantee": guarantee}
    run(frame, store_url, "out", tmp_path / "ck", **options)
    replay_last_batch(tmp_path / "ck")
    run(frame, store_url, "out", tmp_path / "ck", **options)
    assert ids_in(out) == [1]
    said = refusal(lambda: run(frame, store_url, "out", tmp_path / "ck2", **options))
    assert "CHECKPOINT_MISMATCH" in said
    assert "a new checkpoint needs a new appId" in said.replace("a new one needs", "a new checkpoint needs")
    assert ids_in(out) == [1]
    run(frame, store_url, "out", tmp_path / "ck3", **(options | {"appId": "nightly-2"}))
    assert ids_in(out) == [1, 1]


# The session's own checkpoint location.


@one_store
def test_the_checkpoint_setting_and_a_query_name_find_the_checkpoint_again(
    spark: SparkSession, store: Store, store_url: str, setting: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    for number in range(2):
        fill(queue, [number])
        for _ in range(2):
            writer = stream(spark, store_url).writeStream.format("penstock").option("url", store_url)
            writer.queryName("nightly").trigger(availableNow=True).start("out").awaitTermination()
            replay_last_batch(setting / "nightly")
    assert ids_in(out) == [0, 1]


@one_store
def test_the_checkpoint_setting_without_a_query_name_is_refused(
    spark: SparkSession, store: Store, store_url: str, setting: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    fill(queue, [1])

    def begin(guarantee: str) -> None:
        writer = stream(spark, store_url).writeStream.format("penstock")
        writer = writer.options(url=store_url, guarantee=guarantee).trigger(availableNow=True)
        writer.start("out").awaitTermination()

    assert "name the query" in refusal(lambda: begin("exactly_once"))
    assert ids_in(out) == []
    begin("at_least_once")
    assert ids_in(out) == [1]


# Formats and places.


@one_store
def test_both_formats_of_the_offset_log_are_supported(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    left, right = make_queue(store, "left"), make_queue(store, "right")
    out = make_queue(store, "out")
    for queue in (left, right):
        queue.register(store.create_consumer(queue.name).name)
    frame = stream(spark, store_url, "left", consumer="left").union(
        stream(spark, store_url, "right", consumer="right")
    )
    spark.conf.set("spark.sql.streaming.offsetLog.formatVersion", "2")
    try:
        for number in range(2):
            fill(left, [number])
            fill(right, [10 + number])
            for _ in range(2):
                run(frame, store_url, "out", tmp_path / "ck")
                replay_last_batch(tmp_path / "ck")
    finally:
        spark.conf.unset("spark.sql.streaming.offsetLog.formatVersion")
    assert (tmp_path / "ck" / "offsets" / "0").read_text().startswith("v2\n")
    assert sorted(ids_in(out)) == [0, 1, 10, 11]


@one_store
def test_checkpoint_paths_with_special_characters_work(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    for number, path in enumerate([f"{tmp_path}/a b%20c#d+é", f"file://{tmp_path}/x%2Fy"]):
        fill(queue, [number])
        run(stream(spark, store_url, startingOffsets="latest"), store_url, "out", path)
        fill(queue, [10 + number])
        run(stream(spark, store_url), store_url, "out", path)
    assert ids_in(out) == [10, 11]


def test_offset_files_are_parsed() -> None:
    assert parse_offsets('v1\n{"m": 1}\n{"a": 1}\n-\n7\nplain: text') == [{"a": 1}, None, 7, "plain: text"]
    assert parse_offsets('v2\n{"m": 1}\n1:{"a": "x:y"}\n0:3') == [{"a": "x:y"}, 3]
    with pytest.raises(CommitRefusedError, match="'v9'"):
        parse_offsets("v9\n{}")


def test_missing_files_of_a_checkpoint_are_reported(tmp_path: Path) -> None:
    checkpoint = Checkpoint(f"file:{tmp_path}")
    assert checkpoint.last_commit() is None
    assert checkpoint.stateful() is False
    assert checkpoint.offsets(-1) == []
    with pytest.raises(CommitRefusedError, match="offsets/0 cannot be read"):
        checkpoint.offsets(0)
    with pytest.raises(CommitRefusedError, match="metadata cannot be read"):
        checkpoint.query_id()


def test_a_location_without_an_fsspec_driver_is_refused() -> None:
    with pytest.raises(CommitRefusedError, match="fsspec driver for the scheme") as caught:
        Checkpoint("nosuch://user:s3cret@host/ck")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("ftp://me:s3cret@host/ck", "ftp://me:***@host/ck"),
        ("ftp://me:p@ss/w@host:21/ck", "ftp://me:***@host:21/ck"),
        ("s3a://bucket/ck", "s3a://bucket/ck"),
        ("/ck:a@b", "/ck:a@b"),
        ("abfss://c@account/ck?sig=s3cret", "abfss://c@account/ck?***"),
    ],
)
def test_passwords_in_locations_are_not_shown(location: str, shown: str) -> None:
    assert redact_location(location) == shown
