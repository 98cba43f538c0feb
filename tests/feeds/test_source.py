"""The data source ``penstock_changes``: ranges, limits, checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

import penstock
from penstock.changes.data_source import STREAM, ChangesDataSource, ChangesStreamReader, read_options
from penstock.changes.options import ChangeRange
from penstock.errors import (
    InvalidChangelogSchemaError,
    InvalidChangeOptionError,
    InvalidOptionError,
    InvalidUrlError,
)
from penstock.feeds.protocol import Commit
from penstock.feeds.queue_feed import OpenQueueFeed
from penstock.instants import micros_of
from penstock.spark.schemas import to_struct
from penstock.testing import replay_last_batch
from tests.support.change_frames import Sink
from tests.support.spark_queues import one_store

DATA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("data", pa.string()), ("rv", pa.int64())])
CONTRACT = penstock.ChangeContract(
    "id",
    row_version="rv",
    carryover_rows=True,
    updates_as_delete_and_insert=True,
    intermediate_changes=True,
    whole_commits=True,
)
START = datetime(2026, 1, 1, tzinfo=UTC)
VERSIONS = (2, 3, 5, 8)
pytestmark = one_store


def at(version: int) -> datetime:
    return START + timedelta(seconds=version)


def commit(version: int) -> list[dict[str, Any]]:
    """Three rows are rewritten, of which one has changed."""
    rows = []
    for id in range(3):
        was, now = (version - 1, version) if id == 0 else (0, 0)
        rows.append({"id": id, "data": str(was), "rv": was, "_change_type": "delete"})
        rows.append({"id": id, "data": str(now), "rv": now, "_change_type": "insert"})
    return rows


@pytest.fixture
def feed(store: penstock.Store, store_url: str) -> penstock.QueueFeed:
    made = penstock.QueueFeed.create("feed", DATA, CONTRACT, store=store_url, partitions=2)
    for version in VERSIONS:
        made.append_commit(version, at(version), commit(version))
    return made


def versions(df: DataFrame) -> Counter[int]:
    return Counter(df.toArrow()["_commit_version"].to_pylist())


def test_selected_columns_are_read_with_those_that_the_passes_need(
    spark: SparkSession, store: penstock.Store, feed: penstock.QueueFeed, store_url: str
) -> None:
    three = ["_change_type", "_commit_version", "_commit_timestamp"]
    few = penstock.changes.read(spark, feed, columns=[], compute_updates=True)
    assert few.columns == ["id", "rv", *three]
    some = penstock.changes.read(spark, feed, columns=["DATA", "_commit_version"], compute_updates=True)
    assert some.columns == ["id", "data", "rv", *three]
    assert set(few.collect()) == set(some.drop("data").collect())
    assert penstock.changes.read_stream(spark, feed, columns=["id"]).columns == few.columns
    # Without a row version carry-overs are recognized by all columns of the rows.
    plain = penstock.ChangeContract("id", carryover_rows=True)
    made = penstock.QueueFeed.create("plain", DATA, plain, store=store_url)
    made.append_commit(1, START, commit(1))
    assert len(penstock.changes.read(spark, made, columns=["id"]).columns) == 6
    with pytest.raises(InvalidChangelogSchemaError, match=r"no column 'dat'.*Did you mean 'data'"):
        penstock.changes.read(spark, feed, columns=["dat"])


def test_batch_ranges_and_passes(spark: SparkSession, feed: penstock.QueueFeed) -> None:
    read = penstock.changes.read
    assert versions(read(spark, feed, deduplication_mode="none")) == dict.fromkeys(VERSIONS, 6)
    # Two rows are left of each commit: the delete and the insert of the row that changed.
    assert versions(read(spark, feed.url)) == dict.fromkeys(VERSIONS, 2)
    assert versions(read(spark, feed, starting_version=3, ending_version=5)) == {3: 2, 5: 2}
    assert versions(read(spark, feed, starting_version=3, starting_bound_inclusive=False)) == {5: 2, 8: 2}
    assert versions(read(spark, feed, starting_timestamp=at(3), ending_timestamp=at(8).isoformat())) == {
        3: 2,
        5: 2,
        8: 2,
    }
    assert versions(
        read(
            spark,
            feed,
            starting_timestamp=at(3),
            ending_timestamp=at(8),
            starting_bound_inclusive=False,
            ending_bound_inclusive=False,
        )
    ) == {5: 2}
    assert versions(read(spark, feed, starting_version=9)) == {}
    net = read(spark, feed, deduplication_mode="netChanges", compute_updates=True).toArrow()
    assert Counter(net["_change_type"].to_pylist()) == {"update_preimage": 1, "update_postimage": 1}
    plain = spark.read.format("penstock_changes").option("startingVersion", 5)
    for frame in (plain.load(feed.url), plain.option("url", feed.url).load()):
        assert versions(frame) == {5: 6, 8: 6}


def test_a_batch_read_that_starts_beyond_the_next_version_logs_a_warning(
    feed: penstock.QueueFeed, caplog: pytest.LogCaptureFixture
) -> None:
    def partitions(first: int) -> Sequence[object]:
        options = {"url": feed.url, "startingVersion": str(first)}
        source = ChangesDataSource(options)
        return source.reader(source.schema()).partitions()

    assert list(partitions(9)) == []
    assert not caplog.records
    assert list(partitions(10)) == []
    assert "is read from version 10, and its newest is 8" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("given", "condition"),
    [
        ({"starting_version": 1, "ending_timestamp": START}, "CONFLICTING_RANGE_TYPES"),
        ({"ending_version": 1}, "MISSING_STARTING_VERSION"),
        ({"ending_timestamp": START}, "MISSING_STARTING_TIMESTAMP"),
        ({"starting_version": 2, "ending_version": 1}, "REVERSED_RANGE"),
        ({"starting_timestamp": at(2), "ending_timestamp": at(1)}, "REVERSED_RANGE"),
        ({"starting_timestamp": "yesterday"}, "INVALID_TIMESTAMP"),
        ({"starting_timestamp": "2026-01-01T00:00:00"}, "INVALID_TIMESTAMP"),
        ({"starting_version": "two"}, "INVALID_VERSION"),
        ({"deduplication_mode": "all"}, "INVALID_DEDUPLICATION_MODE"),
    ],
)
@pytest.mark.parametrize(
    "read", [penstock.changes.read, penstock.changes.read_stream], ids=["batch", "stream"]
)
def test_an_invalid_range_is_refused(
    spark: SparkSession,
    feed: penstock.QueueFeed,
    read: Callable[..., object],
    given: dict[str, object],
    condition: str,
) -> None:
    with pytest.raises(InvalidChangeOptionError) as raised:
        read(spark, feed, **given)
    assert raised.value.condition == f"INVALID_CDC_OPTION.{condition}"


def test_unknown_options_are_refused(spark: SparkSession, feed: penstock.QueueFeed) -> None:
    with pytest.raises(InvalidOptionError, match=r"OPTION.UNKNOWN\].*Did you mean 'maxCommitsPerTrigger'"):
        penstock.changes.read_stream(spark, feed, options={"maxCommitPerTrigger": 1})
    with pytest.raises(InvalidOptionError, match=r"OPTION.UNKNOWN\].*does not apply"):
        penstock.changes.read(spark, feed, options={"maxCommitsPerTrigger": 1})
    with pytest.raises(InvalidUrlError, match=r"URL.UNKNOWN_KIND\].*Did you mean 'queue'"):
        penstock.changes.read(spark, "quue:feed")
    with pytest.raises(Exception, match="post_process"):
        spark.read.format("penstock_changes").option("url", feed.url).option("computeUpdates", True).load()


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, [VERSIONS]),
        ({"maxCommitsPerTrigger": 3}, [(2, 3, 5), (8,)]),
        # Rounded up to whole commits.
        ({"maxRowsPerTrigger": 13}, [(2, 3, 5), (8,)]),
        ({"maxRowsPerTrigger": 12}, [(2, 3), (5, 8)]),
        ({"maxRowsPerTrigger": 1}, [(2,), (3,), (5,), (8,)]),
    ],
    ids=str,
)
def test_a_micro_batch_holds_whole_commits(
    spark: SparkSession,
    feed: penstock.QueueFeed,
    tmp_path: Path,
    options: dict[str, int],
    batches: list[tuple[int, ...]],
) -> None:
    df = penstock.changes.read_stream(
        spark, feed, deduplication_mode="none", options={**options, "rowsPerTask": 4}
    )
    sink = Sink(tmp_path)
    sink.run(df.select("id", "_commit_version"))
    found = [Counter(row[1] for row in rows) for rows in sink.batches.values() if rows]
    assert found == [dict.fromkeys(each, 6) for each in batches]


@pytest.mark.parametrize(
    "bounds",
    [
        {"starting_version": 3, "ending_version": 5},
        {"starting_version": 2, "ending_version": 8, "starting_bound_inclusive": False,
            "ending_bound_inclusive": False},
        {"starting_timestamp": at(3), "ending_timestamp": at(7)},
        {"starting_timestamp": at(3), "ending_timestamp": at(8), "ending_bound_inclusive": False},
    ],
    ids=lambda bounds: " ".join(bounds),
)  # fmt: skip
def test_a_stream_accepts_the_same_bounds_as_a_batch(
    spark: SparkSession, feed: penstock.QueueFeed, tmp_path: Path, bounds: dict[str, object]
) -> None:
    frame = penstock.changes.read_stream(spark, feed, **bounds, options={"maxCommitsPerTrigger": 1})
    sink = Sink(tmp_path)
    found = sink.run(frame.select("_commit_version"))
    assert found == {(3,): 2, (5,): 2}
    assert versions(penstock.changes.read(spark, feed, **bounds)) == {3: 2, 5: 2}
    feed.append_commit(9, at(9), commit(9))
    assert sink.run(frame.select("_commit_version")) == found, "a query that has ended stays so"


def test_a_query_continues_where_it_stopped(
    spark: SparkSession, feed: penstock.QueueFeed, tmp_path: Path
) -> None:
    df = penstock.changes.read_stream(spark, feed, starting_version=3, compute_updates=True)
    sink = Sink(tmp_path)
    sink.run(df.select("_change_type", "_commit_version"))
    feed.append_commit(9, at(9), commit(9))
    expected = Counter(
        (kind, version) for version in (3, 5, 8, 9) for kind in ("update_preimage", "update_postimage")
    )
    assert sink.run(df.select("_change_type", "_commit_version")) == expected
    replay_last_batch(tmp_path / "checkpoint")
    assert sink.run(df.select("_change_type", "_commit_version")) == expected


def test_a_checkpoint_of_another_feed_is_refused(
    spark: SparkSession, store_url: str, feed: penstock.QueueFeed, tmp_path: Path
) -> None:
    sink = Sink(tmp_path)
    sink.run(penstock.changes.read_stream(spark, feed).select("id"))
    other = penstock.QueueFeed.create("other", DATA, CONTRACT, store=store_url)
    with pytest.raises(Exception, match="CHECKPOINT_MISMATCH"):
        sink.run(penstock.changes.read_stream(spark, other).select("id"))


def test_net_changes_of_a_stream_require_a_window(spark: SparkSession, feed: penstock.QueueFeed) -> None:
    with pytest.raises(InvalidChangeOptionError, match="net_window"):
        penstock.changes.read_stream(spark, feed, deduplication_mode="netChanges")


def test_a_feed_passes_through_a_pipeline_exactly_once(
    spark: SparkSession, store: penstock.Store, store_url: str, feed: penstock.QueueFeed, tmp_path: Path
) -> None:
    queue = store.create_queue("out", pa.schema([("id", pa.int64()), ("version", pa.int64())]))
    pipeline = (
        penstock.stream(spark, feed)
        .transform(lambda df: df.selectExpr("id", "_commit_version as version"))
        .write(penstock.QueueSink("out", url=store_url))
    )
    for _ in range(2):
        pipeline.start(
            checkpoint=tmp_path / "ck", trigger=penstock.Trigger.available_now()
        ).awaitTermination()
    assert Counter(queue.read(0, 0)["version"].to_pylist()) == dict.fromkeys(VERSIONS, 2)


def ends(reader: ChangesStreamReader, start: dict[str, object]) -> tuple[int, int]:
    found = reader.latestOffset(start, ReadAllAvailable())
    return found["from"], found["to"]


def reader_of(feed: penstock.QueueFeed, **options: str) -> ChangesStreamReader:
    given = read_options({"url": feed.url, **options}, STREAM, "a read")
    return ChangesStreamReader(given, to_struct(feed.open().describe().schema))


def test_commits_after_the_start_are_not_part_of_an_available_now_run(feed: penstock.QueueFeed) -> None:
    reader = reader_of(feed)
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    feed.append_commit(9, at(9), commit(9))
    assert ends(reader, start) == (-1, 8)
    assert ends(reader_of(feed), start) == (-1, 9)


def test_a_new_query_without_a_starting_version_asks_the_feed_where_to_begin(
    feed: penstock.QueueFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenQueueFeed, "prepare", lambda self: 5)
    assert reader_of(feed).initialOffset()["to"] == 5
    for options in ({"startingVersion": "3"}, {"startingTimestamp": at(3).isoformat()}, {"readOnly": "true"}):
        assert reader_of(feed, **options).initialOffset()["to"] != 5


def test_a_stream_waits_for_a_starting_time_that_no_commit_has_reached(feed: penstock.QueueFeed) -> None:
    reader = reader_of(feed, startingTimestamp=at(20).isoformat())
    start = reader.initialOffset()
    assert ends(reader, start) == (8, 8)
    feed.append_commit(9, at(9), commit(9))
    assert ends(reader, start) == (8, 8), "too early"
    feed.append_commit(20, at(20), commit(20))
    feed.append_commit(21, at(21), commit(21))
    found = reader.latestOffset(start, ReadAllAvailable())
    assert (found["from"], found["to"]) == (19, 21)
    assert ends(reader, found) == (19, 21), "nothing new"


@pytest.fixture
def backwards(feed: penstock.QueueFeed, monkeypatch: pytest.MonkeyPatch) -> penstock.QueueFeed:
    """A feed whose times go backwards, as PostgreSQL's may; a queue refuses such commits."""
    times = {2: 2, 3: 9, 5: 4, 8: 5}

    def commits(self: OpenQueueFeed, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        for version, time in times.items():
            if after < version <= upto:
                yield Commit(version, micros_of(at(time)), 6)

    monkeypatch.setattr(OpenQueueFeed, "commits", commits)
    return feed


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("cut", range(1, 10))
def test_adjacent_ranges_by_time_have_each_commit_once_even_if_times_go_backwards(
    spark: SparkSession, backwards: penstock.QueueFeed, cut: int, inclusive: bool
) -> None:
    first = {
        "startingTimestamp": at(1).isoformat(),
        "endingTimestamp": at(cut).isoformat(),
        "endingBoundInclusive": inclusive,
    }
    second = {"startingTimestamp": at(cut).isoformat(), "startingBoundInclusive": not inclusive}
    opened = backwards.open()
    ranges = []
    for bounds in (first, second):
        range_ = ChangeRange.of(bounds)
        start = range_.start(opened)
        ranges.append({version for version in VERSIONS if start < version <= range_.end(opened, start)})
    assert ranges[0] | ranges[1] == set(VERSIONS)
    assert not ranges[0] & ranges[1]


def test_a_range_with_an_ending_time_stops_before_the_first_later_commit(
    spark: SparkSession, backwards: penstock.QueueFeed
) -> None:
    feed = backwards
    bounds = {"startingTimestamp": at(1).isoformat(), "endingTimestamp": at(6).isoformat()}
    for limit in ({}, {"maxCommitsPerTrigger": "1"}):
        reader = reader_of(feed, **bounds, **limit)
        start = reader.initialOffset()
        found = reader.latestOffset(start, ReadAllAvailable())
        assert (found["from"], found["to"]) == (1, 2)
        assert reader.latestOffset(found, ReadAllAvailable()) == found
        assert reader_of(feed, **bounds).latestOffset(found, ReadAllAvailable()) == found, "after a restart"
        newest = {key: found[key] for key in ("feed", "from", "to")}
        assert reader.reportLatestOffset() == {**newest, "from": 2}
    batch = ChangeRange.of(bounds)
    assert (batch.start(feed.open()), batch.end(feed.open(), 1)) == (1, 2)
