"""Commits to an Iceberg table: each micro-batch once, whatever happens to the catalog's replies, and without
files that nothing refers to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException

from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    CommitRefusedError,
    PenstockError,
    StoreUnavailableError,
    TableRefusedError,
)
from penstock.tables.iceberg.attempts import PENDING_FOLDER, Attempt
from penstock.tables.names import digest
from tests.tables.iceberg.driver import Driver
from tests.tables.iceberg.faults import (
    Fault,
    Killed,
    killed,
    killed_after,
    lost_reply,
    lost_reply_as_conflict,
    lost_request,
)


@pytest.mark.parametrize("fault", [lost_reply, lost_reply_as_conflict])
@pytest.mark.parametrize("mode", ["append", "update", "complete"])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_commit_whose_reply_is_lost_is_found(
    tmp_path: Path, mode: str, fault: Fault, guarantee: str
) -> None:
    driver = Driver(tmp_path, mode, *(["k"] if mode == "update" else []), guarantee=guarantee)
    driver.write(0, [(1, "a"), (2, "b")])
    driver.catalog.faults = [fault]
    driver.write(1, [(2, "c"), (3, "d")])
    expected = {
        "append": [(1, "a"), (2, "b"), (2, "c"), (3, "d")],
        "update": [(1, "a"), (2, "c"), (3, "d")],
        "complete": [(2, "c"), (3, "d")],
    }
    assert driver.rows() == expected[mode]
    assert driver.orphans == []


def test_a_request_that_is_lost_fails_the_query_and_the_next_run_writes_the_micro_batch(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path)
    driver.catalog.faults = [lost_request]
    with pytest.raises(StoreUnavailableError) as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "STORE_UNAVAILABLE.ICEBERG"
    # The request may still arrive: until it is known, the files stay.
    assert len(driver.orphans) == 2
    Driver(tmp_path).write(0, [(1, "a")])
    assert driver.rows() == [(1, "a")]


@pytest.mark.parametrize("mode", ["append", "update"])
def test_a_conflicting_commit_is_repeated_on_the_changed_table(tmp_path: Path, mode: str) -> None:
    keys = ["k"] if mode == "update" else []
    driver, other = Driver(tmp_path, mode, *keys), Driver(tmp_path, mode, *keys, app_id="other")
    driver.write(0, [(1, "a")])

    def other_commits(commit: Callable[[], Any]) -> Any:
        other.write(0, [(1, "from another app")])
        return commit()

    driver.catalog.faults = [other_commits]
    driver.write(1, [(1, "b"), (2, "c")])
    if mode == "update":
        assert driver.rows() == [(1, "b"), (2, "c")]
    else:
        assert driver.rows() == [(1, "a"), (1, "b"), (1, "from another app"), (2, "c")]
    assert driver.orphans == []


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_two_runs_of_a_query_commit_a_micro_batch_once(tmp_path: Path, mode: str) -> None:
    keys = ["k"] if mode == "update" else []
    driver, other = Driver(tmp_path, mode, *keys), Driver(tmp_path, mode, *keys)
    driver.write(0, [(1, "a")])

    def other_commits(commit: Callable[[], Any]) -> Any:
        other.write(1, [(1, "b"), (2, "c")])
        return commit()

    driver.catalog.faults = [other_commits]
    driver.write(1, [(1, "b"), (2, "c")])
    assert sorted(driver.rows())[-2:] == [(1, "b"), (2, "c")]
    assert len(driver.rows()) == (3 if mode == "append" else 2)
    assert len(driver.table.metadata.snapshots) == 2
    assert driver.orphans == []


def test_a_run_that_is_paused_in_its_commit_cannot_undo_later_ones(tmp_path: Path) -> None:
    driver, other = Driver(tmp_path, "update", "k"), Driver(tmp_path, "update", "k")
    driver.write(0, [(1, "a")])

    def paused(commit: Callable[[], Any]) -> Any:
        other.write(1, [(1, "b")])
        other.write(2, [(1, "c")])
        return commit()

    driver.catalog.faults = [paused]
    with pytest.raises(CheckpointRewoundError):
        driver.write(1, [(1, "b")])
    assert driver.rows() == [(1, "c")]


def test_other_writers_that_are_always_faster_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    driver = Driver(tmp_path)
    driver.location.__dict__["properties"] = {**driver.location.properties, "token": "geheimeswort"}

    def refuse(commit: Callable[[], Any]) -> Any:
        raise CommitFailedException("Requirement failed for geheimeswort: branch main has changed")

    driver.catalog.faults = [refuse] * 10
    with pytest.raises(CommitRefusedError, match=r"at each of the 10 times .* for …: branch main") as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "COMMIT_REFUSED.TABLE_CHANGED"
    assert "geheimeswort" not in str(caught.value)
    driver.write(0, [(1, "a")])
    assert driver.rows() == [(1, "a")]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    Driver(tmp_path, app_id="other")
    assert driver.orphans == []


def test_a_micro_batch_is_found_behind_other_commits_and_after_snapshots_have_expired(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(1, "a")])
    driver.write(1, [(2, "b")])
    for number in range(3):
        driver.table.append(pa.table({"k": [10 + number], "v": ["another engine"]}))
    with driver.table.maintenance.expire_snapshots() as expire:
        expire.older_than(datetime.now(UTC).replace(tzinfo=None) + timedelta(days=1))
    assert len(driver.table.metadata.snapshots) == 1
    before = driver.rows()
    Driver(tmp_path).write(1, [(2, "b")])
    assert driver.rows() == before
    with pytest.raises(CheckpointRewoundError, match="at micro-batch 1 in the Iceberg table"):
        driver.write(0, [(1, "a")])
    with pytest.raises(CheckpointMismatchError, match="with other input"):
        driver.write(1, [(3, "c")], input_digest="other")
    driver.write(2, [(3, "c")])
    assert (3, "c") in driver.rows()


def test_a_micro_batch_is_found_although_the_properties_were_removed(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(1, "a")])
    (name,) = [name for name in driver.table.properties if name.startswith("penstock.app.")]
    driver.table.transaction().remove_properties(name).commit_transaction()
    driver.table.append(pa.table({"k": [9], "v": ["another engine"]}))
    driver.write(0, [(1, "a")])
    assert driver.rows() == [(1, "a"), (9, "another engine")]
    driver.table.transaction().set_properties({name: "rubbish"}).commit_transaction()
    with pytest.raises(TableRefusedError, match="restore the property") as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "TABLE_REFUSED.APP_PROPERTY"


def test_a_snapshot_says_which_micro_batch_it_is(tmp_path: Path) -> None:
    driver = Driver(tmp_path, app_id='an "app" … of any name')
    driver.write(0, [(1, "a")])
    driver.write(7, [(1, "a")])
    snapshot = driver.table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["penstock.app-id"] == 'an "app" … of any name'
    assert snapshot.summary["penstock.batch-id"] == "7"


def test_at_least_once_records_no_micro_batch(tmp_path: Path) -> None:
    driver = Driver(tmp_path, guarantee="at_least_once")
    driver.write(0, [(1, "a")])
    driver.write(0, [(1, "a")])
    assert driver.rows() == [(1, "a"), (1, "a")]
    assert not [name for name in driver.table.properties if name.startswith("penstock")]


def test_a_micro_batch_without_rows_makes_no_snapshot_unless_it_replaces_all(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [])
    assert driver.table.metadata.snapshots == []
    assert driver.stored == []
    complete = Driver(tmp_path, "complete", app_id="other")
    complete.write(0, [])
    assert driver.rows() == []
    complete.write(1, [(1, "a")])
    complete.write(2, [])
    assert driver.rows() == []
    complete.write(2, [])
    assert len(driver.table.metadata.snapshots) == 3


@pytest.mark.parametrize("fault", [killed, killed_after])
def test_files_of_a_dead_driver_are_deleted_a_day_later_unless_a_snapshot_has_them(
    tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(1, "a")])
    driver.catalog.faults = [fault]
    with pytest.raises(Killed):
        driver.write(1, [(2, "b")])
    assert len([name for name in driver.stored if name.endswith("parquet")]) == 2
    stored = driver.stored
    Driver(tmp_path, app_id="other")
    assert driver.stored == stored
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    Driver(tmp_path, app_id="other")
    assert driver.orphans == []
    assert driver.rows() == [(1, "a"), (2, "b")][: 1 if fault is killed else 2]


def test_a_repeated_micro_batch_ends_the_attempt_of_the_driver_that_had_committed_it(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.catalog.faults = [killed_after]
    with pytest.raises(Killed):
        driver.write(0, [(1, "a")])
    assert len(driver.orphans) == 1
    Driver(tmp_path).write(0, [(1, "a")])
    assert driver.orphans == []
    assert driver.rows() == [(1, "a")]


def test_files_of_queries_that_run_are_not_deleted(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.write(0, [(1, "a")])
    data = Path(driver.table.location().removeprefix("file://")) / "data"
    old, new = int(time.time()) - 90_000, int(time.time())
    kept = [Attempt(digest("running"), old, "a" * 32), Attempt(digest("running"), new, "b" * 32)]
    dead = Attempt(digest("dead"), old, "c" * 32)
    for attempt in [*kept, dead]:
        (data / PENDING_FOLDER / attempt.file_name).touch()
        (data / f"{attempt.token}-{'0' * 32}.parquet").touch()
    before = driver.stored
    Driver(tmp_path)
    gone = set(before) - set(driver.stored)
    assert gone == {dead.file_name, f"{dead.token}-{'0' * 32}.parquet"}


def test_data_files_that_are_gone_are_not_committed(tmp_path: Path) -> None:
    driver = Driver(tmp_path)

    def cleaned_up(commit: Callable[[], Any]) -> Any:
        for path in Path(driver.table.location().removeprefix("file://")).rglob("*.parquet"):
            path.unlink()
        raise CommitFailedException("conflict")

    driver.catalog.faults = [cleaned_up]
    with pytest.raises(CommitRefusedError, match="missing") as caught:
        driver.write(0, [(1, "a")])
    assert caught.value.condition == "COMMIT_REFUSED.STAGED_FILES_MISSING"
    assert driver.rows() == []


def test_secrets_in_replies_are_not_shown(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.location.properties["token"] = "verysecrettoken"

    def refused(commit: Callable[[], Any]) -> Any:
        raise RuntimeError("403 for verysecrettoken")

    driver.catalog.faults = [refused]
    with pytest.raises(PenstockError) as caught:
        driver.write(0, [(1, "a")])
    assert "verysecrettoken" not in str(caught.value)


def test_a_dropped_table_is_reported(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.catalog.drop_table(("shop", "t"))
    with pytest.raises(TableRefusedError, match="TABLE_GONE"):
        driver.write(0, [(1, "a")])
