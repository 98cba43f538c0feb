"""The log of a Delta table's record of keys: old commits are deleted, and never those that still count."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.tables.delta.applied_table import AppliedTable
from tests.tables.delta.driver import FIRST, FOLDS, SECOND, Driver, lines

_INTERVAL = 100
"""Every so many versions there is a checkpoint."""
_MONTHS = 60 * 86_400


def grow(driver: Driver, version: int) -> None:
    """Have a version of the record, which the table names."""
    applied = driver.writer.applied
    while (recorded := driver.applied().version()) < version:
        applied.record(recorded, lines([("z", 0, recorded, 0)]))
    applied.set_version_in(driver.table(), version)


def log_of_record(driver: Driver) -> Path:
    return Path(driver.writer.applied.location.path, "_delta_log")


def age(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (time.time() - _MONTHS,) * 2)


class Killed(BaseException):
    pass


@pytest.mark.few(2)
@pytest.mark.parametrize("by_tasks", [True, False])
@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_driver_that_dies_after_months_of_rest_has_not_deleted_the_version_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scd_type: int, by_tasks: bool
) -> None:
    """Its commit to the record makes a checkpoint, and the table does not get to name it."""
    monkeypatch.setattr(Driver, "by_tasks", by_tasks)
    driver = Driver(tmp_path, scd_type)
    driver.apply(0, FIRST)
    grow(driver, _INTERVAL - 2)
    age(log_of_record(driver))
    record = AppliedTable.record

    def dying(*arguments: object) -> int:
        record(*arguments)  # type: ignore[arg-type]
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(AppliedTable, "record", dying)
        with pytest.raises(Killed):
            driver.apply(1, SECOND)
    assert driver.applied().version() == _INTERVAL - 1
    Driver(tmp_path, scd_type).apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type]([*FIRST, *SECOND])


@pytest.mark.parametrize("restarted", [True, False])
def test_old_commits_are_deleted(tmp_path: Path, restarted: bool) -> None:
    driver = Driver(tmp_path, 1)
    driver.apply(0, FIRST)
    grow(driver, _INTERVAL - 1)
    age(log_of_record(driver))
    if restarted:
        driver = Driver(tmp_path, 1)
    driver.apply(1, SECOND)
    driver.apply(2, [("y", 9, 9, 1)])
    assert len(list(log_of_record(driver).glob("*.json"))) < 5
    assert driver.rows() == FOLDS[1]([*FIRST, *SECOND, ("y", 9, 9, 1)])
