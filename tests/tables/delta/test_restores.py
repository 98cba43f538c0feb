"""Delta tables that somebody restores: a query goes on only if the table keeps what the query has written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import TableRefusedError
from penstock.tables.delta import vectors
from tests.tables.delta.driver import FOLDS, Driver
from tests.tables.delta.row_queries import RowQuery

Restore = Callable[[DeltaTable, int], None]
ROWS = pa.schema([("k", pa.string()), ("v", pa.int64())])
EVENTS = [[("a", 1, 1, 1), ("b", 1, 1, 1)], [("a", 2, 2, 1), ("b", 2, 2, 0)], [("c", 3, 3, 1)]]
REFUSED = "TABLE_REFUSED.ROLLED_BACK"


def by_version(table: DeltaTable, version: int) -> None:
    table.restore(version)


def by_time(table: DeltaTable, version: int) -> None:
    """Restore the table as of a moment at which a version was the last one."""
    log = Path(table.table_uri.removeprefix("file://")) / "_delta_log"
    commits = sorted(log.glob("*.json"))
    for number, commit in enumerate(commits):
        at = time.time() - 60 * (len(commits) - number)
        os.utime(commit, (at, at))
    moment = commits[version].stat().st_mtime + 30
    DeltaTable(table.table_uri).restore(datetime.fromtimestamp(moment, UTC))


restores = pytest.mark.parametrize("restore", [by_version, by_time])
types = pytest.mark.parametrize("scd_type", [1, 2])
runs = pytest.mark.parametrize("restarted", [False, True])


@restores
@types
@runs
def test_changes_that_a_restore_took_back_are_not_taken_for_applied(
    tmp_path: Path, restore: Restore, scd_type: int, restarted: bool
) -> None:
    driver = Driver(tmp_path, scd_type)
    for number, events in enumerate(EVENTS[:2]):
        driver.apply(number, events)
    last = driver.table().version()
    restore(driver.table(), last - 1)
    driver = Driver(tmp_path, scd_type) if restarted else driver
    for number, events in ((1, EVENTS[1]), (2, EVENTS[2])):
        with pytest.raises(TableRefusedError, match=f"restore version {last}, or") as caught:
            driver.apply(number, events)
        assert caught.value.condition == REFUSED
    driver.table().restore(last)
    driver.apply(2, EVENTS[2])
    assert driver.rows() == FOLDS[scd_type](chain.from_iterable(EVENTS))


@restores
@types
@runs
def test_a_restore_that_keeps_what_a_query_has_applied_does_not_matter(
    tmp_path: Path, restore: Restore, scd_type: int, restarted: bool
) -> None:
    driver = Driver(tmp_path, scd_type)
    for number, events in enumerate(EVENTS[:2]):
        driver.apply(number, events)
    driver.table().optimize.compact()
    kept = driver.table().version()
    driver.table().delete()
    restore(driver.table(), kept)
    driver = Driver(tmp_path, scd_type) if restarted else driver
    for number, events in enumerate(EVENTS[1:], start=1):
        driver.apply(number, events)
    assert driver.rows() == FOLDS[scd_type](chain.from_iterable(EVENTS))


@types
def test_another_query_does_not_apply_changes_beside_a_record_of_later_rows(
    tmp_path: Path, scd_type: int
) -> None:
    driver = Driver(tmp_path, scd_type)
    for number, events in enumerate(EVENTS[:2]):
        driver.apply(number, events)
    driver.table().restore(driver.table().version() - 1)
    with pytest.raises(TableRefusedError) as caught:
        Driver(tmp_path, scd_type, "another").apply(0, EVENTS[1])
    assert caught.value.condition == REFUSED


def query(folder: Path, mode: str) -> RowQuery:
    return RowQuery(folder, ROWS, mode, ["k"] if mode == "update" else ())


def rows(*values: tuple[str, int]) -> pa.Table:
    return pa.Table.from_pylist([{"k": k, "v": v} for k, v in values], ROWS)


@restores
@runs
@pytest.mark.parametrize("mode", ["append", "update"])
def test_rows_that_a_restore_took_back_are_missed(
    tmp_path: Path, mode: str, restore: Restore, restarted: bool
) -> None:
    one = query(tmp_path / "t", mode)
    one.write(0, rows(("a", 1)))
    one.write(1, rows(("b", 2)))
    write_deltalake(one.table(), rows(("of others", 5)), mode="append")
    restore(one.table(), 1)
    one = query(tmp_path / "t", mode) if restarted else one
    for number in (1, 2):
        with pytest.raises(TableRefusedError) as caught:
            one.write(number, rows(("c", 3)))
        assert caught.value.condition == REFUSED
    one.table().restore(2)
    one.write(2, rows(("c", 3)))
    assert one.rows() == [("a", 1), ("b", 2), ("c", 3)]


def test_a_complete_result_takes_the_place_of_a_restored_one(tmp_path: Path) -> None:
    one = query(tmp_path / "t", "complete")
    for number in range(2):
        one.write(number, rows(("a", number)))
    one.table().restore(1)
    one.write(2, rows(("a", 2)))
    assert one.rows() == [("a", 2)]


def test_a_restore_at_the_moment_of_a_commit_is_noticed_by_the_next_one(tmp_path: Path) -> None:
    one = query(tmp_path / "t", "append")
    for number in range(2):
        one.write(number, rows(("a", number)))
    stage, files = one.stage(2, rows(("a", 2)))
    one.table().restore(1)
    # As a commit that had loaded the table before.
    one.writer._publisher(stage, files, None)(one.table(), {"penstock:app": 2, "penstock-input:app": 7})
    with pytest.raises(TableRefusedError, match="version before 2, which") as caught:
        one.write(3, rows(("a", 3)))
    assert caught.value.condition == REFUSED


def test_a_running_query_misses_a_table_whose_log_is_that_of_an_older_copy(tmp_path: Path) -> None:
    one = query(tmp_path / "t", "append")
    for number in (0, 1, 1):
        one.write(number, rows(("a", number)))
    (tmp_path / "t" / "_delta_log" / f"{2:020}.json").unlink()
    with pytest.raises(TableRefusedError) as caught:
        one.write(2, rows(("a", 2)))
    assert caught.value.condition == REFUSED


@runs
def test_a_log_that_has_been_cleaned_up_is_not_missed(tmp_path: Path, restarted: bool) -> None:
    one = query(tmp_path / "t", "append")
    one.write(0, rows(("a", 1)))
    for value in range(2, 5):
        write_deltalake(one.table(), rows(("of others", value)), mode="append")
    # The running query takes notice of its commit here.
    one.write(0, rows(("a", 1)))
    one.table().create_checkpoint()
    for version in range(4):
        (tmp_path / "t" / "_delta_log" / f"{version:020}.json").unlink()
    write_deltalake(one.table(), rows(("of others", 5)), mode="append")
    one = query(tmp_path / "t", "append") if restarted else one
    one.write(1, rows(("b", 2)))
    one.write(2, rows(("c", 3)))
    assert len(one.rows()) == 7


@types
def test_a_restored_deletion_vector_is_that_of_the_restored_version(
    tmp_path: Path, scd_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector makes another file of a file with the same path."""
    monkeypatch.setattr(Driver, "by_vectors", True)
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)
    monkeypatch.setattr(vectors, "_MAX_DELETED_SHARE", 0.6)
    driver = Driver(tmp_path, scd_type)
    batches = [[(str(number), 1, 1, 1) for number in range(20)], *([("3", n, n, 1)] for n in range(2, 4))]
    for number, events in enumerate(batches):
        driver.apply(number, events)
    kept = driver.table().version()
    driver.table().delete("k = '4'")
    by_time(driver.table(), kept)
    driver.apply(3, [("5", 4, 4, 1)])
    assert driver.rows() == FOLDS[scd_type]([*chain.from_iterable(batches), ("5", 4, 4, 1)])
    by_time(driver.table(), kept - 1)
    with pytest.raises(TableRefusedError):
        driver.apply(4, [("6", 5, 5, 1)])
