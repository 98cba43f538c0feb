"""Snapshots as a change feed: the difference between each and the next, whatever happens to the older
ones.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import penstock
from penstock.changes.differences import diff
from penstock.errors import (
    DataLostError,
    FeedUnavailableError,
    InvalidChangelogSchemaError,
    InvalidInputError,
    InvalidUrlError,
)
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_TIMESTAMP, COMMIT_VERSION
from penstock.feeds.snapshots import OpenSnapshotFeed, SnapshotFeed, versions_of
from penstock.feeds.urls import parse
from tests.support.change_frames import Sink, collected, tuples
from tests.support.feed_reading import changes, passed

SCHEMA = pa.schema([("id", pa.int64()), ("data", pa.string())])
State = dict[int, str | None]
STATES = st.dictionaries(st.integers(0, 8), st.sampled_from([None, "p", "q"]), max_size=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "snapshots"
    found.mkdir()
    return found


def table(state: State) -> pa.Table:
    return pa.table([list(state), list(state.values())], schema=SCHEMA)


def write(folder: Path, name: str, state: State, files: int = 0) -> None:
    """A snapshot: a file, or a folder of so many files."""
    rows = table(state)
    if not files:
        pq.write_table(rows, folder / f"{name}.parquet")
        return
    (folder / name).mkdir()
    for number in range(files):
        part = rows.filter(
            pc.equal(pc.subtract(rows["id"], pc.multiply(pc.divide(rows["id"], files), files)), number)
        )
        pq.write_table(part, folder / name / f"part-{number}.parquet", row_group_size=2)


def replay(found: pa.Table, state: State, version: int) -> State:
    state = dict(state)
    here = found.filter(pc.equal(found[COMMIT_VERSION], version)).to_pylist()
    for row in here:
        if row[CHANGE_TYPE] in ("delete", "update_preimage"):
            assert state.pop(row["id"]) == row["data"]
    for row in here:
        if row[CHANGE_TYPE] in ("insert", "update_postimage"):
            assert row["id"] not in state
            state[row["id"]] = row["data"]
    return state


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_replaying_the_changes_gives_every_snapshot(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("snapshots")
    states: dict[int, State] = {}
    version = data.draw(st.sampled_from([0, 1, 7]))
    for _ in range(data.draw(st.integers(1, 6))):
        states[version] = data.draw(STATES)
        write(folder, f"s-{version}", states[version], data.draw(st.integers(0, 3)))
        version += data.draw(st.integers(1, 4))
    feed = SnapshotFeed(str(folder), "id").open()
    first, newest = min(states), max(states)
    oldest = feed.oldest()
    assert (oldest, feed.newest(-1)) == (0 if first == 1 else first, newest)
    cuts = sorted({oldest, newest, *data.draw(st.lists(st.sampled_from(sorted(states)), max_size=3))})
    per_task = data.draw(st.integers(1, 8))
    found = pa.concat_tables(
        [changes(feed, *cut, per_task) for cut in pairwise(cuts)] or [changes(feed, 0, 0)]
    )
    for updates in (False, True):
        state = {} if first == 1 else states[first]
        done = passed(feed, found, updates=updates)
        for each in sorted(states):
            state = replay(done, state, each)
            assert state == states[each]
        kept = Counter(tuples(done.select(["id", "data", COMMIT_VERSION])))
        assert max(kept.values(), default=1) == 1
    for commit in feed.commits(oldest, newest, 10**9):
        assert commit.rows == found.filter(pc.equal(found[COMMIT_VERSION], commit.version)).num_rows


def test_versions_do_not_change_when_older_snapshots_are_removed_and_lost_ones_are_named(
    folder: Path,
) -> None:
    for number in range(1, 5):
        write(folder, f"{number:04}", {1: str(number), number: "x"}, files=number % 2)
    feed = SnapshotFeed(str(folder), "id").open()
    assert feed.oldest() == 0
    assert [commit.version for commit in feed.commits(-1, 9)] == [1, 2, 3, 4]
    before = changes(feed, 2, 4)
    tasks = feed.tasks(0, 1, 10)
    for name in ("0001", "0002.parquet"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataLostError, match="which version 1 needs"):
        list(feed.read(tasks[0], feed.describe().planned_schema))
    for after in (-1, 0, 1, 2):
        with pytest.raises(DataLostError, match="versions 4 to 4") as raised:
            feed.tasks(after, 4, 10)
        assert raised.value.parameters["first"] == 4
        with pytest.raises(DataLostError):
            list(feed.commits(after, 4))
    assert feed.oldest() == 3
    assert changes(feed, 3, 4).equals(before.filter(pc.equal(before[COMMIT_VERSION], 4)))
    assert feed.tasks(4, 9, 10) == []


@pytest.mark.parametrize(
    ("names", "versions"),
    [
        (["v2", "v10", "v9"], [2, 10, 9]),
        (["2026-01-31", "2026-02-01"], [20260131, 20260201]),
        (["t_2026-01-31T12-00-05.parquet", "t_2026-01-31T13-00-00"], [20260131120005, 20260131130000]),
        (["0007.parquet"], [7]),
    ],
)
def test_the_number_in_a_name_is_its_version(names: Sequence[str], versions: Sequence[int]) -> None:
    assert versions_of(names, "here") == dict(zip(names, versions, strict=True))


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["latest"], "no number"),
        (["1", "01.parquet"], "both version 1"),
        (["a1", "b2"], "not equal apart from their digits"),
        (["2026-1-31", "2026-01-05"], "not equal apart from their digits"),
        (["1-final", "2"], "not equal apart from their digits"),
        (["1" * 19], "digits"),
    ],
)
def test_names_without_a_clear_order_are_refused(names: Sequence[str], match: str) -> None:
    with pytest.raises(FeedUnavailableError, match=match) as raised:
        versions_of(names, "here")
    assert raised.value.condition == "FEED_UNAVAILABLE.AMBIGUOUS_NAMES"


def test_incomplete_snapshots_are_left_out(folder: Path) -> None:
    write(folder, "1", {1: "a"})
    write(folder, "2", {1: "b"}, files=1)
    write(folder, "3", {}, files=1)
    (folder / "3/_temporary").mkdir()
    (folder / "4").mkdir()
    write(folder, "_5", {1: "c"})
    (folder / "2/_SUCCESS").touch()
    (folder / "2/.part-0.parquet.crc").touch()
    feed = SnapshotFeed(str(folder), "id").open()
    assert feed.newest(-1) == 2
    (folder / "3/_temporary").rmdir()
    assert feed.newest(-1) == 3
    (folder / "_5.parquet").rename(folder / "5.parquet")
    assert feed.newest(-1) == 5
    state: State = {}
    found = passed(feed, changes(feed, 0, 5))
    for version, expected in ((1, {1: "a"}), (2, {1: "b"}), (3, {}), (5, {1: "c"})):
        state = replay(found, state, version)
        assert state == expected


def test_files_that_two_snapshots_share_through_a_hard_link_are_not_read(folder: Path) -> None:
    write(folder, "1", {0: "a", 1: "b", 2: "c"}, files=3)
    shutil.copytree(folder / "1", folder / "2", copy_function=os.link)
    (folder / "2/part-1.parquet").unlink()
    pq.write_table(table({1: "new"}), folder / "2/part-1.parquet")
    feed = SnapshotFeed(str(folder), "id").open()
    found = changes(feed, 1, 2)
    assert sorted(zip(found[CHANGE_TYPE].to_pylist(), found["data"].to_pylist(), strict=True)) == [
        ("delete", "b"),
        ("insert", "new"),
    ]
    assert [commit.rows for commit in feed.commits(1, 2, 100)] == [2]


def test_older_snapshots_may_lack_columns_or_are_refused_by_name(folder: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int32())}), folder / "1.parquet")
    write(folder, "2", {1: None, 2: "b"})
    feed = SnapshotFeed(str(folder), "id").open()
    assert [row["id"] for row in passed(feed, changes(feed, 0, 2)).to_pylist()] == [1, 2]
    pq.write_table(pa.table({"id": ["1"], "data": ["b"]}), folder / "3.parquet")
    with pytest.raises(FeedUnavailableError, match=r"2\.parquet.*'id'") as raised:
        changes(feed, 2, 3)
    assert raised.value.condition == "FEED_UNAVAILABLE.SCHEMA_CHANGED"


def test_a_running_query_stops_before_a_snapshot_with_other_columns(folder: Path) -> None:
    write(folder, "1", {1: "a"})
    feed = SnapshotFeed(str(folder), "id").open()
    planned = feed.describe().planned_schema
    pq.write_table(pa.table({"id": [1, 2], "data": ["a", "b"], "more": ["x", "y"]}), folder / "2.parquet")
    tasks = [feed.tasks(0, 1, 10), feed.tasks(1, 2, 10)]
    assert sum(batch.num_rows for task in tasks[0] for batch in feed.read(task, planned)) == 1
    with pytest.raises(FeedUnavailableError, match="'more' was added") as raised:
        [list(feed.read(task, planned)) for task in tasks[1]]
    assert raised.value.condition == "FEED_UNAVAILABLE.SCHEMA_CHANGED"
    again = changes(feed, 1, 2).select(["id", "more", CHANGE_TYPE]).to_pylist()
    assert [tuple(row.values()) for row in again] == [
        (1, None, "delete"),
        (1, "x", "insert"),
        (2, "y", "insert"),
    ]


def test_a_folder_listed_as_in_an_object_store(folder: Path) -> None:
    write(folder, "1", {1: "a"}, files=2)
    write(folder, "2", {1: "b"}, files=1)
    feed = SnapshotFeed(folder.as_uri(), "id").open()
    plain = SnapshotFeed(str(folder), "id").open()
    assert changes(feed, 0, 2).equals(changes(plain, 0, 2))
    written = max(path.stat().st_mtime_ns for path in (folder / "2").iterdir()) // 1000
    assert [commit.timestamp for commit in feed.commits(1, 2)] == [written]


def test_invalid_snapshots_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def condition(feed: OpenSnapshotFeed, match: str) -> str:
        with pytest.raises((FeedUnavailableError, InvalidChangelogSchemaError), match=match) as raised:
            feed.describe()
        return raised.value.condition.partition(".")[2]

    feed = SnapshotFeed(str(folder), "id").open()
    assert condition(SnapshotFeed(str(tmp_path / "none"), "id").open(), "check that it exists") == "STORAGE"
    assert condition(SnapshotFeed("s3://user:secret@/x", "id").open(), "check that it exists") == "STORAGE"
    assert condition(feed, "no snapshots") == "NO_SNAPSHOTS"
    (folder / "notes-1.txt").touch()
    assert condition(feed, r"notes-1\.txt") == "AMBIGUOUS_NAMES"
    (folder / "notes-1.txt").unlink()
    (folder / "1/p=a").mkdir(parents=True)
    assert condition(feed, "p=a") == "PARTITIONED_SNAPSHOT"
    shutil.rmtree(folder / "1")
    (folder / "2.parquet").write_bytes(b"nothing of the kind")
    assert condition(feed, r"2\.parquet") == "UNREADABLE_FILE"
    pq.write_table(pa.table({"_Change_Type": ["x"]}), folder / "2.parquet")
    assert condition(feed, "rename") == "RESERVED_COLUMN"
    write(folder, "3", {})
    assert condition(SnapshotFeed(str(folder), "idd").open(), "Did you mean 'id'") == "MISSING_COLUMN"


def test_the_url_gives_the_same_feed() -> None:
    feed = SnapshotFeed("gs://user:secret@bucket/a b?é", ["id", "x.y"])
    assert parse(feed.url) == feed
    assert feed.name == "gs://user@bucket/a b"
    assert feed == pickle.loads(pickle.dumps(feed))
    with pytest.raises(InvalidUrlError):
        parse("snapshots:/x?rowid=id")
    with pytest.raises(InvalidChangelogSchemaError, match=r"snapshots:PATH\?row_id="):
        parse("snapshots:/x")


# Through Spark.


def test_snapshots_of_a_table_without_a_key_may_hold_nulls_and_equal_rows(folder: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    for number, values in enumerate([["x", "x", None], ["x", None, None]], 1):
        state = [{"a": 1, "b": value} for value in values]
        pq.write_table(pa.Table.from_pylist(state, schema), folder / f"{number}.parquet")
    opened = SnapshotFeed(str(folder), ["a", "b"]).open()
    found = passed(opened, changes(opened, 1, 2), updates=True).to_pylist()
    assert Counter((row["b"], row[CHANGE_TYPE]) for row in found) == {("x", "delete"): 1, (None, "insert"): 1}


def test_batch_and_stream(spark: SparkSession, folder: Path, tmp_path: Path) -> None:
    write(folder, "1", {1: "a", 2: "b"}, files=2)
    write(folder, "2", {1: "a", 2: "c", 3: "d"})
    write(folder, "3", {2: "c", 3: "d"}, files=1)
    feed = SnapshotFeed(str(folder), "id")
    opened = feed.open()
    expected = Counter(tuples(passed(opened, changes(opened, 0, 3), updates=True)))
    assert len(expected) == 6
    assert collected(penstock.changes.read(spark, feed, compute_updates=True)) == expected
    stream = penstock.changes.read_stream(
        spark, feed.url, compute_updates=True, options={"maxCommitsPerTrigger": 1}
    )
    assert Sink(tmp_path).run(stream) == expected


@pytest.mark.parametrize("change", ["removed", "rewritten", "removed with the older ones"])
def test_a_stream_whose_last_snapshot_is_no_longer_the_one_that_was_read_is_refused(
    spark: SparkSession, folder: Path, tmp_path: Path, change: str
) -> None:
    """The next snapshot would be compared with another one than the sink has."""
    write(folder, "1", {1: "a"})
    write(folder, "2", {1: "a", 2: "only here"}, files=1)
    sink = Sink(tmp_path)

    def run() -> None:
        sink.run(penstock.changes.read_stream(spark, SnapshotFeed(str(folder), "id")))

    run()
    run()
    shutil.rmtree(folder / "2")
    if change == "rewritten":
        write(folder, "2", {1: "a", 2: "another value"}, files=1)
    elif change == "removed with the older ones":
        (folder / "1.parquet").unlink()
    write(folder, "3", {1: "a", 3: "b"})
    with pytest.raises(StreamingQueryException) as caught:
        run()
    condition = "FILE_MISSING" if change == "removed with the older ones" else "HISTORY_CHANGED"
    assert f"[DATA_LOST.{condition}]" in str(caught.value)


def test_between_two_dataframes(spark: SparkSession) -> None:
    old = spark.createDataFrame(table({1: "a", 2: "b", 3: None, 4: "d"}))
    new = spark.createDataFrame(table({1: "a", 2: "c", 3: None, 5: "e"}))
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    done = diff(old, new.select("data", "id"), row_id="id", version=7, timestamp=moment)
    assert done.columns == ["data", "id", CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP]
    found = done.toArrow()
    assert sorted(zip(found["id"].to_pylist(), found[CHANGE_TYPE].to_pylist(), strict=True)) == [
        (2, "delete"),
        (2, "insert"),
        (4, "delete"),
        (5, "insert"),
    ]
    assert set(found[COMMIT_VERSION].to_pylist()) == {7}
    assert set(found[COMMIT_TIMESTAMP].to_pylist()) == {moment}
    updates = diff(old, new, row_id=["id"], compute_updates=True).toArrow()
    assert Counter(updates[CHANGE_TYPE].to_pylist()) == dict.fromkeys(
        ["update_preimage", "update_postimage", "delete", "insert"], 1
    )
    assert diff(old, old, row_id="id").count() == 0


def test_between_refuses_incompatible_dataframes(spark: SparkSession) -> None:
    frame = spark.createDataFrame(table({1: "a", 2: "b"}))
    for other, match in (
        (frame.drop("data"), "'data'"),
        (frame.withColumnRenamed("data", "date"), "Did you mean 'date'"),
        (frame.selectExpr("id", "length(data) as data"), "'data' is string in before and int in after"),
        (frame.selectExpr("*", "1 as _commit_version"), "_commit_version"),
    ):
        with pytest.raises(InvalidChangelogSchemaError, match=match):
            diff(frame, other, row_id="id")
    with pytest.raises(InvalidChangelogSchemaError, match="'idd'"):
        diff(frame, frame, row_id="idd")
    with pytest.raises(InvalidInputError, match="time zone"):
        diff(frame, frame, row_id="id", timestamp=datetime(2026, 1, 1))  # noqa: DTZ001 - the point
    with pytest.raises(InvalidInputError, match=r"INPUT.STREAMING\].*two batch DataFrames"):
        diff(frame, spark.readStream.format("rate").load(), row_id="id")
    twice: Any = frame.union(frame.limit(1))
    with pytest.raises(Exception, match="several rows of after have the row id") as raised:
        diff(frame, twice, row_id="id").collect()
    assert "DUPLICATE_ROW_ID" in str(raised.value)
