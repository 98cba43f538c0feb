"""Tables that are rolled back under a query: to before its last commit, or only other writers' commits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.table import Table

from penstock.errors import TableRefusedError
from tests.tables.iceberg.driver import Driver

MODES = pytest.mark.parametrize("mode", ["append", "update"])


def driver_in(folder: Path, mode: str) -> Driver:
    return Driver(folder, mode, *(["k"] if mode == "update" else []))


def snapshot(table: Table) -> int:
    current = table.current_snapshot()
    assert current is not None
    return current.snapshot_id


def roll_back(driver: Driver, to: int) -> None:
    # Also forwards again, which rollback_to_snapshot refuses.
    driver.table.manage_snapshots().set_current_snapshot(to).commit()


def append(driver: Driver, key: int) -> None:
    """Append a row, as another program does."""
    driver.table.append(pa.table({"k": pa.array([key], pa.int64()), "v": ["own"]}))


def refused(driver: Driver, batch_id: int) -> str:
    with pytest.raises(TableRefusedError) as caught:
        driver.write(batch_id, [(batch_id, "new")])
    assert caught.value.condition == "TABLE_REFUSED.ROLLED_BACK"
    return str(caught.value)


@MODES
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_table_that_lacks_the_last_commit_is_refused_until_it_has_it_again(
    tmp_path: Path, mode: str, restarted: bool, later: bool
) -> None:
    driver = driver_in(tmp_path, mode)
    versions = []
    for batch_id in range(2):
        driver.write(batch_id, [(batch_id, "x")])
        versions.append(snapshot(driver.table))
    roll_back(driver, versions[0])
    if later:
        append(driver, 10)
    if restarted:
        driver = driver_in(tmp_path, mode)
    # A repeated micro-batch, and a new one.
    for batch_id in (1, 2):
        assert f"go back to snapshot {versions[1]}" in refused(driver, batch_id)
    roll_back(driver, versions[1])
    driver.write(1, [(1, "x")])
    driver.write(2, [(2, "x")])
    assert driver.rows() == [(0, "x"), (1, "x"), (2, "x")]


@MODES
def test_a_rollback_that_takes_back_only_the_commits_of_others_is_none(tmp_path: Path, mode: str) -> None:
    driver = driver_in(tmp_path, mode)
    driver.write(0, [(0, "x")])
    last = snapshot(driver.table)
    append(driver, 10)
    roll_back(driver, last)
    driver.write(1, [(1, "x")])
    append(driver, 11)
    before = snapshot(driver.table)
    append(driver, 12)
    roll_back(driver, before)
    driver.write(2, [(2, "x")])
    assert driver.rows() == [(0, "x"), (1, "x"), (11, "own"), (2, "x")]


def test_a_complete_result_replaces_what_a_rollback_has_left(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "complete")
    driver.write(0, [(0, "x")])
    first = snapshot(driver.table)
    driver.write(1, [(0, "x"), (1, "x")])
    roll_back(driver, first)
    driver.write(2, [(2, "x")])
    assert driver.rows() == [(2, "x")]


@pytest.mark.parametrize("tagged", [False, True])
def test_a_query_continues_after_its_snapshot_has_expired(tmp_path: Path, tagged: bool) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(0, "x")])
    own = snapshot(driver.table)
    if tagged:
        driver.table.manage_snapshots().create_tag(own, "kept").commit()
    append(driver, 10)
    between = snapshot(driver.table)
    append(driver, 11)
    expired = [between] if tagged else [own, between]
    driver.table.maintenance.expire_snapshots().by_ids(expired).commit()
    driver.write(1, [(1, "x")])
    assert driver.rows() == [(0, "x"), (1, "x"), (10, "own"), (11, "own")]


def test_a_rollback_before_a_retry_of_the_commit_is_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(0, "x")])
    first = snapshot(driver.table)
    driver.write(1, [(1, "x")])

    def rolled_back_first(commit: object) -> object:
        driver.catalog.faults = []
        roll_back(driver, first)
        assert callable(commit)
        return commit()

    driver.catalog.faults = [rolled_back_first]
    refused(driver, 2)
    assert driver.rows() == [(0, "x")]
