"""Options: parsed once, helpful when they are wrong, silent about secrets."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock import Store
from penstock.errors import InvalidOptionError, MissingDependencyError
from penstock.spark.data_source import PenstockDataSource
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.internals.sessions import is_local
from penstock.spark.options import sink_options, source_options
from penstock.spark.queue_readers import Scan
from tests.support.spark_queues import (
    batch,
    column,
    fill,
    ids_in,
    make_queue,
    one_store,
    refusal,
    run,
    stream,
)

SECRET = "s3cr3t-w0rd"
URL = f"postgresql://user:{SECRET}@127.0.0.1:1/none"


def read(streaming: bool = False, **given: str) -> Any:
    return source_options({"url": "sqlite:///x.db", "queue": "orders", **given}, streaming=streaming)


def write(streaming: bool = True, **given: str) -> Any:
    return sink_options({"url": "sqlite:///x.db", "queue": "orders", **given}, streaming=streaming)


def test_option_names_are_case_insensitive() -> None:
    assert read(streaming=True, MAXROWSPERTRIGGER="5").max_rows_per_trigger == 5
    assert write(maxrowsperwrite="7", Guarantee="Idempotent").guarantee == "idempotent"


def test_options_added_by_spark_are_accepted() -> None:
    options = write(path="orders", checkpointlocation="/ck", queryname="q")
    assert (options.checkpoint, options.query_name) == ("/ck", "q")


def test_starting_positions_are_parsed() -> None:
    assert read(startingOffsets='{"0": 5, "1": 7}').starting_offsets == {0: 5, 1: 7}
    assert read(startingOffsets="LATEST").starting_offsets == "latest"
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    micros = int(moment.timestamp()) * 1_000_000
    assert read(startingTimestamp="2026-01-31T12:00:00Z").starting_timestamp == micros
    assert read(startingTimestamp="2026-01-31T13:00:00+01:00").starting_timestamp == micros
    assert read(startingTimestamp=str(micros // 1000)).starting_timestamp == micros


@pytest.mark.parametrize(
    ("parse", "words", "problem"),
    [
        (
            lambda: read(consumr="x"),
            "unknown option 'consumr' of a batch read. Did you mean 'consumer'?",
            "UNKNOWN",
        ),
        (lambda: read(streaming=True, maxRowsPerTriger="1"), "Did you mean 'maxRowsPerTrigger'?", "UNKNOWN"),
        (lambda: read(xyz="1"), "Known options: consumer, endingOffsets", "UNKNOWN"),
        (
            lambda: read(maxRowsPerTrigger="1"),
            "'maxRowsPerTrigger' does not apply to a batch read",
            "UNKNOWN",
        ),
        (
            lambda: read(streaming=True, endingOffsets="latest"),
            "does not apply to a streaming read",
            "UNKNOWN",
        ),
        (lambda: read(guarantee="exactly_once"), "does not apply to a batch read", "UNKNOWN"),
        (lambda: write(streaming=False, appId="x"), "does not apply to a batch write", "UNKNOWN"),
        (lambda: write(consumer="x"), "does not apply to a streaming write", "UNKNOWN"),
        (
            lambda: read(streaming=True, maxRowsPerTrigger="0"),
            "maxRowsPerTrigger='0': give a whole number from 1",
            "VALUE",
        ),
        (lambda: read(rowsPerTask="many"), "give a whole number from 1", "VALUE"),
        (lambda: read(failOnDataLoss="yes"), "failOnDataLoss='yes': give true or false", "VALUE"),
        (lambda: write(guarantee="exactlyonce"), "Did you mean 'exactly_once'?", "VALUE"),
        (lambda: read(startingOffsets="first"), "give earliest, latest, consumer, or row indexes", "VALUE"),
        (lambda: read(startingOffsets="[1]"), "give earliest", "VALUE"),
        (lambda: read(startingOffsets='{"a": 1}'), "give earliest", "VALUE"),
        (lambda: read(startingOffsets='{"0": 1.9}'), "give earliest", "VALUE"),
        (lambda: read(startingOffsets='{"0": true}'), "give earliest", "VALUE"),
        (lambda: read(startingOffsets='{"0": "5"}'), "give earliest", "VALUE"),
        (lambda: read(endingOffsets='{"0": null}'), "or row indexes such as", "VALUE"),
        (lambda: read(startingOffsets='{"0": ' + "[" * 100_000), "or row indexes such as", "VALUE"),
        (lambda: read(consumer=""), "option consumer='' is empty: give a value, or leave it out", "VALUE"),
        (lambda: read(streaming=True, MaxRowsPerTrigger=""), "maxRowsPerTrigger='' is empty", "VALUE"),
        (lambda: read(url=""), "option url='' is empty", "VALUE"),
        (lambda: read(path=""), "option path='' is empty", "VALUE"),
        (lambda: write(guarantee=""), "guarantee='' is empty", "VALUE"),
        (lambda: read(endingOffsets="consumer"), "a read can end at latest", "VALUE"),
        (lambda: read(startingTimestamp="2026-01-31T12:00:00"), "give the time zone too", "VALUE"),
        (lambda: read(startingTimestamp="yesterday"), "give a time such as", "VALUE"),
        (lambda: read(startingTimestamp="1", startingOffsets="latest"), "cannot be combined", "CONFLICT"),
        (lambda: read(startingOffsets="consumer"), "needs the option consumer", "MISSING"),
        (
            lambda: read(consumer="c", startingOffsets="latest"),
            "starts at the offset of consumer",
            "CONFLICT",
        ),
        (lambda: read(path="other"), "two queues are named", "CONFLICT"),
        (lambda: source_options({"url": "sqlite:///x.db"}, streaming=False), "no queue is named", "MISSING"),
        (lambda: source_options({"queue": "x"}, streaming=False), "set spark.penstock.url", "MISSING"),
    ],
)
def test_an_invalid_option_is_reported(parse: Callable[[], Any], words: str, problem: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        parse()
    assert words in str(caught.value)
    assert caught.value.condition == f"INVALID_OPTION.{problem}"


def test_options_sent_to_workers_do_not_show_secrets() -> None:
    options = source_options({"url": URL, "queue": "orders"}, streaming=True)
    sink = sink_options(
        {"url": URL, "queue": "orders", "checkpointlocation": f"ftp://u:{SECRET}@h/ck"}, streaming=True
    )
    shown = f"{options!r} {options} {sink!r} {Scan(URL, None, pa.schema([]))!r}"  # type: ignore[arg-type]
    assert SECRET not in shown
    assert pickle.loads(pickle.dumps(options)).url == URL


# Defaults.


@pytest.fixture
def defaults(spark: SparkSession) -> Iterator[Callable[..., None]]:
    given: list[str] = []

    def set_defaults(**values: object) -> None:
        for name, value in values.items():
            spark.conf.set(f"spark.penstock.{name}", str(value))
            given.append(f"spark.penstock.{name}")
        penstock.register(spark)

    yield set_defaults
    for name in given:
        spark.conf.unset(name)
    penstock.register(spark)


@one_store
def test_session_settings_are_defaults(
    spark: SparkSession, store: Store, store_url: str, defaults: Callable[..., None], tmp_path: Path
) -> None:
    queue, out = make_queue(store), make_queue(store, "out")
    fill(queue, range(6))
    queue.register(store.create_consumer("billing").name)
    defaults(
        url=store_url,
        includeMetadataColumns=True,
        maxRowsPerTrigger=4,
        queue="out",
        guarantee="at_least_once",
    )
    frame = spark.read.format("penstock").load("orders")
    assert frame.columns == ["id", "name", "_queue", "_generation", "_partition", "_row_index", "_timestamp"]
    assert frame.count() == 6
    assert spark.read.format("penstock").load().count() == 0, "the default queue"
    assert spark.read.format("penstock").option("includeMetadataColumns", False).load("orders").columns == [
        "id",
        "name",
    ]
    source = spark.readStream.format("penstock").option("includeMetadataColumns", False).load("orders")
    writer = source.writeStream.format("penstock").option("checkpointLocation", str(tmp_path / "ck"))
    query = writer.trigger(availableNow=True).start("out")
    query.awaitTermination()
    assert [progress.numInputRows for progress in query.recentProgress] == [4, 2]
    assert ids_in(out) == list(range(6))
    assert store.consumer("billing").registration("orders").app_id is None, (
        "at least once leaves it to the source"
    )


@one_store
def test_an_option_overrides_a_conflicting_default(
    spark: SparkSession, store: Store, store_url: str, defaults: Callable[..., None]
) -> None:
    queue = make_queue(store)
    fill(queue, range(3))
    queue.register(store.create_consumer("billing").name, start="latest")
    defaults(url=store_url, startingOffsets="latest")
    assert spark.read.format("penstock").load("orders").count() == 0
    assert spark.read.format("penstock").option("startingOffsets", '{"0": 2}').load("orders").count() == 1
    assert spark.read.format("penstock").option("consumer", "billing").load("orders").count() == 0


def test_an_unknown_session_setting_is_refused(defaults: Callable[..., None], spark: SparkSession) -> None:
    words = r"OPTION.UNKNOWN\].*'spark\.penstock\.garantee'.* Did you mean 'guarantee'"
    with pytest.raises(InvalidOptionError, match=words):
        defaults(garantee="exactly_once")


# Errors on their way through Spark.


@one_store
def test_unknown_names_are_refused_with_the_nearest_one(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    make_queue(store)
    assert "Did you mean 'orders'" in refusal(lambda: batch(spark, store_url, "ordes"))
    assert "Did you mean 'orders'" in refusal(lambda: stream(spark, store_url, "ordes"))
    assert "Did you mean 'consumer'" in refusal(lambda: batch(spark, store_url, consumr="x"))
    assert "Did you mean 'maxRowsPerTrigger'" in refusal(lambda: stream(spark, store_url, maxRowPerTrigger=1))
    frame = stream(spark, store_url)
    assert "Did you mean 'orders'" in refusal(lambda: run(frame, store_url, "orderss", tmp_path / "ck"))
    assert "Did you mean 'appId'" in refusal(
        lambda: run(frame, store_url, "orders", tmp_path / "ck", apId="x")
    )
    missing = refusal(lambda: batch(spark, f"sqlite:///{tmp_path}/none.db"))
    assert "STORE_NOT_FOUND" in missing


HOSTILE = ["it's; drop table queue--", 'a/b\\c"d', "line\nbreak\ttab", "ünï ☂", "{'x': 1}", "$x`y`%s%%"]


def test_names_with_special_characters_work(
    spark: SparkSession, store: Store, store_url: str, tmp_path: Path
) -> None:
    for number, name in enumerate(HOSTILE):
        queue = make_queue(store, name)
        fill(queue, [number])
        assert column(batch(spark, store_url, name, includeMetadataColumns=True), "_queue") == [name]
    queue = store.queue(HOSTILE[2])
    queue.register(store.create_consumer(HOSTILE[0]).name)
    make_queue(store, "'out' \n\"out\"")
    run(
        stream(spark, store_url, HOSTILE[2], consumer=HOSTILE[0]),
        store_url,
        "'out' \n\"out\"",
        tmp_path / "ck",
    )
    assert ids_in(store.queue("'out' \n\"out\"")) == [2]


# Where an embedded store may be used.


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local[2,4]"])
def test_an_embedded_store_is_accepted_on_one_machine(master: str) -> None:
    assert is_local(master)
    check_store_reach("sqlite:///x.db", master)


@pytest.mark.parametrize("master", ["spark://h:7077", "yarn", "k8s://https://h", "local-cluster[2,1,1024]"])
def test_an_embedded_store_is_refused_on_a_cluster(master: str) -> None:
    check_store_reach(URL, master)
    with pytest.raises(InvalidOptionError, match=r"SQLITE_ON_CLUSTER\].*use a postgresql store"):
        check_store_reach("sqlite:///x.db", master)
    kind = type("Baked", (PenstockDataSource,), {"master": master})
    with pytest.raises(InvalidOptionError, match="a file on one machine"):
        kind({"url": "sqlite:///x.db", "path": "orders"}).schema()


# Workers without what they need.


def test_workers_without_pyarrow_are_reported(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    for python, words in ((bare, "lacks penstock, pyarrow"), (tmp_path / "none", "cannot be run")):
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        with pytest.raises(MissingDependencyError, match=words) as caught:
            penstock.register(spark)
        assert "PYSPARK_PYTHON" in str(caught.value)
