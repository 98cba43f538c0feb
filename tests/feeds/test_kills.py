"""Streams of every feed, killed in the middle and resumed: nothing is lost or repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import penstock
from penstock.feeds.protocol import Feed
from tests.feeds.iceberg.lake import Lake
from tests.feeds.iceberg.lake import rows as lake_rows
from tests.feeds.streaming_child import LETTERS, TOPIC, start
from tests.support.debezium_events import postgres
from tests.support.postgres_source import Source, source_at
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

COMMITS = 6
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("data", pa.string())])
OUT = pa.schema([("id", pa.int64()), ("change", pa.string()), ("version", pa.int64())])


def state(number: int) -> dict[int, str]:
    """A table after a commit: each commit brings a row, takes one and changes one."""
    there = dict.fromkeys(range(max(0, number - 3), number + 1), "new")
    return there | ({number - 1: f"changed {number}"} if number else {})


def table(rows: dict[int, str]) -> pa.Table:
    return pa.table([list(rows), list(rows.values())], schema=SCHEMA)


def queue_feed(store: str) -> penstock.QueueFeed:
    contract = penstock.ChangeContract("id", intermediate_changes=True, updates_as_delete_and_insert=True)
    feed = penstock.QueueFeed.create("feed", SCHEMA, contract, store=store, partitions=2)
    for number in range(COMMITS):
        before, after = state(number - 1) if number else {}, state(number)
        rows = [(key, data, "delete") for key, data in before.items() if after.get(key) != data]
        rows += [(key, data, "insert") for key, data in after.items() if before.get(key) != data]
        feed.append_commit(
            number,
            datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
            [{"id": key, "data": data, "_change_type": kind} for key, data, kind in rows],
        )
    return feed


def delta_feed(folder: Path) -> penstock.DeltaFeed:
    configuration = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(folder, table(state(0)), configuration=configuration)
    for number in range(1, COMMITS):
        merge = DeltaTable(folder).merge(
            table(state(number)), "s.id = t.id", source_alias="s", target_alias="t"
        )
        merge.when_matched_update_all().when_not_matched_insert_all().execute()
    return penstock.DeltaFeed(str(folder), "id")


def iceberg_feed(folder: Path) -> penstock.IcebergFeed:
    lake = Lake(folder)
    orders = lake.table()
    for number in range(COMMITS // 2):
        orders.append(lake_rows((number, "a", number), (number + 100, "b", number)))
        orders.delete(f"id = {number}")
    return lake.feed(row_id="id")


def snapshot_feed(folder: Path) -> penstock.SnapshotFeed:
    folder.mkdir()
    for number in range(COMMITS):
        pq.write_table(table(state(number)), folder / f"{number + 1:04}.parquet")
    return penstock.SnapshotFeed(str(folder), "id")


def postgres_feed(source: Source) -> penstock.PostgresFeed:
    name = source.table("id bigint primary key, data text")
    source.run(f"INSERT INTO {name} SELECT i, 'old' FROM generate_series(1, 20) i")
    feed = source.feed(snapshot="initial")
    opened = feed.open()
    opened.prepare()
    for number in range(COMMITS):
        with source.connection.transaction():
            source.run(
                f"INSERT INTO {name} VALUES ({number + 100}, 'new')",
                f"UPDATE {name} SET data = '{number}' WHERE id % 5 = {number % 5}",
                f"DELETE FROM {name} WHERE id = {number}",
            )
    return feed


def topic(folder: Path) -> tuple[str, Counter[tuple[object, ...]], list[int]]:
    """A topic of Debezium's, what its events are as changes, and the offsets of those that cannot be read."""
    folder.mkdir()
    changes: list[tuple[int, str, int]] = []
    bad: list[int] = []
    offset = 0
    for number in range(COMMITS):
        lsn, new = 3 * number + 1, {"id": number, "data": "new"}
        events: list[str | None] = [postgres("c", after=new, lsn=lsn)]
        changes.append((number, "insert", lsn))
        events.append(postgres("u", before=new, after=new | {"data": "changed"}, lsn=lsn + 1))
        changes += [(number, "update_preimage", lsn + 1), (number, "update_postimage", lsn + 1)]
        if number:
            events += [postgres("d", before={"id": number - 1}, lsn=lsn + 2), None]
            changes.append((number - 1, "delete", lsn + 2))
        bad.append(offset + len(events))
        events.append("no event")
        offsets = pa.array(range(offset, offset + len(events)), pa.int64())
        pq.write_table(pa.table({"value": pa.array(events), "offset": offsets}), folder / f"{number}.parquet")
        offset += len(events)
    return f"{TOPIC}{folder}", Counter(changes), bad


def changes(feed: Feed) -> Counter[tuple[object, ...]]:
    """All that a feed holds."""
    opened = feed.open()
    schema = opened.describe().schema
    wanted = pa.schema([schema.field(name) for name in ("id", "_change_type", "_commit_version")])
    after = opened.oldest()
    return Counter(
        tuple(row.values())
        for task in opened.tasks(after, opened.newest(after), 1000)
        for batch in opened.read(task, wanted)
        for row in batch.to_pylist()
    )


@pytest.fixture
def feeds(tmp_path: Path, logical_pg_url: str) -> Iterator[dict[str, Feed]]:
    store = f"sqlite:///{tmp_path}/feed.db"
    penstock.connect(store).close()
    with source_at(logical_pg_url) as source:
        yield {
            "queue": queue_feed(store),
            "delta": delta_feed(tmp_path / "delta"),
            "iceberg": iceberg_feed(tmp_path / "iceberg"),
            "snapshots": snapshot_feed(tmp_path / "snapshots"),
            "postgres": postgres_feed(source),
        }


@pytest.mark.crash_full
def test_every_killed_feed_continues_exactly_once(
    spark: SparkSession,
    feeds: dict[str, Feed],
    tmp_path: Path,
    run_child: Callable[..., ChildProcess],
) -> None:
    expected = {name: changes(feed) for name, feed in feeds.items()}
    urls = {name: feed.url for name, feed in feeds.items()}
    urls["debezium"], expected["debezium"], bad = topic(tmp_path / "topic")
    store_url = f"sqlite:///{tmp_path}/out.db"
    with penstock.connect(store_url) as store:
        queues = {name: store.create_queue(name, OUT) for name in urls}
        letters = store.create_queue(LETTERS, penstock.changes.DEAD_LETTERS)

        def out(name: str) -> Counter[tuple[object, ...]]:
            return Counter(tuple(row.values()) for row in queues[name].read(0, 0).to_pylist())

        words = [word for pair in urls.items() for word in pair]
        child = run_child("tests.feeds.streaming_child", tmp_path / "out", store_url, *words)
        wait_until(
            lambda: child.returncode is not None or all(queue.info().rows for queue in queues.values()),
            240,
            "each feed has begun",
            interval=0.01,
        )
        assert child.returncode is None, child.output
        child.kill_tree()
        for name in urls:
            assert not out(name) - expected[name], name
        assert any(out(name) != expected[name] for name in urls), "the kill came too late to show anything"
        queries = [start(spark, tmp_path / "out", store_url, name, url) for name, url in urls.items()]
        for query in queries:
            query.awaitTermination()
        for name in urls:
            assert out(name) == expected[name], name
        assert sorted(letters.read(0, 0)["offset"].to_pylist()) == bad
