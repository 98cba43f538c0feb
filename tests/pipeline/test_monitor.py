"""Reports of queries to their store: pipelines of both engines, and other queries of a session."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import InvalidOptionError, StoreNotFoundError
from penstock.json_text import Json
from penstock.pipeline import monitor as listening
from penstock.pipeline import publisher as module
from penstock.store.records import queries
from penstock.ui import queries as shown
from penstock.ui.snapshots import Collector
from tests.support.processes import ChildProcess
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
NOW, SOON = penstock.Trigger.available_now(), penstock.Trigger.continuous("50 ms")
NAME = 'it\'s "<script>" ž'
PATIENCE = 60


def rows(store: penstock.Store) -> Json:
    """Return the reports of queries by name."""
    return {row.name: row for row in store.database.run(queries.reported_queries, write=False)}


def progress(store: penstock.Store) -> list[Any]:
    return store.database.run(
        lambda tx: queries.progress_since(tx, 0, upto=tx.now(), max_rows_per_query=queries.MAX_PROGRESS_ROWS),
        write=False,
    )


def newest_texts(store: penstock.Store) -> Any:
    """The texts of the newest progress of the only query."""
    (texts,) = store.database.run(lambda tx: queries.newest_texts(tx, 0, upto=tx.now()), write=False)
    return texts


@pytest.fixture
def source(store: penstock.Store) -> penstock.Queue:
    store.create_queue("out", SCHEMA)
    store.create_consumer("c").register(store.create_queue("in", SCHEMA).name)
    return store.queue("in")


def pipeline(spark: SparkSession, url: str, transform: Any = None, **more: object) -> penstock.Pipeline:
    stream = penstock.stream(spark, penstock.QueueSource("in", "c", url))
    if transform is not None:
        stream = stream.transform(transform)
    return stream.write(penstock.QueueSink("out", url), **more)


def test_a_micro_batch_query_is_reported_to_the_store_of_its_sink(
    spark: SparkSession, store: penstock.Store, store_url: str, source: penstock.Queue, tmp_path: Path
) -> None:
    source.append([{"id": number} for number in range(10)])
    query = pipeline(spark, store_url, lambda df: df.where("id < 7")).start(
        name=NAME, checkpoint=tmp_path / "ck", trigger=NOW
    )
    query.awaitTermination()
    row = rows(store)[NAME]
    assert (row.query_id, row.run_id) == (query.id, query.runId)
    assert (row.engine, row.state, row.error_condition) == ("micro-batch", "stopped", None)
    assert (row.source, row.sink, row.checkpoint) == ("queue 'in'", "queue 'out'", str(tmp_path / "ck"))
    assert (row.rows_in, row.rows_out) == (10, 7)
    last = progress(store)[-1]
    assert (last.query_id, last.batch_id) == (query.id, 0)
    assert last.duration > 0
    assert '"addBatch"' in newest_texts(store).durations
    assert last.p50 is None
    collector = Collector(store_url)
    (entry,) = collector.collect()["queries"]
    collector.close()
    assert (entry["batch_duration_ms"]["p99"], entry["batch_duration_ms"]["batches"]) == (last.duration, 1)


def test_a_continuous_query_is_reported_with_its_latency(
    spark: SparkSession, store: penstock.Store, store_url: str, source: penstock.Queue, tmp_path: Path
) -> None:
    query = pipeline(spark, store_url).start(name=NAME, checkpoint=tmp_path / "ck", trigger=SOON)
    for number in range(3):
        source.append([{"id": number}])
        query.processAllAvailable()
    row = wait_until(lambda: (found := rows(store).get(NAME)) and found.rows_in and found, PATIENCE)
    assert (row.query_id, row.engine, row.state) == (query.id, "continuous", "running")
    assert query.stop()
    row = rows(store)[NAME]
    assert (row.state, row.rows_in, row.rows_out) == ("stopped", 3, 3)
    point = next(point for point in progress(store) if point.rows_in)
    assert 0 < point.p50 <= point.p90 <= point.p99 <= point.max


@one_store
@pytest.mark.parametrize("trigger", [NOW, SOON], ids=["batches", "epochs"])
def test_a_failure_is_reported_with_its_condition_and_without_secrets(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    source: penstock.Queue,
    tmp_path: Path,
    trigger: penstock.Trigger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.continuous.driver import execution

    monkeypatch.setattr(execution, "_MAX_RESTARTS", 0)
    text = "no way to postgresql://app:hunter22@db/shop"
    broken = pipeline(spark, store_url, lambda df: df.where(f"assert_true(id > 5, '{text}') is null"))
    source.append([{"id": 1}])
    query = broken.start(name=NAME, checkpoint=tmp_path / "ck", trigger=trigger)
    with pytest.raises(Exception, match="no way to"):
        query.awaitTermination(PATIENCE)
    row = wait_until(lambda: (found := rows(store)[NAME]).state == "failed" and found, PATIENCE)
    assert "no way to" in row.error_message
    assert row.error_condition
    assert "hunter22" not in row.error_message


@one_store
def test_the_end_of_a_query_that_nobody_awaits_is_reported_too(
    spark: SparkSession, store: penstock.Store, store_url: str, source: penstock.Queue, tmp_path: Path
) -> None:
    source.append([{"id": 1}])
    pipeline(spark, store_url).start(name=NAME, checkpoint=tmp_path / "ck", trigger=NOW)
    wait_until(lambda: rows(store).get(NAME) and rows(store)[NAME].state == "stopped", PATIENCE)
    assert rows(store)[NAME].rows_in == 1


@one_store
def test_a_stopped_query_is_reported_as_stopped_and_runs_again_under_its_id(
    spark: SparkSession, store: penstock.Store, store_url: str, source: penstock.Queue, tmp_path: Path
) -> None:
    runs = []
    for number in range(2):
        source.append([{"id": number}])
        query = pipeline(spark, store_url).start(name=NAME, checkpoint=tmp_path / "ck")
        wait_until(lambda: NAME in rows(store) and rows(store)[NAME].state == "running", PATIENCE)
        query.processAllAvailable()
        assert query.stop()
        row = rows(store)[NAME]
        assert (row.state, row.run_id, row.rows_in) == ("stopped", query.runId, 1)
        runs.append(query.id)
    assert runs[0] == runs[1]
    assert len(rows(store)) == 1


@one_store
@pytest.mark.parametrize("trigger", [NOW, SOON], ids=["batches", "epochs"])
def test_a_query_with_monitor_false_is_not_reported(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    source: penstock.Queue,
    tmp_path: Path,
    trigger: penstock.Trigger,
) -> None:
    source.append([{"id": 1}])
    query = pipeline(spark, store_url).start(
        name=NAME, checkpoint=tmp_path / "ck", trigger=trigger, monitor=False
    )
    query.processAllAvailable()
    query.stop()
    assert rows(store) == {}


@one_store
def test_a_query_that_writes_a_table_is_reported_to_the_store_of_the_table(
    spark: SparkSession, store: penstock.Store, store_url: str, source: penstock.Queue, tmp_path: Path
) -> None:
    source.append([{"id": number} for number in range(5)])
    other = f"sqlite:///{tmp_path}/other.db"
    sink = penstock.TableSink("totals", ["id"], other)
    stream = penstock.stream(spark, penstock.QueueSource("in", "c", store_url))
    query = stream.write(sink, output_mode="update").start(name=NAME, checkpoint=tmp_path / "ck", trigger=NOW)
    query.awaitTermination()
    assert rows(store) == {}
    with penstock.connect(other) as there:
        row = rows(there)[NAME]
        assert (row.source, row.sink, row.rows_in, row.rows_out) == ("queue 'in'", "table 'totals'", 5, 5)


@one_store
def test_a_union_is_reported_with_all_its_queues(
    spark: SparkSession, store: penstock.Store, store_url: str, source: penstock.Queue, tmp_path: Path
) -> None:
    store.consumer("c").register(store.create_queue("second", SCHEMA).name)
    second = penstock.stream(spark, penstock.QueueSource("second", "c", store_url)).to_df()
    query = pipeline(spark, store_url, lambda df: df.union(second)).start(
        name=NAME, checkpoint=tmp_path / "ck", trigger=NOW
    )
    query.awaitTermination()
    assert rows(store)[NAME].source == "queue 'in', queue 'second'"


@one_store
def test_other_queries_of_a_session_are_reported_to_the_store_given_to_monitor(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    session = spark.newSession()
    penstock.monitor(session, url=store_url)
    rate = session.readStream.format("rate").option("rowsPerSecond", 100).load()
    query = (
        rate.writeStream.format("noop")
        .queryName(NAME)
        .option("checkpointLocation", str(tmp_path / "ck"))
        .start()
    )
    try:
        wait_until(lambda: rows(store).get(NAME) and rows(store)[NAME].rows_in, PATIENCE)
    finally:
        query.stop()
    row = wait_until(lambda: (found := rows(store)[NAME]).state == "stopped" and found, PATIENCE)
    assert (row.query_id, row.engine) == (str(query.id), "micro-batch")
    assert "ate" in row.source


@one_store
def test_a_pipeline_without_a_store_is_reported_once_to_the_store_given_to_monitor(
    spark: SparkSession, store: penstock.Store, store_url: str, tmp_path: Path
) -> None:
    session = spark.newSession()
    penstock.monitor(session, url=store_url)
    for name, trigger in (
        ("batches", penstock.Trigger.processing_time("100 milliseconds")),
        ("epochs", SOON),
    ):
        sink = penstock.FunctionSink(print)
        query = (
            penstock.stream(session, penstock.RateSource(50))
            .write(sink)
            .start(name=name, checkpoint=tmp_path / name, trigger=trigger)
        )
        wait_until(lambda name=name: name in rows(store) and rows(store)[name].rows_in, PATIENCE)
        query.stop()
        row = rows(store)[name]
        assert (row.query_id, row.state, row.sink) == (query.id, "stopped", "a function")
    assert len(rows(store)) == 2


@one_store
def test_a_missing_store_does_not_affect_the_query(
    spark: SparkSession,
    store: penstock.Store,
    store_url: str,
    source: penstock.Queue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    away = f"sqlite:///{tmp_path}/none.db"
    monkeypatch.setattr(penstock.QueueSink, "store_url", lambda *_: away)
    source.append([{"id": 1}])
    query = pipeline(spark, store_url).start(name=NAME, checkpoint=tmp_path / "ck", trigger=NOW)
    query.awaitTermination()
    assert store.queue("out").info().rows == 1
    assert [getattr(record, "action", "") for record in caplog.records] == ["monitor_failed"]


def test_a_session_has_one_listener_or_none_if_all_its_queries_are_continuous(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = spark.newSession()
    added = []
    monkeypatch.setattr(type(session.streams), "addListener", lambda self, listener: added.append(listener))
    listening.session_listener(session, listen=False)
    assert added == []
    for _ in range(3):
        listening.session_listener(session)
    assert len(added) == 1


def test_monitor_requires_an_existing_store(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"OPTION.MISSING\].*spark\.penstock\.url"):
        penstock.monitor(spark.newSession())
    with pytest.raises(StoreNotFoundError):
        penstock.monitor(spark.newSession(), url=f"sqlite:///{tmp_path}/none.db")


@one_store
@pytest.mark.crash_full
def test_queries_of_a_killed_process_are_shown_as_silent(
    run_child: Callable[..., ChildProcess],
    store: penstock.Store,
    store_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = store.create_queue("in", SCHEMA)
    store.create_queue("out", SCHEMA)
    for name in ("batches", "epochs"):
        store.create_consumer(name).register("in")
    child = run_child("tests.pipeline.monitor_child", tmp_path / "spark", store_url, tmp_path / "ck")
    child.wait_for_line("STARTED")
    queue.append([{"id": 1}])
    wait_until(lambda: len(rows(store)) == 2 and all(row.rows_in for row in rows(store).values()), PATIENCE)
    collector = Collector(store_url)
    entry = collector.collect()
    assert {(query["name"], query["state"]) for query in entry["queries"]} == {
        ("batches", "running"),
        ("epochs", "running"),
    }
    assert [consumer["owner"]["alive"] for consumer in entry["consumers"]] == [True, True]
    child.kill_tree()
    assert {query["state"] for query in collector.collect()["queries"]} == {"running"}
    monkeypatch.setattr(shown, "SILENT_SECONDS", 0.5)
    wait_until(lambda: {query["state"] for query in collector.collect()["queries"]} == {"silent"}, 20)
    assert [consumer["owner"]["alive"] for consumer in collector.collect()["consumers"]] == [False, False]
    collector.close()


def test_reports_are_written_at_most_once_a_second() -> None:
    assert module.WRITE_SECONDS == 1.0
    assert shown.SILENT_SECONDS == 3 * module.HEARTBEAT_SECONDS == 30
