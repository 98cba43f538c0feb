"""Delta tables whose log was cleaned up, and tables that were restored, replaced or recreated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

import penstock
from penstock.errors import DataLostError, FeedUnavailableError
from penstock.feeds.delta import DeltaFeed
from tests.feeds.delta.tables import (
    FEED,
    SCHEMA,
    WIDER,
    History,
    add_column,
    check_replay,
    data,
    edit,
    log_file,
    refused,
    rows,
)
from tests.support.change_frames import Sink
from tests.support.feed_reading import changes, passed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


def with_mapping(path: Path, mode: str, dropped_in: int) -> History:
    """A table whose columns were mapped from version 0 on, until a version that drops the mapping."""
    history = History(path, feed=True, partitioned=False)
    for number in range(dropped_in):
        history.append(rows((number, "a", 1.0)))
    actions = [json.loads(line) for line in log_file(path, 0).read_text().splitlines()]
    plain = next(action for action in actions if "metaData" in action)
    edit(path, 0, metaData=lambda found: found["configuration"].update({"delta.columnMapping.mode": mode}))
    with log_file(path, dropped_in).open("a") as file:
        file.write("\n" + json.dumps(plain))
    return history


def clean_up(history: History, first: int) -> None:
    """Delete the commits before a version, and all checkpoints but one of the newest version."""
    history.table.create_checkpoint()
    for version in range(first):
        log_file(Path(history.path), version).unlink()


def test_versions_whose_columns_the_log_no_longer_has_are_gone(path: Path) -> None:
    """Commits are deleted by age, so the first ones that are left may be older than any checkpoint."""
    history = with_mapping(path, "name", dropped_in=3)
    history.append(rows((7, "a", 1.0)))
    clean_up(history, 1)
    feed = DeltaFeed(path).open()
    assert feed.oldest() == 2
    for after in (0, 1):
        with pytest.raises(
            DataLostError, match=r"depends on a commit .* versions 3 to 4 can be read"
        ) as raised:
            feed.tasks(after, 4, 10)
        assert raised.value.condition == "DATA_LOST.DELTA"
    assert changes(feed, 2)["id"].to_pylist() == [2, 7]


def test_a_version_that_removes_files_of_an_unknown_version_is_gone(path: Path) -> None:
    history = with_mapping(path, "name", dropped_in=3)
    with log_file(path, 3).open("a") as file:
        file.write("\n" + json.dumps({"remove": {"path": "old.parquet", "dataChange": True}}))
    history.append(rows((7, "a", 1.0)))
    clean_up(history, 1)
    with pytest.raises(
        DataLostError, match=r"version 3 .* depends on a commit .* versions 4 to 4 can be read"
    ):
        DeltaFeed(path).open().tasks(2, 4, 10)


def test_versions_before_a_checkpoint_are_read_if_no_commit_changed_the_table(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    for number in range(4):
        history.append(rows((number, "a", 1.0)))
    clean_up(history, 2)
    feed = DeltaFeed(path).open()
    assert feed.oldest() == 1
    assert changes(feed, 1)["id"].to_pylist() == [1, 2, 3]
    assert {part.commit.columns for task in feed.tasks(1, 4, 10) for part in task} != {()}


def test_a_version_that_removes_files_with_mapped_columns_is_refused(path: Path) -> None:
    history = History(path, feed=False, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    history.overwrite(rows((2, "a", 1.0)))
    actions = [json.loads(line) for line in log_file(path, 0).read_text().splitlines()]
    plain = next(action for action in actions if "metaData" in action)
    edit(path, 0, metaData=lambda found: found["configuration"].update({"delta.columnMapping.mode": "name"}))
    with log_file(path, 2).open("a") as file:
        file.write("\n" + json.dumps(plain))
    with refused("COLUMN_MAPPING", "version 2 "):
        DeltaFeed(path, "id").open().tasks(1, 2, 10)


@pytest.mark.parametrize("feed_on", [True, False], ids=["feed", "files"])
def test_a_table_that_is_restored(path: Path, feed_on: bool) -> None:
    history = History(path, feed=feed_on, partitioned=True)
    history.append(rows((1, "a", 1.0), (2, "b", 2.0)))
    history.update(rows((1, "a", 1.0)))
    history.delete_all(rows())
    history.table.restore(1)
    history.append(rows((3, "c", 3.0)))
    history.table.restore(2)
    feed = DeltaFeed(path, "id").open()
    check_replay(path, passed(feed, changes(feed), updates=True))


def test_a_replaced_table_is_read_by_a_new_query_and_refused_by_a_running_one(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    running = DeltaFeed(path, "id").open()
    before = running.describe()
    DeltaTable.create(path, SCHEMA, mode="overwrite", configuration=FEED)
    history.append(rows((7, "a", 1.0)))
    with refused("TABLE_REPLACED", "version 2 .*new checkpoint"):
        running.tasks(1, 3, 10)
    feed = DeltaFeed(path, "id").open()
    assert feed.describe().identity != before.identity
    check_replay(path, changes(feed))


def test_a_stream_of_a_table_that_is_dropped_and_recreated_is_refused(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    History(path, feed=True, partitioned=False).append(rows((1, "a", 1.0)))
    sink = Sink(tmp_path)
    assert sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))
    shutil.rmtree(path)
    again = History(path, feed=True, partitioned=False)
    for number in range(3):
        again.append(rows((number, "a", 1.0)))
    with pytest.raises(Exception, match="CHECKPOINT_MISMATCH"):
        sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))


def test_a_stream_of_a_table_that_was_restored_from_a_backup_is_refused(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    shutil.copytree(path, tmp_path / "backup")
    history.append(rows((2, "a", 1.0)))
    history.append(rows((3, "a", 1.0)))
    sink = Sink(tmp_path)
    assert len(sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))) == 3
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    with pytest.raises(Exception, match=r"DATA_LOST.HISTORY_CHANGED.*new checkpoint"):
        sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))
    feed = DeltaFeed(path).open()
    feed.logged(3)
    with pytest.raises(DataLostError, match=r"version 3 .* at version 1 now"):
        feed.newest(3)


def test_columns_changed_before_the_log_was_cleaned_up(path: Path) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    add_column(path)
    history.table.create_checkpoint()
    write_deltalake(path, rows((6, "x", 1.0, "more"), schema=WIDER), mode="append")
    for version in range(3):
        log_file(path, version).unlink()
    feed = DeltaFeed(path, "id").open()
    assert data(changes(feed, 2)) == [{"id": 6, "p": "x", "v": 1.0, "extra": "more"}]
    with pytest.raises(DataLostError, match="versions 3 to 3 can be read"):
        feed.tasks(0, 3, 10)
    with pytest.raises(FeedUnavailableError, match="starting_version=3"):
        feed.prepare()


def test_a_stream_of_a_restored_table_is_refused_even_at_the_same_version(
    spark: SparkSession, path: Path, tmp_path: Path
) -> None:
    history = History(path, feed=True, partitioned=False)
    history.append(rows((1, "a", 1.0)))
    shutil.copytree(path, tmp_path / "backup")
    history.append(rows((2, "a", 1.0)))
    sink = Sink(tmp_path)
    assert len(sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))) == 2
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    for number in range(3, 5):
        history.append(rows((number, "a", 1.0)))
    with pytest.raises(Exception, match=r"DATA_LOST.HISTORY_CHANGED.*no longer the commit"):
        sink.run(penstock.changes.read_stream(spark, DeltaFeed(path)))
