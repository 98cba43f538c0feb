"""A PostgreSQL feed through Spark."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import penstock
from penstock.testing import temporary_store_url
from tests.feeds.postgres.stream_child import COLUMNS, start
from tests.support.change_frames import Sink
from tests.support.postgres_source import Row, Source, apply, open_transaction
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until


def test_a_batch_of_net_changes(spark: SparkSession, source: Source) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')")
    feed = source.feed(snapshot="initial")
    opened = feed.open()
    opened.prepare()
    with source.connection.transaction():
        source.run(f"UPDATE {table} SET v = 'x' WHERE id = 1", f"UPDATE {table} SET v = 'y' WHERE id = 1")
    source.run(f"DELETE FROM {table} WHERE id = 2", f"UPDATE {table} SET id = 3 WHERE id = 1")
    assert penstock.changes.read(spark, feed).count() == 7
    net = penstock.changes.read(spark, feed.url, deduplication_mode="netChanges", compute_updates=True)
    assert [(row.id, row.v, row["_change_type"]) for row in net.collect()] == [(3, "y", "insert")]


def test_taking_rows_does_not_move_the_slot(spark: SparkSession, source: Source) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    for number in range(4):
        source.run(f"INSERT INTO {table} VALUES ({number})")
    # Not restart_lsn, which the server moves by itself when it logs the running transactions.
    slot = f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{source.name}'"
    before = source.rows(slot)
    frame = penstock.changes.read_stream(spark, source.feed(), options={"maxCommitsPerTrigger": 1})
    assert [row.id for row in penstock.take(frame, 4)] == [0, 1, 2, 3]
    # In a query, which has logged all but the last commit when the last one comes.
    assert {row.id for row in penstock.take(frame.dropDuplicates(["id"]), 4)} == {0, 1, 2, 3}
    assert source.rows(slot) == before


def test_a_stream_follows_the_table_across_restarts(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    table = source.table("id int primary key, v numeric(9, 2), w timestamp, s smallint")
    source.run(f"INSERT INTO {table} SELECT i, i, '2026-01-01', 1 FROM generate_series(1, 30) i")
    feed = source.feed(snapshot="initial")
    opened = feed.open()
    sink = Sink(tmp_path)

    def run() -> None:
        frame = penstock.changes.read_stream(
            spark, feed, options={"maxCommitsPerTrigger": 2, "rowsPerTask": 10}
        )
        sink.run(frame.select("id", "v", "_commit_sequence", "_change_type", "_commit_version"))

    run()
    for round in range(2):
        for number in range(3):
            source.run(
                f"UPDATE {table} SET v = v + 1 WHERE id % 3 = {number}",
                f"DELETE FROM {table} WHERE id = {round * 9 + number}",
            )
        run()
    state: dict[object, Row] = {}
    names = ("id", "v", "_commit_sequence", "_change_type", "_commit_version")
    rows = [
        dict(zip(names, row, strict=True)) | {"_unchanged": None}
        for batch in sink.batches.values()
        for row in batch
    ]
    rows.sort(key=lambda row: (row["_commit_version"], row["_commit_sequence"]))
    apply(rows, ("id",), ("id", "v"), state)
    assert sorted(tuple(row.values()) for row in state.values()) == sorted(
        source.rows(f"SELECT id, v FROM {table}")
    )
    for batch in sink.batches.values():
        assert len({row[4] for row in batch}) <= 2
    # The last micro-batch is logged by the next run only.
    assert opened.lag().unconfirmed < opened.newest(0) - rows[0]["_commit_version"]


def test_a_new_checkpoint_with_a_used_slot_is_refused(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    table = source.table("id int primary key")
    source.run(f"INSERT INTO {table} SELECT generate_series(1, 5)")
    feed = source.feed(snapshot="initial")

    def copied(place: str) -> list[int]:
        sink = Sink(tmp_path / place)
        sink.run(penstock.changes.read_stream(spark, feed).select("id"))
        return sorted(row[0] for batch in sink.batches.values() for row in batch)

    assert copied("first") == [1, 2, 3, 4, 5]
    source.run(f"INSERT INTO {table} VALUES (6)")
    copied("first")
    with pytest.raises(StreamingQueryException, match=r"FEED_UNAVAILABLE\.SLOT_USED"):
        copied("second")
    source.drop_slot()
    assert copied("third") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("options", [{}, {"deduplication_mode": "netChanges", "net_window": "commit"}])
def test_a_copy_keeps_long_values_that_an_update_left_unchanged(
    spark: SparkSession, source: Source, tmp_path: Path, options: dict[str, object]
) -> None:
    table = source.table("id int primary key, n int, notes text, data jsonb")
    source.run(*(f"ALTER TABLE {table} ALTER {name} SET STORAGE EXTERNAL" for name in ("notes", "data")))
    source.run(f"INSERT INTO {table} SELECT i, 0, repeat('x', 9000), '{{}}' FROM generate_series(1, 3) i")
    feed = source.feed(snapshot="initial")

    def copied() -> list[tuple[object, ...]]:
        changes = penstock.changes.read_stream(spark, feed, **options)
        sink = penstock.TableSink("copy", ["id"], f"delta://{tmp_path}", apply_changes=True)
        pipeline = penstock.stream(spark, changes).write(sink)
        pipeline.start(
            checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now()
        ).awaitTermination()
        found = QueryBuilder().register("copy", DeltaTable(f"{tmp_path}/copy"))
        rows = pa.table(found.execute("select id, n, length(notes) from copy order by id").read_all())
        return [tuple(row.values()) for row in rows.to_pylist()]

    assert copied() == [(1, 0, 9000), (2, 0, 9000), (3, 0, 9000)]
    source.run(f"UPDATE {table} SET n = 1 WHERE id < 3", f"UPDATE {table} SET n = 2 WHERE id = 1")
    source.run(f"UPDATE {table} SET notes = 'short' WHERE id = 2", f"UPDATE {table} SET n = 3 WHERE id = 2")
    assert copied() == [(1, 2, 9000), (2, 3, 5), (3, 0, 9000)]


def test_a_schema_change_ends_the_query_and_a_restart_continues(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    table = source.table("id int primary key, v int")
    source.run(f"INSERT INTO {table} VALUES (1, 1)")
    feed, sink = source.feed(snapshot="initial"), Sink(tmp_path)

    def run() -> list[tuple[object, ...]]:
        """The rows of all micro-batches, without those columns that a copy does not have."""
        changes = penstock.changes.read_stream(spark, feed)
        sink.drain(changes.select(*(name for name in changes.columns if not name.startswith("_"))))
        return [row for number in sorted(sink.batches) for row in sink.batches[number]]

    assert run() == [(1, 1)]
    source.run(f"INSERT INTO {table} VALUES (2, 7)", f"ALTER TABLE {table} ALTER v TYPE text, ADD w int")
    source.run(f"INSERT INTO {table} VALUES (3, '007', 5)")
    with pytest.raises(StreamingQueryException, match=r"FEED_UNAVAILABLE\.COLUMN_TYPE_CHANGED"):
        run()
    assert run() == [(1, 1), (2, 7), (3, "007", 5)]
    source.run(f"ALTER TABLE {table} DROP w", f"UPDATE {table} SET v = '8' WHERE id = 1")
    some = penstock.changes.read_stream(spark, feed, columns=["v"])
    sink.drain(some.select("id", "v"))
    assert [row for number in sorted(sink.batches) for row in sink.batches[number]][-1] == (1, "8")


def test_a_refused_start_leaves_no_slot(spark: SparkSession, source: Source, tmp_path: Path) -> None:
    source.table("id int primary key")
    changes = penstock.changes.read_stream(spark, source.feed(snapshot="initial"))
    with pytest.raises(penstock.PenstockError, match="itemm"):
        penstock.stream(spark, changes).write(
            penstock.TableSink("t", keys=["itemm"], url=f"delta://{tmp_path}", apply_changes=True)
        ).start(name="t", checkpoint=tmp_path / "ck")
    assert source.slots() == 0


def test_a_queue_on_the_same_server_does_not_cause_endless_micro_batches(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    table = source.table("id int primary key, v text")
    feed = source.feed(snapshot="initial", tables=("t",))
    opened = feed.open()
    with temporary_store_url(source.url) as url, penstock.connect(url) as store:
        schema = opened.describe().schema
        store.create_queue("changes", _schema(schema))
        query = (
            penstock.stream(spark, feed)
            .transform(lambda frame: frame.select(*COLUMNS))
            .write(penstock.QueueSink("changes", url=url))
            .start(
                checkpoint=tmp_path / "ck", name="feed", trigger=penstock.Trigger.processing_time("0 seconds")
            )
        )
        queue = store.queue("changes")
        for number in range(3):
            source.run(f"INSERT INTO {table} VALUES ({number}, 'a')")
            wait_until(lambda wanted=number: len(queue.read(0, 0)) > wanted, 60)  # type: ignore[misc]
        query.processAllAvailable()
        batches = [progress.batchId for progress in query.recentProgress if progress.numInputRows]
        query.stop()
        assert len(batches) == 3
        assert max(progress.batchId for progress in query.recentProgress) <= 3


def test_the_progress_of_a_query_reports_a_transaction_that_stays_open(
    spark: SparkSession, source: Source, tmp_path: Path
) -> None:
    table = source.table("id int primary key")
    source.make_slot()
    source.run(f"INSERT INTO {table} VALUES (1)")
    feed = source.feed(transaction_warning=0.001)
    frame = penstock.changes.read_stream(spark, feed)
    with open_transaction(source, f"INSERT INTO {table} VALUES (2)"):
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    (warning,) = json.loads(query.recentProgress[0].json)["sources"][0]["latestOffset"]["warnings"]
    assert "server process" in warning


def _schema(schema: Any) -> Any:
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in COLUMNS])


@pytest.mark.crash
@pytest.mark.soak
def test_a_killed_query_continues_exactly_once(
    spark: SparkSession, source: Source, tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    table = source.table("id int primary key, v text")
    source.run(f"INSERT INTO {table} SELECT i, 'old' FROM generate_series(1, 500) i")
    feed, url = source.feed(snapshot="initial"), f"sqlite:///{tmp_path}/store.db"
    opened = feed.open()
    store = penstock.connect(url, create=True)
    store.create_queue("changes", _schema(opened.describe().schema))
    queue = store.queue("changes")
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(source.url) as connection:
            for number in range(1000, 100_000):
                if stop.is_set():
                    return
                connection.execute(f"INSERT INTO {table} VALUES ({number}, 'new')".encode())
                connection.execute(
                    f"UPDATE {table} SET v = v || '.' WHERE id % 100 = {number % 100}".encode()
                )
                connection.execute(f"DELETE FROM {table} WHERE id = {number - 50}".encode())
                connection.commit()
                stop.wait(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        child = run_child("tests.feeds.postgres.stream_child", tmp_path, feed.url, url)
        # The moment at which rows can be seen lies between the queue's commit and Spark's, mostly.
        wait_until(lambda: child.returncode is not None or len(queue.read(0, 0)), 120, interval=0.005)
        assert child.returncode is None, child.output
        child.kill_tree()
    finally:
        stop.set()
        writer.join(30)
    start(spark, tmp_path, feed.url, url, penstock.Trigger.available_now()).awaitTermination()
    rows = [row | {"_unchanged": None} for row in queue.read(0, 0).to_pylist()]
    places = Counter((row["_commit_version"], row["_commit_sequence"]) for row in rows)
    assert max(places.values()) == 1
    rows.sort(key=lambda row: (row["_commit_version"], row["_commit_sequence"]))
    state: dict[object, Row] = {}
    apply(rows, ("id",), ("id", "v"), state)
    assert sorted(tuple(row.values()) for row in state.values()) == sorted(
        source.rows(f"SELECT * FROM {table}")
    )
    store.close()
