"""Manifests stay few, however many micro-batches change rows of a table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyiceberg.manifest import ManifestFile
from pyiceberg.table import TableProperties

from penstock.tables.iceberg import applied_events_writer
from penstock.tables.iceberg.applied_events import BRANCH
from penstock.tables.iceberg.compaction import compact
from penstock.tables.iceberg.position_deletes import COPY_ON_WRITE, MERGE_MODE_PROPERTY, MERGE_ON_READ
from tests.tables.iceberg.changes_driver import ChangesDriver
from tests.tables.iceberg.driver import Driver, Run

BATCHES, MERGED = 12, 4


def prepare(run: Run, mode: str = COPY_ON_WRITE) -> None:
    """Have manifests merged once there are some."""
    properties = {MERGE_MODE_PROPERTY: mode, TableProperties.MANIFEST_MIN_MERGE_COUNT: str(MERGED)}
    run.table.transaction().set_properties(properties).commit_transaction()


def manifests(run: Run, branch: str = "main") -> list[ManifestFile]:
    table = run.table
    snapshot = table.snapshot_by_name(branch)
    assert snapshot is not None
    return snapshot.manifests(table.io)


def outdated(found: list[ManifestFile]) -> int:
    """How many of them say no more than what an earlier snapshot has removed."""
    newest = max(each.sequence_number for each in found)
    return sum(
        not (each.added_files_count or each.existing_files_count) and each.sequence_number < newest
        for each in found
    )


@pytest.mark.parametrize("mode", [COPY_ON_WRITE, MERGE_ON_READ])
def test_updates(tmp_path: Path, mode: str) -> None:
    driver = Driver(tmp_path, "update", "k")
    prepare(driver, mode)
    rows = dict.fromkeys(range(200), "old")
    driver.write(0, list(rows.items()))
    for number in range(1, BATCHES):
        driver.write(number, [(number % 5, f"v{number}")])
        rows[number % 5] = f"v{number}"
        found = manifests(driver)
        assert outdated(found) == 0
        assert max(Counter(each.content for each in found).values()) <= MERGED + 2
    assert driver.rows() == sorted(rows.items(), key=repr)


def test_a_compaction_beside_a_query(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    prepare(driver)
    for number in range(BATCHES):
        driver.write(number, [(number, "v")])
        if number % 2:
            compact(driver.location, 1 << 20, 2)
            assert outdated(manifests(driver)) == 0
    assert driver.rows() == sorted(((number, "v") for number in range(BATCHES)), key=repr)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_the_record_of_changes(tmp_path: Path, scd_type: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has large files too, each micro-batch merges small ones."""
    monkeypatch.setattr(applied_events_writer, "_SMALL_ROWS", 0)
    monkeypatch.setattr(applied_events_writer, "_MAX_FILES", 1)
    driver = ChangesDriver(tmp_path, scd_type)
    prepare(driver)
    driver.apply(0, [(f"k{number}", 1, 0, 0) for number in range(100)])
    for number in range(1, BATCHES):
        driver.apply(number, [(f"k{number}", 1, number, 0)])
        found = manifests(driver, BRANCH)
        assert outdated(found) == 0
        assert len(found) <= MERGED + 2
