"""Iceberg tables whose history is cut or changed during a read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyiceberg.table import Table

from penstock.errors import DataLostError, FeedUnavailableError
from tests.feeds.iceberg.lake import Lake, found, rows


def test_expired_snapshots_are_named_as_lost_and_the_others_are_read(lake: Lake, orders: Table) -> None:
    first, second = (snapshot.snapshot_id for snapshot in orders.metadata.snapshots[:2])
    orders.maintenance.expire_snapshots().by_ids([first, second]).commit()
    orders.append(rows((8, "h", 8)))
    feed = lake.feed().open()
    assert feed.oldest() == 3
    with pytest.raises(FeedUnavailableError, match="starting_version=4") as late:
        feed.prepare()
    assert late.value.condition == "FEED_UNAVAILABLE.BEGINS_LATE"
    assert found(feed, 3, 4) == Counter([(8, "h", 8, "insert", 4)])
    for ask in (lambda: feed.tasks(1, 4, 10), lambda: list(feed.commits(0, 4))):
        with pytest.raises(DataLostError, match="start from version 4") as error:
            ask()
        assert error.value.condition == "DATA_LOST.EXPIRED"
        assert error.value.parameters["oldest"] == 3


@pytest.mark.parametrize("writer", ["pyiceberg", "others"])
def test_a_snapshot_whose_parent_has_expired_is_not_taken_for_the_first(
    lake: Lake, orders: Table, writer: str
) -> None:
    before = {each.snapshot_id: each.parent_snapshot_id for each in orders.metadata.snapshots}
    orders.maintenance.expire_snapshots().by_id(orders.metadata.snapshots[1].snapshot_id).commit()
    if writer == "others":
        # They leave the id of the parent that is gone.
        path = Path(lake.catalog.load_table("shop.orders").metadata_location.removeprefix("file://"))
        metadata = json.loads(path.read_text())
        for each in metadata["snapshots"]:
            each["parent-snapshot-id"] = before[each["snapshot-id"]]
        path.write_text(json.dumps(metadata))
    assert lake.feed().open().oldest() == 3
    with pytest.raises(DataLostError, match="expired"):
        lake.feed().open().tasks(1, 3, 10)


def test_the_first_snapshot_of_the_main_branch_may_not_be_the_tables_first(lake: Lake) -> None:
    table = lake.table()
    table.append(rows((50, "staged", 0)), branch=None)
    table.append(rows((51, "main", 0)))
    feed = lake.feed().open()
    assert feed.prepare() == feed.oldest() == 0
    assert found(feed, 0, 2) == Counter([(51, "main", 0, "insert", 2)])


def test_a_rollback_during_a_stream_is_detected(lake: Lake, orders: Table) -> None:
    feed = lake.feed().open()
    feed.logged(2)
    assert feed.newest(2) == 3
    feed.logged(3)
    assert feed.newest(3) == 3
    second = orders.metadata.snapshots[1].snapshot_id
    orders.manage_snapshots().rollback_to_snapshot(second).commit()

    def check(ask: Callable[[], object]) -> None:
        with pytest.raises(DataLostError, match=r"version 3 of .* is no longer the commit") as error:
            ask()
        assert error.value.condition == "DATA_LOST.HISTORY_CHANGED"

    check(lambda: feed.newest(3))
    orders.append(rows((9, "z", 9)))
    check(lambda: feed.newest(3))
    check(lambda: feed.tasks(3, 4, 10))
    # A micro-batch that was planned before and is read again after a restart.
    check(lambda: lake.feed().open().tasks(2, 3, 10))
    # The snapshot that was gone back from may have been expired since.
    orders.maintenance.expire_snapshots().by_id(orders.metadata.snapshots[2].snapshot_id).commit()
    restarted = lake.feed().open()
    restarted.logged(3)
    check(lambda: restarted.newest(3))
    # A query that had not read it resumes as if it had never existed.
    assert found(lake.feed().open(), 2, 4) == Counter([(9, "z", 9, "insert", 4)])


def test_commits_of_another_branch_are_not_part_of_the_feed(lake: Lake, orders: Table) -> None:
    orders.manage_snapshots().create_branch(orders.metadata.snapshots[2].snapshot_id, "audit").commit()
    orders.append(rows((50, "other", 0)), branch="audit")
    feed = lake.feed().open()
    assert feed.newest(3) == 3
    orders.append(rows((51, "main", 0)))
    feed.logged(3)
    newest = feed.newest(3)
    assert [row[0] for row in found(feed, 3, newest)] == [51]


def test_a_table_recreated_during_a_stream_is_detected(lake: Lake, orders: Table) -> None:
    feed = lake.feed().open()
    identity = feed.describe().identity
    lake.catalog.drop_table("shop.orders")
    lake.table().append(rows((1, "x", 1)))
    assert lake.feed().open().describe().identity != identity
    with pytest.raises(DataLostError, match="recreated"):
        feed.newest(3)


def test_a_missing_file_is_reported_as_lost_data(lake: Lake, orders: Table) -> None:
    feed = lake.feed().open()
    tasks = feed.tasks(0, 2, 10)
    for path in Path(orders.location().removeprefix("file://")).glob("data/*.parquet"):
        path.unlink()
    with pytest.raises(DataLostError, match="version 1, is missing"):
        [list(feed.read(task, feed.describe().planned_schema)) for task in tasks]


def test_a_table_without_snapshots_has_no_changes_yet(lake: Lake) -> None:
    table = lake.table()
    feed = lake.feed().open()
    assert (feed.oldest(), feed.newest(0), list(feed.commits(0, 0))) == (0, 0, [])
    table.append(rows((1, "a", 1)))
    assert feed.newest(0) == 1
