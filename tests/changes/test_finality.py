"""The time before which a stream of changes has all commits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.changes.finality import COLUMN
from penstock.errors import InvalidChangeOptionError
from penstock.pipeline.progress_format import progress_of
from penstock.testing import replay_last_batch
from tests.support.postgres_source import Source
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until

DATA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("n", pa.int64())])
CONTRACT = penstock.ChangeContract("id", row_version="n", whole_commits=True, intermediate_changes=True)
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(version: int) -> datetime:
    return START + timedelta(minutes=version)


@pytest.fixture
def feed(store: penstock.Store, store_url: str) -> penstock.QueueFeed:
    made = penstock.QueueFeed.create("feed", DATA, CONTRACT, store=store_url, partitions=2)
    for version in (1, 2, 4):
        add(made, version)
    return made


def add(feed: penstock.QueueFeed, version: int) -> None:
    feed.append_commit(version, at(version), [{"id": version, "n": 0, "_change_type": "insert"}])


class Batches:
    """The rows of each micro-batch of a query: version, and the time in the column."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[int, datetime | None]]] = {}

    def __call__(self, df: DataFrame, batch: int) -> None:
        rows = df.select("_commit_version", "_finalized_until").toArrow().to_pylist()
        self.seen[batch] = sorted((row["_commit_version"], row["_finalized_until"]) for row in rows)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a query that notes its micro-batches; it is stopped at the end."""
    running: list[Any] = []

    def begin(df: DataFrame, batches: Callable[[DataFrame, int], None], **trigger: object) -> Any:
        writer = df.writeStream.foreachBatch(batches).option(
            "checkpointLocation", str(tmp_path / "checkpoint")
        )
        running.append(writer.trigger(**trigger).start() if trigger else writer.start())
        return running[-1]

    yield begin
    for query in running:
        query.stop()


def once(start: Callable[..., Any], df: DataFrame, batches: Batches) -> Any:
    query = start(df, batches, availableNow=True)
    query.awaitTermination()
    return query


@one_store
def test_each_micro_batch_has_the_time_before_which_it_completes_the_feed(
    spark: SparkSession, feed: penstock.QueueFeed, start: Callable[..., Any], tmp_path: Path
) -> None:
    batches = Batches()
    options = {"maxCommitsPerTrigger": 1}
    changes = penstock.changes.read_stream(spark, feed, finalized_until=True, options=options)
    assert changes.columns[-1] == "_finalized_until"
    query = once(start, changes, batches)
    assert list(batches.seen.values()) == [[(version, at(version))] for version in (1, 2, 4)]
    assert penstock.changes.finalized_until(query) == at(4)
    replay_last_batch(tmp_path / "checkpoint")
    # What comes later does not change what the micro-batch had.
    add(feed, 5)
    again = Batches()
    once(start, changes, again)
    assert list(again.seen.values()) == [[(4, at(4))], [(5, at(5))]]


@one_store
def test_some_columns_are_read_with_the_time(
    spark: SparkSession, feed: penstock.QueueFeed, start: Callable[..., Any]
) -> None:
    batches = Batches()
    changes = penstock.changes.read_stream(
        spark, feed, columns="id", finalized_until=True, deduplication_mode="netChanges", net_window="commit"
    )
    assert changes.columns == ["id", "n", "_change_type", "_commit_version", "_commit_timestamp", COLUMN]
    once(start, changes, batches)
    assert batches.seen == {0: [(version, at(4)) for version in (1, 2, 4)]}


@one_store
def test_the_data_source_has_the_column_as_an_option(
    spark: SparkSession, feed: penstock.QueueFeed, start: Callable[..., Any]
) -> None:
    batches = Batches()
    reader = spark.readStream.format("penstock_changes").option("finalizedUntil", "true")
    once(start, reader.load(feed.url), batches)
    assert batches.seen == {0: [(version, at(4)) for version in (1, 2, 4)]}


def test_a_query_with_nothing_to_read_goes_on_with_its_feed(
    spark: SparkSession, source: Source, start: Callable[..., Any]
) -> None:
    table = source.table("id int primary key")
    other = f"{source.name}.other"
    source.run(f"CREATE TABLE {other} (n int)")
    source.make_slot()
    feed = source.feed()
    batches = Batches()
    query = start(penstock.changes.read_stream(spark, feed, finalized_until=True), batches)
    source.run(f"INSERT INTO {table} VALUES (1)")
    wait_until(lambda: batches.seen, 60, "a micro-batch")
    wait_until(lambda: query.lastProgress is not None, 60, "its progress")
    (committed,) = source.rows("SELECT clock_timestamp()")[0]
    assert isinstance(committed, datetime)

    def passed() -> bool:
        now = penstock.changes.finalized_until(query, feed)
        return now is not None and now > committed

    # A write elsewhere has the server's log end after all that it has done before.
    source.run(f"INSERT INTO {other} VALUES (1)")
    wait_until(passed, 60, "the time to go on")
    last = penstock.changes.finalized_until(query)
    assert last is None or last < committed


@one_store
def test_another_feed_says_nothing(
    spark: SparkSession, feed: penstock.QueueFeed, store_url: str, start: Callable[..., Any]
) -> None:
    other = penstock.QueueFeed.create("other", DATA, CONTRACT, store=store_url)
    add(other, 9)
    query = once(start, penstock.changes.read_stream(spark, feed, finalized_until=True), Batches())
    assert penstock.changes.finalized_until(query, other.url) == at(4)


def test_a_query_without_progress_or_feeds_has_no_time(
    spark: SparkSession, start: Callable[..., Any]
) -> None:
    new = SimpleNamespace(lastProgress=None)
    assert penstock.changes.finalized_until(new) is None
    rate = start(spark.readStream.format("rate").load(), lambda df, batch: None)
    wait_until(lambda: rate.lastProgress is not None, 60, "progress")
    assert penstock.changes.finalized_until(rate) is None


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["2026-01-01T00:00:02Z", "2026-01-01T00:00:01Z"], 1),
        (["2026-01-01T00:00:02Z", None], None),
        (["not a time"], None),
        ([], None),
    ],
)
def test_the_store_gets_the_earliest_time_of_all_feeds(ends: list[str | None], expected: int | None) -> None:
    offsets = [{"feed": "f", "from": 0, "to": 1, **({"finalizedUntil": end} if end else {})} for end in ends]
    sources = [{"description": "a", "endOffset": offset} for offset in offsets]
    sources.append({"description": "rate", "endOffset": 7})
    progress = json.loads(json.dumps({"batchId": 1, "sources": sources, "sink": {}}))
    found = progress_of(progress, 1, 1).finalized_until
    base = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
    assert found == (None if expected is None else base + expected * 1_000_000)


@one_store
def test_a_column_of_that_name_and_windows_are_refused(
    spark: SparkSession, store: penstock.Store, store_url: str, feed: penstock.QueueFeed
) -> None:
    named = pa.schema([*DATA, ("_FINALIZED_until", pa.int64())])
    taken = penstock.QueueFeed.create("taken", named, CONTRACT, store=store_url)
    with pytest.raises(InvalidChangeOptionError, match="the feed already has one"):
        penstock.changes.read_stream(spark, taken, finalized_until=True)
    with pytest.raises(InvalidChangeOptionError, match="net changes of a window"):
        penstock.changes.read_stream(
            spark, feed, finalized_until=True, deduplication_mode="netChanges", net_window="1 hour"
        )
