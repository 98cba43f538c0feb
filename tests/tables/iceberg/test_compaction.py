"""Compaction of Iceberg tables, beside writers, deletes, and a catalog that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import CommitFailedException, RESTError
from pyiceberg.manifest import DataFileContent
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import StringType

from penstock.errors import CommitRefusedError, StoreUnavailableError, TableRefusedError
from penstock.tables.compaction import TableCompaction
from penstock.tables.iceberg import attempts, compaction
from penstock.tables.iceberg.compaction import compact
from tests.tables.iceberg.deletes import delete_rows
from tests.tables.iceberg.driver import Driver, Row

FILE = 1 << 20


def filled(folder: Path, *tasks: list[Row]) -> Driver:
    """A table with a file of each task's rows."""
    driver = Driver(folder)
    driver.write(0, *tasks)
    return driver


def single_rows(rows: int) -> list[list[Row]]:
    return [[(number, "v")] for number in range(rows)]


def files(driver: Driver) -> list[int]:
    """The number of rows of each data file."""
    return sorted(task.file.record_count for task in driver.table.scan().plan_files())


def test_small_files_become_one(tmp_path: Path) -> None:
    driver = filled(tmp_path, *single_rows(8))
    before = driver.rows()
    assert compact(driver.location, FILE, 5) == TableCompaction(8, 1, 1)
    assert (files(driver), driver.rows(), driver.orphans) == ([8], before, [])
    assert compact(driver.location, FILE, 5) == TableCompaction(), "there is nothing left to merge"


def test_few_files_stay(tmp_path: Path) -> None:
    driver = filled(tmp_path, *single_rows(4))
    assert compact(driver.location, FILE, 5) == TableCompaction()
    assert files(driver) == [1, 1, 1, 1]


def test_few_files_that_fill_a_large_one_are_merged_and_large_ones_stay(tmp_path: Path) -> None:
    rows: list[Row] = [(number, f"{number * 2_654_435_761 % 2**32:x}") for number in range(8_000)]
    driver = filled(tmp_path, rows[:4_000], rows[4_000:5_000], rows[5_000:6_000], rows[6_000:])
    sizes = sorted(task.file.file_size_in_bytes for task in driver.table.scan().plan_files())
    # The largest is no small file, and the others are together larger.
    assert compact(driver.location, sizes[-1], 5) == TableCompaction(3, 1, 1)
    assert (files(driver), driver.rows()) == ([4_000, 4_000], sorted(rows, key=repr))


def test_the_files_of_a_partition_are_merged_among_themselves(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(0, "old")])
    with driver.table.update_spec() as update:
        update.add_field("v", IdentityTransform(), "v")
    driver = Driver(tmp_path)
    driver.write(1, *[[(n, "a"), (n, "b")] for n in range(5)], [(9, "c")])
    before = driver.rows()
    compact(driver.location, FILE, 5)
    # Those of before the partitioning, and of c, are too few.
    assert (files(driver), driver.rows()) == ([1, 1, 5, 5], before)


def test_columns_that_came_later_and_renamed_ones_are_kept(tmp_path: Path) -> None:
    driver = filled(tmp_path, *single_rows(5))
    with driver.table.update_schema() as update:
        update.rename_column("v", "w")
        update.add_column("x", StringType())
    compact(driver.location, FILE, 5)
    assert driver.table.scan().to_arrow().to_pylist()[0] == {"k": 0, "w": "v", "x": None}
    assert files(driver) == [5]


def test_deleted_rows_stay_deleted(tmp_path: Path) -> None:
    driver = filled(tmp_path, *[[(n, "v"), (-n, "gone")] for n in range(1, 7)])
    delete_rows(driver.table, lambda row: row["k"] < 0)
    compact(driver.location, FILE, 5)
    assert (driver.rows(), files(driver)) == ([(n, "v") for n in range(1, 7)], [6])


def test_equality_deletes_are_refused_by_name(tmp_path: Path) -> None:
    driver = filled(tmp_path, *single_rows(5))
    delete_rows(driver.table, lambda row: row["k"] == 3, DataFileContent.EQUALITY_DELETES)
    with pytest.raises(TableRefusedError) as caught:
        compact(driver.location, FILE, 5)
    assert caught.value.condition == "TABLE_REFUSED.EQUALITY_DELETES"


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Call a function once, after the next compaction has written its files and before it commits them."""
    written = compaction.write_data_files

    def between(act: Callable[[], object]) -> None:
        def write(*values: Any) -> Any:
            monkeypatch.setattr(compaction, "write_data_files", written)
            done = written(*values)
            act()
            return done

        monkeypatch.setattr(compaction, "write_data_files", write)

    return between


Between = Callable[[Callable[[], object]], None]


def test_rows_that_come_meanwhile_are_kept(tmp_path: Path, between: Between) -> None:
    driver = filled(tmp_path, *single_rows(6))
    between(lambda: driver.write(1, [(7, "new")]))
    assert compact(driver.location, FILE, 5) == TableCompaction(6, 1, 1), "the same files are committed"
    assert (files(driver), (7, "new") in driver.rows()) == ([1, 6], True)


def test_a_compaction_ends_beside_a_query_that_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, batches = filled(tmp_path, *single_rows(6)), iter(range(1, 10))
    merge = compaction.merge_files

    def beside(*values: Any) -> Any:
        driver.write(next(batches), *single_rows(6))
        return merge(*values)

    monkeypatch.setattr(compaction, "merge_files", beside)
    assert compact(driver.location, FILE, 5) == TableCompaction(6, 1, 1)
    assert files(driver) == [1] * 6 + [6], "the newer ones are for the next compaction"


@pytest.mark.parametrize("by", ["position deletes", "update", "replacement", "another compaction"])
def test_rows_that_are_deleted_or_changed_meanwhile_do_not_come_back(
    tmp_path: Path, between: Between, by: str
) -> None:
    driver = filled(tmp_path, *single_rows(6))
    acts: dict[str, Callable[[], object]] = {
        "position deletes": lambda: delete_rows(driver.table, lambda row: row["k"] == 3),
        "update": lambda: Driver(tmp_path, "update", "k", app_id="other").write(0, [(3, "changed")]),
        "replacement": lambda: Driver(tmp_path, "complete", app_id="other").write(0, [(1, "all")]),
        "another compaction": lambda: compact(driver.location, FILE, 5),
    }
    expected = {
        "position deletes": [(n, "v") for n in range(6) if n != 3],
        "update": [(n, "changed" if n == 3 else "v") for n in range(6)],
        "replacement": [(1, "all")],
        "another compaction": [(n, "v") for n in range(6)],
    }
    between(acts[by])
    compact(driver.location, FILE, 5)
    assert driver.rows() == expected[by]
    assert len(files(driver)) <= 2


def test_a_lost_reply_loses_and_repeats_nothing(tmp_path: Path) -> None:
    driver = filled(tmp_path, *single_rows(6))

    def lost(commit: Callable[[], Any]) -> Any:
        commit()
        raise RESTError("it took too long")

    def lost_as_conflict(commit: Callable[[], Any]) -> Any:
        commit()
        raise CommitFailedException("it has changed")

    driver.catalog.faults = [lost]
    with pytest.raises(StoreUnavailableError):
        compact(driver.location, FILE, 5)
    assert (files(driver), driver.rows()) == ([6], [(n, "v") for n in range(6)])
    driver.write(1, *[[(n, "w")] for n in range(5)])
    driver.catalog.faults = [lost_as_conflict]
    compact(driver.location, FILE, 5)
    assert (files(driver), len(driver.rows())) == ([11], 11)


def test_other_writers_that_are_always_faster_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = filled(tmp_path, *single_rows(6))
    monkeypatch.setattr(compaction, "_reason_files_changed", lambda *_: "rows of the files were deleted")
    with pytest.raises(CommitRefusedError, match="at each of 10 attempts to merge files"):
        compact(driver.location, FILE, 5)
    assert files(driver) == [1] * 6


def test_files_of_a_compaction_that_died_are_deleted_a_day_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = filled(tmp_path, *single_rows(6))

    def die(commit: Callable[[], Any]) -> Any:
        raise SystemExit

    driver.catalog.faults = [die]
    with pytest.raises(SystemExit):
        compact(driver.location, FILE, 5)
    # As after a SIGKILL: nothing is tidied up. An attempt of an hour ago may still run.
    orphans = driver.orphans
    assert len(orphans) == 2, "a data file and the pending file"
    compact(driver.location, FILE, 50)
    assert driver.orphans == orphans
    now = time.time() + 90_000
    monkeypatch.setattr(attempts.time, "time", lambda: now)
    compact(driver.location, FILE, 50)
    assert (driver.orphans, driver.rows()) == ([], [(n, "v") for n in range(6)])


def test_a_compaction_that_slept_too_long_writes_its_files_again(
    tmp_path: Path, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = filled(tmp_path, *single_rows(6))
    now = time.time
    between(lambda: monkeypatch.setattr(attempts.time, "time", lambda: now() + 7_200))
    assert compact(driver.location, FILE, 5) == TableCompaction(6, 1, 1)
    assert (files(driver), len(driver.orphans)) == ([6], 2), "those of the first time wait for the clean-up"


def test_a_table_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.catalog.drop_table(("shop", "t"))
    with pytest.raises(TableRefusedError) as caught:
        compact(driver.location, FILE, 5)
    assert caught.value.condition == "TABLE_REFUSED.NOT_FOUND"
