"""The changes of Iceberg tables through Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table
from pyspark.sql import SparkSession

import penstock as ps
from tests.changes.feeds.iceberg_feed.lake import (
    SCHEMA,
    Lake,
    commit_deletes,
    counted,
    delete_file,
    live_files,
    new_files,
    read_all,
    rows,
    versions,
)
from tests.changes.frames import Sink
from tests.support.processes import ChildProcess
from tests.support.waiting import wait_until


def test_a_batch_read_has_updates_without_what_did_not_change(
    spark: SparkSession, lake: Lake, orders: Table
) -> None:
    file = next(each for each in live_files(orders) if each.record_count == 1)
    (held,) = pq.read_table(file.file_path).to_pylist()
    added = new_files(orders, rows((held["id"], "changed", 0)))
    commit_deletes(orders, delete_file(orders, [(file, 0)]), added=added)
    frame = ps.changes.read(
        spark, lake.feed(row_id="id"), starting_version=3, compute_updates=True, options={"rowsPerTask": 1}
    )
    shown = {(row["_commit_version"], row["_change_type"], row["data"]) for row in frame.collect()}
    assert shown == {
        (3, "delete", "b"),
        (4, "update_preimage", held["data"]),
        (4, "update_postimage", "changed"),
    }


def test_a_stream_takes_the_commits_as_they_come(
    spark: SparkSession, lake: Lake, orders: Table, tmp_path: Path
) -> None:
    sink = Sink(tmp_path)

    def run() -> list[int]:
        frame = ps.changes.read_stream(
            spark, lake.feed(row_id="id"), options={"maxCommitsPerTrigger": 2}
        ).select("_commit_version", "id", "_change_type")
        sink.batches.clear()
        return sorted(row[0] for row in sink.run(frame).elements())

    assert run() == [1, 1, 2, 3]
    assert len(sink.batches) == 2
    orders.append(rows((4, "d", 4)))
    assert run() == [4]
    orders.manage_snapshots().rollback_to_snapshot(orders.metadata.snapshots[2].snapshot_id).commit()
    with pytest.raises(Exception, match="is not in the history"):
        run()


@pytest.mark.crash
@pytest.mark.soak
def test_a_killed_stream_into_a_queue_goes_on_and_repeats_nothing(
    lake: Lake, tmp_path: Path, run_child: Callable[..., ChildProcess]
) -> None:
    url = f"sqlite:///{tmp_path}/penstock.db"
    table = lake.table()
    for key in range(6):
        table.append(rows((key, str(key), key)))
    table.delete("id = 3")
    feed = lake.feed(row_id="id")
    with ps.connect(url, create=True) as store:
        queue = store.create_queue("changes", feed.describe().schema)
        arguments = (feed.url, url, tmp_path)
        child = run_child("tests.changes.feeds.iceberg_feed.child", *arguments, "forever")
        wait_until(lambda: queue.info().partitions[0].next_index >= 3, 120, "some commits are in the queue")
        child.kill_tree()
        table.append(rows((9, "z", 9)))
        child = run_child("tests.changes.feeds.iceberg_feed.child", *arguments, "all")
        assert child.wait() == 0, child.output
        held = queue.read(0, 0)
        assert counted(held) == counted(read_all(feed))
        assert versions(held) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert SCHEMA.names == held.column_names[:3]
