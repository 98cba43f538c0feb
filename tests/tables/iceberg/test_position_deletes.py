"""Position deletes: rows of large data files are deleted without a copy of the file, for a while."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, ManifestContent, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import StringType
from pyspark.sql import types as spark

from penstock.errors import StoreUnavailableError
from penstock.feeds.iceberg import IcebergFeed, planning
from penstock.tables.iceberg import position_deletes
from penstock.tables.iceberg.compaction import compact
from penstock.tables.iceberg.position_deletes import MERGE_MODE_PROPERTY, write_position_deletes
from tests.support.feed_reading import changes
from tests.tables.delta.driver import FOLDS
from tests.tables.iceberg.changes_driver import ChangesDriver
from tests.tables.iceberg.deletes import delete_listed, delete_rows
from tests.tables.iceberg.driver import ROWS as COLUMNS
from tests.tables.iceberg.driver import Driver, Row, Run
from tests.tables.iceberg.faults import Killed, conflict, killed, killed_after, lost_reply, lost_request

ROWS = 200


def set_mode(run: Run, mode: str = "merge-on-read") -> None:
    run.table.transaction().set_properties({MERGE_MODE_PROPERTY: mode}).commit_transaction()


def filled(folder: Path, mode: str = "merge-on-read", app_id: str = "app") -> Driver:
    """A table of one data file, whose value is "old" in each row."""
    driver = Driver(folder, "update", "k", app_id=app_id)
    set_mode(driver, mode)
    driver.write(0, [(number, "old") for number in range(ROWS)])
    return driver


def expected(new: dict[int, str], gone: frozenset[int] = frozenset()) -> list[Row]:
    held = dict.fromkeys(range(ROWS), "old") | new
    return sorted(((k, v) for k, v in held.items() if k not in gone), key=repr)


def data_files(table: Table) -> list[DataFile]:
    return [task.file for task in table.scan().plan_files()]


def delete_files(table: Table, *, manifests: Callable[[int], object] = lambda _: None) -> list[DataFile]:
    """The delete files that the current snapshot lists."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    listed = [each for each in snapshot.manifests(table.io) if each.content == ManifestContent.DELETES]
    manifests(len(listed))
    return [entry.data_file for each in listed for entry in each.fetch_manifest_entry(table.io)]


def local(path: str) -> str:
    return path.removeprefix("file://")


def test_the_data_file_stays_and_a_file_lists_the_positions_of_replaced_rows(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    (old,) = data_files(driver.table)
    driver.write(1, [(7, "new"), (150, "new")], [(3, "new"), (900, "new")])
    assert driver.rows() == expected({3: "new", 7: "new", 150: "new", 900: "new"})
    assert old.file_path in [file.file_path for file in data_files(driver.table)]
    (deletes,) = delete_files(driver.table)
    assert (deletes.content, deletes.record_count) == (DataFileContent.POSITION_DELETES, 3)
    listed = pq.ParquetFile(local(deletes.file_path))
    assert listed.read().to_pylist() == [{"file_path": old.file_path, "pos": n} for n in (3, 7, 150)]
    ids = [listed.schema_arrow.field(n).metadata[b"PARQUET:field_id"] for n in (0, 1)]
    assert ids == [b"2147483546", b"2147483545"], "as the table format has them"
    snapshot = driver.table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    found = {name: snapshot.summary[name] for name in ("added-position-deletes", "total-delete-files")}
    assert found == {"added-position-deletes": "3", "total-delete-files": "1"}
    assert driver.orphans == []


def test_by_default_only_large_files_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, "update", "k")
    driver.write(0, [(number, "old") for number in range(ROWS)])
    driver.write(1, [(7, "new")])
    assert delete_files(driver.table) == []
    monkeypatch.setattr(position_deletes, "_MIN_FILE_BYTES", 1)
    driver.write(2, [(8, "new")])
    assert len(delete_files(driver.table)) == 1
    assert driver.rows() == expected({7: "new", 8: "new"})


@pytest.mark.parametrize("mode", ["copy-on-write", "COPY-ON-WRITE"])
def test_a_table_may_ask_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(position_deletes, "_MIN_FILE_BYTES", 1)
    driver = filled(tmp_path, mode)
    driver.write(1, [(7, "new")])
    assert delete_files(driver.table) == []
    assert driver.rows() == expected({7: "new"})


def test_a_file_that_loses_many_rows_is_copied(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    share = ROWS // 10
    driver.write(1, [(number, "new") for number in range(share)])
    assert len(delete_files(driver.table)) == 1
    driver.write(2, [(share, "new")])
    assert delete_files(driver.table) == [], "with its delete file"
    assert sorted(file.record_count for file in data_files(driver.table)) == [1, share, ROWS - share - 1]
    assert driver.rows() == expected(dict.fromkeys(range(share + 1), "new"))


def test_many_delete_files_of_a_data_file_are_merged_into_the_next(tmp_path: Path) -> None:
    driver, manifests, listed = filled(tmp_path), [], []
    (old,) = data_files(driver.table)
    share = ROWS // 10
    for number in range(1, share + 1):
        driver.write(number, [(number, "new")])
        found = delete_files(driver.table, manifests=manifests.append)
        listed.append(sorted(file.record_count for file in found))
        assert driver.rows() == expected(dict.fromkeys(range(1, number + 1), "new"))
        assert old.file_path in [file.file_path for file in data_files(driver.table)]
    assert listed[7] == [1] * 8
    assert listed[8] == [9], "the positions of all"
    assert listed[15] == [*[1] * 7, 9]
    assert listed[16] == [17]
    assert max(manifests) <= 9
    (removed,) = removed_deletes(driver.table, 9)
    assert removed == 8, "so that engines that expire snapshots delete them"
    driver.write(share + 1, [(share + 1, "new")])
    assert delete_files(driver.table) == [], "it has lost many rows"
    assert driver.orphans == []


def test_delete_files_that_list_rows_of_several_files_are_not_merged(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    driver.write(1, [(number, "old") for number in range(ROWS, 2 * ROWS)])
    one, other = data_files(driver.table)
    delete_listed(driver.table, {one.file_path: [100, 101], other.file_path: [100]})
    before = {file.file_path for file in delete_files(driver.table)}
    gone = frozenset(key for key, _ in expected(dict.fromkeys(range(2 * ROWS), "old"))) - {
        key for key, _ in driver.rows()
    }
    assert len(gone) == 3
    for number in range(1, 12):
        driver.write(number + 1, [(number, "new")])
    after = {file.file_path: file.record_count for file in delete_files(driver.table)}
    assert before < set(after)
    assert sum(after.values()) == 3 + 11
    held = dict.fromkeys(range(2 * ROWS), "old") | dict.fromkeys(range(1, 12), "new")
    assert driver.rows() == expected(held, gone)


def test_a_feed_has_no_changes_of_rows_whose_positions_are_merged(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    for number in range(1, 10):
        driver.write(number, [(number, "new")])
    feed = IcebergFeed("shop.t", "lake", driver.location.properties).open()
    newest = feed.newest(feed.oldest())
    found = changes(feed, newest - 1, newest).to_pylist()
    rows = sorted((row["_change_type"], row["k"], row["v"]) for row in found)
    assert rows == [("delete", 9, "old"), ("insert", 9, "new")]


def removed_deletes(table: Table, batch_id: int) -> list[int]:
    """How many delete files the snapshot of a micro-batch says that it has removed, in each manifest."""
    (snapshot,) = (
        each
        for each in table.metadata.snapshots
        if each.summary is not None and each.summary["penstock.batch-id"] == str(batch_id)
    )
    entries = (
        manifest.fetch_manifest_entry(table.io, discard_deleted=False)
        for manifest in snapshot.manifests(table.io)
        if manifest.content == ManifestContent.DELETES
    )
    return [sum(entry.status == ManifestEntryStatus.DELETED for entry in each) for each in entries]


def test_positions_are_those_of_the_file_where_rows_of_it_were_deleted_before(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    delete_rows(driver.table, lambda row: row["k"] in (1, 2, 50))
    driver.write(1, [(3, "new"), (51, "new"), (50, "back")])
    driver.write(2, [(4, "new"), (3, "newer")])
    gone = frozenset({1, 2})
    assert driver.rows() == expected({3: "newer", 4: "new", 51: "new", 50: "back"}, gone)
    assert len(data_files(driver.table)) == 3, "the one with 3 and 50 has few rows, and was copied"


def test_delete_files_of_a_partition_are_in_it_also_under_an_older_partitioning(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "update", "k")
    set_mode(driver)
    driver.write(0, [(number, "a") for number in range(ROWS)])
    with driver.table.update_spec() as update:
        update.add_field("v", IdentityTransform(), "v")
    driver = Driver(tmp_path, "update", "k")
    driver.write(1, [(number, "ab"[number % 2]) for number in range(ROWS, 2 * ROWS)])
    driver.write(2, [(0, "b"), (ROWS, "b"), (ROWS + 1, "a")])
    found = {(file.spec_id, tuple(file.partition)) for file in delete_files(driver.table)}
    assert found == {(0, ()), (1, ("a",)), (1, ("b",))}
    rows = dict(driver.rows())
    assert (len(rows), rows[0], rows[ROWS], rows[ROWS + 1]) == (2 * ROWS, "b", "b", "a")
    assert len(driver.rows()) == 2 * ROWS
    driver.write(3, [(number, "b") for number in range(ROWS, ROWS + 60)])
    assert {file.spec_id for file in delete_files(driver.table)} == {0}


def test_a_partitioning_may_get_more_fields(tmp_path: Path) -> None:
    schema = spark.StructType([*COLUMNS, spark.StructField("w", spark.StringType())])
    set_mode(Driver(tmp_path, "update", "k", schema=schema))
    for batch_id, column in enumerate("vw"):
        with Run(tmp_path).table.update_spec() as update:
            update.add_field(column, IdentityTransform(), column)
        driver = Driver(tmp_path, "update", "k", schema=schema)
        keys = [7] if batch_id else range(ROWS)
        driver.write(batch_id, [(key, "a", column) for key in keys])
    assert [(file.spec_id, tuple(file.partition)) for file in delete_files(driver.table)] == [(1, ("a",))]
    assert sorted(driver.rows()) == [(key, "a", "w" if key == 7 else "v") for key in range(ROWS)]
    snapshot = driver.table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["changed-partition-count"] == "2"


def test_manifests_whose_delete_files_all_stay_are_not_written_again(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    driver.write(1, [(7, "new"), (900, "new")])
    before = delete_manifests(driver.table)
    driver.write(2, [(900, "newer")])
    assert delete_manifests(driver.table) == before
    assert driver.rows() == expected({7: "new", 900: "newer"})


def delete_manifests(table: Table) -> list[str]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    listed = snapshot.manifests(table.io)
    return [each.manifest_path for each in listed if each.content == ManifestContent.DELETES]


def test_the_path_of_the_data_file_is_in_memory_once(tmp_path: Path) -> None:
    """With 2 GiB of paths, Arrow would refuse the column."""
    driver, count = Driver(tmp_path, "update", "k"), 30_000
    target = driver.writer.target.files(driver.table, driver.table.transaction(), "token")
    file: Any = SimpleNamespace(file_path="x" * 100_000)
    written = write_position_deletes(target, file, np.arange(count))
    stored = pq.ParquetFile(local(written.path))
    assert (stored.metadata.num_rows, written.rows) == (count, count)
    assert stored.schema_arrow.types == [pa.string(), pa.int64()]
    assert written.size == Path(local(written.path)).stat().st_size < 1 << 20


def test_other_writers_go_on_as_before(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    driver.write(1, [(7, "new")])
    driver.table.append(driver.table.scan().to_arrow().slice(0, 1).set_column(0, "k", [[900]]))
    delete_rows(driver.table, lambda row: row["k"] == 8)
    driver.write(2, [(9, "new")])
    assert [key for key, _ in driver.rows()] == [key for key, _ in expected({900: ""}, frozenset({8}))]
    driver.table.delete("k < 100")
    driver.write(3, [(150, "new")])
    assert dict(driver.rows()) == {
        **dict.fromkeys(range(100, ROWS), "old"),
        150: "new",
        900: dict(driver.rows())[900],
    }


@pytest.mark.parametrize("fault", [conflict, lost_reply])
def test_a_commit_that_is_repeated_or_whose_reply_is_lost_is_made_once(tmp_path: Path, fault: Any) -> None:
    driver = filled(tmp_path)
    driver.catalog.faults = [fault]
    driver.write(1, [(7, "new")])
    driver.write(1, [(7, "new")])
    assert driver.rows() == expected({7: "new"})
    assert len(delete_files(driver.table)) == 1
    assert driver.orphans == []


def test_rows_deleted_by_a_faster_writer_are_planned_anew(tmp_path: Path) -> None:
    driver, other = filled(tmp_path), Driver(tmp_path, "update", "k", app_id="other")

    def faster(commit: Callable[[], Any]) -> Any:
        other.write(0, [(7, "other"), (8, "other")])
        return commit()

    driver.catalog.faults = [faster]
    driver.write(1, [(7, "mine"), (9, "mine")])
    assert driver.rows() == expected({7: "mine", 8: "other", 9: "mine"})
    assert driver.orphans == []


@pytest.mark.parametrize("fault", [killed, killed_after, lost_request])
def test_a_clean_up_deletes_uncommitted_delete_files_and_keeps_committed_ones(
    tmp_path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = filled(tmp_path)
    driver.catalog.faults = [fault]
    with monkeypatch.context() as dead:
        dead.setattr("penstock.tables.iceberg.commit.delete_files", lambda *_: None)
        with pytest.raises((Killed, Exception)):
            driver.write(1, [(7, "new")])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    again = Driver(tmp_path, "update", "k")
    done = fault is killed_after
    assert again.orphans == []
    assert again.rows() == expected({7: "new"} if done else {})
    again.write(1, [(7, "new")])
    assert again.rows() == expected({7: "new"})


def test_a_compaction_takes_deleted_rows_and_their_delete_files_out(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    for number in range(1, 6):
        driver.write(number, [(number, "new")])
    assert len(delete_files(driver.table)) == 5
    compact(driver.location, 1 << 20, 5)
    assert delete_files(driver.table) == []
    assert [file.record_count for file in data_files(driver.table)] == [ROWS]
    assert driver.rows() == expected(dict.fromkeys(range(1, 6), "new"))


def test_complete_takes_all_delete_files_out(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    driver.write(1, [(7, "new")])
    Driver(tmp_path, "complete", app_id="other").write(0, [(1, "all")])
    assert (driver.rows(), delete_files(driver.table)) == ([(1, "all")], [])


def test_deletes_and_updates_of_changes_are_by_position(tmp_path: Path) -> None:
    driver = ChangesDriver(tmp_path)
    set_mode(driver)
    driver.apply(0, [(f"k{number}", 0, 1, 1) for number in range(ROWS)])
    driver.apply(1, [("k7", 1, 2, 1), ("k8", 1, 2, 0), ("new", 1, 2, 1)])
    driver.apply(2, [("k7", 2, 1, 0), ("k9", 1, 3, 0)])
    held = {f"k{number}": 0 for number in range(ROWS)} | {"k7": 1, "new": 1}
    assert dict(driver.rows()) == {key: value for key, value in held.items() if key not in ("k8", "k9")}
    assert sorted(file.record_count for file in delete_files(driver.table)) == [1, 2]
    assert len(driver.rows()) == ROWS - 1
    assert driver.orphans == []


def test_rows_that_get_an_end_are_deleted_by_position_and_written_together(tmp_path: Path) -> None:
    driver = ChangesDriver(tmp_path, 2)
    set_mode(driver)
    events = [(f"k{number}", 0, 1, 1) for number in range(ROWS)]
    driver.apply(0, events[::2])
    driver.apply(1, events[1::2])
    before = {file.file_path for file in data_files(driver.table)}
    changed = [(f"k{number}", 1, 2, 1) for number in (7, 8, 9, 10)]
    driver.apply(2, [*changed, ("k11", 0, 2, 0)])
    assert driver.rows() == FOLDS[2]([*events, *changed, ("k11", 0, 2, 0)])
    added = [file.record_count for file in data_files(driver.table) if file.file_path not in before]
    assert 5 in added, "the rows of all files in one"
    assert before <= {file.file_path for file in data_files(driver.table)}
    assert sum(file.record_count for file in delete_files(driver.table)) == 5
    assert driver.orphans == [], "no staged rows are left either"


@pytest.mark.parametrize("fault", [conflict, lost_reply, lost_request])
def test_ends_are_written_once_whatever_the_catalog_does(tmp_path: Path, fault: Any) -> None:
    driver = ChangesDriver(tmp_path, 2)
    set_mode(driver)
    events = [(f"k{number}", 0, 1, 1) for number in range(ROWS)]
    driver.apply(0, events)
    driver.catalog.faults = [fault]
    changed = [("k7", 1, 2, 1), ("k8", 1, 3, 0)]
    if fault is lost_request:
        with pytest.raises(StoreUnavailableError):
            driver.apply(1, changed)
    else:
        driver.apply(1, changed)
    again = ChangesDriver(tmp_path, 2)
    again.apply(1, changed)
    assert driver.rows() == FOLDS[2]([*events, *changed])
    assert len(delete_files(driver.table)) == 1


def test_ends_are_planned_anew_beside_a_faster_writer(tmp_path: Path) -> None:
    driver, other = ChangesDriver(tmp_path, 2), ChangesDriver(tmp_path, 2, "other")
    set_mode(driver)
    events = [(f"k{number}", 0, 1, 1) for number in range(ROWS)]
    driver.apply(0, events)
    first, second = [("k7", 1, 2, 1), ("k8", 1, 2, 1)], [("k7", 2, 3, 1), ("k9", 1, 2, 0)]

    def faster(commit: Callable[[], Any]) -> Any:
        other.apply(0, first)
        return commit()

    def with_a_column(commit: Callable[[], Any]) -> Any:
        with other.table.update_schema() as update:
            update.add_column("x", StringType()).move_first("x")
        return commit()

    driver.catalog.faults = [faster, with_a_column]
    driver.apply(1, second)
    found = driver.table.scan().to_arrow().drop_columns(["x"]).to_pylist()
    rows = sorted((tuple(row.values()) for row in found), key=repr)
    assert rows == FOLDS[2]([*events, *first, *second])
    assert driver.orphans == []


def test_a_feed_of_the_table_has_the_changes(tmp_path: Path) -> None:
    driver = filled(tmp_path)
    driver.write(1, [(7, "new"), (900, "new")])
    driver.write(2, [(7, "newer")])
    assert len(delete_files(driver.table)) == 1
    feed = IcebergFeed("shop.t", "lake", driver.location.properties).open()
    oldest = feed.oldest()
    first = driver.table.metadata.snapshots[-3].sequence_number
    net: Counter[tuple[int, str]] = Counter()
    for row in changes(feed, first or oldest, feed.newest(oldest)).to_pylist():
        net[row["k"], row["v"]] += 1 if row["_change_type"] == "insert" else -1
    # A small file is copied, with rows that stay.
    assert {row: count for row, count in net.items() if count} == {
        (7, "old"): -1,
        (7, "newer"): 1,
        (900, "new"): 1,
    }


def test_a_feed_compares_a_delete_file_only_with_its_own_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the work grows with the square of the number of data files."""
    driver, files = Driver(tmp_path, "update", "k"), 12
    set_mode(driver)
    driver.write(0, *([(number * 100 + row, "old") for row in range(20)] for number in range(files)))
    driver.write(1, [(number * 100, "new") for number in range(files)])
    assert len(delete_files(driver.table)) == files
    compared = []

    def counted(deletes: Any, data: Any) -> bool:
        compared.append(data)
        return applies(deletes, data)

    applies = planning._applies
    monkeypatch.setattr(planning, "_applies", counted)
    feed = IcebergFeed("shop.t", "lake", driver.location.properties).open()
    newest = feed.newest(feed.oldest())
    assert changes(feed, newest - 1, newest).num_rows == 2 * files
    assert len(compared) <= 4 * files
