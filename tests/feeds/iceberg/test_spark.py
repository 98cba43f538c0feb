"""The changes of Iceberg tables through Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table
from pyspark.sql import SparkSession

import penstock
from tests.feeds.iceberg.lake import Lake, commit_deletes, delete_file, live_files, new_files, rows
from tests.feeds.iceberg.numbered import Numbered
from tests.support.change_frames import Sink


def test_a_batch_read_has_updates_and_omits_unchanged_rows(
    spark: SparkSession, lake: Lake, orders: Table
) -> None:
    file = next(each for each in live_files(orders) if each.record_count == 1)
    (held,) = pq.read_table(file.file_path).to_pylist()
    added = new_files(orders, rows((held["id"], "changed", 0)))
    commit_deletes(orders, delete_file(orders, [(file, 0)]), added=added)
    frame = penstock.changes.read(
        spark, lake.feed(row_id="id"), starting_version=3, compute_updates=True, options={"rowsPerTask": 1}
    )
    shown = {(row["_commit_version"], row["_change_type"], row["data"]) for row in frame.collect()}
    assert shown == {
        (3, "delete", "b"),
        (4, "update_preimage", held["data"]),
        (4, "update_postimage", "changed"),
    }


def test_a_stream_reads_commits_as_they_arrive(
    spark: SparkSession, lake: Lake, orders: Table, tmp_path: Path
) -> None:
    sink = Sink(tmp_path)

    def run() -> list[int]:
        frame = penstock.changes.read_stream(
            spark, lake.feed(row_id="id"), options={"maxCommitsPerTrigger": 2}
        ).select("_commit_version", "id", "_change_type")
        sink.batches.clear()
        return sorted(row[0] for row in sink.run(frame).elements())

    assert run() == [1, 1, 2, 3]
    assert len(sink.batches) == 2
    orders.append(rows((4, "d", 4)))
    assert run() == [4]
    orders.manage_snapshots().rollback_to_snapshot(orders.metadata.snapshots[2].snapshot_id).commit()
    with pytest.raises(Exception, match="is no longer the commit"):
        run()


def test_a_table_of_format_3_without_a_key_has_updates_by_row_lineage(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    table = Numbered.create(lake)
    first = table.write((7, "a", 0), (7, "a", 0), (7, "b", 0), stored=False)
    table.commit(first)
    table.commit(table.write((7, "changed", 0, 1, None), (7, "b", 0, 2, 1)), removed=[first.path])
    sink = Sink(tmp_path)
    frame = penstock.changes.read_stream(spark, lake.feed().url, compute_updates=True, starting_version=2)
    shown = sink.run(frame.select("_row_id", "data", "_change_type", "_last_updated_sequence_number"))
    assert sorted(shown.elements()) == [
        (0, "a", "delete", 1),
        (1, "a", "update_preimage", 1),
        (1, "changed", "update_postimage", 2),
    ]
    net = penstock.changes.read(spark, lake.feed(), deduplication_mode="netChanges", columns=["data"])
    assert sorted(row["data"] for row in net.collect()) == ["b", "changed"]


def test_a_stream_started_before_format_3_keeps_the_key_that_it_had(
    spark: SparkSession, lake: Lake, orders: Table, tmp_path: Path
) -> None:
    sink = Sink(tmp_path)

    def run(**options: str) -> list[tuple[object, ...]]:
        sink.batches.clear()
        frame = penstock.changes.read_stream(spark, lake.feed(**options))
        return sorted(sink.run(frame.select("_commit_version", "id", "_change_type")).elements())

    assert [version for version, *_ in run()] == [1, 1, 2, 3]
    table = Numbered.upgraded(lake, orders)
    old = next(file for file in table.files if file.sequence == 2)
    table.commit(table.write((4, "d", 4), stored=False), removed=[old.path])
    with pytest.raises(Exception, match="row_id=") as error:
        run()
    assert "FEED_UNAVAILABLE.NO_ROW_LINEAGE" in str(error.value)
    assert run(row_id="id") == [(4, 3, "delete"), (4, 4, "insert")]
