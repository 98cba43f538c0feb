"""Commits of changes to an Iceberg table: rows and the record of events change together, whatever happens."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table
from pyiceberg.types import StringType
from pyspark.sql import types as spark

from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    CommitRefusedError,
    StoreUnavailableError,
    TableRefusedError,
)
from penstock.feeds.iceberg import IcebergFeed
from penstock.tables.iceberg.applied_events import BRANCH, STATE_PROPERTY
from penstock.tables.iceberg.changes_commit import ChangesCommit
from penstock.tables.iceberg.changes_writer import ChangesWriter
from penstock.tables.iceberg.commit import Commit, FileChanges
from penstock.tables.iceberg.compaction import compact
from penstock.tables.iceberg.transactions import CommitConflict
from tests.support.feed_reading import changes
from tests.tables.delta.driver import FIRST, FOLDS, SECOND
from tests.tables.iceberg.changes_driver import ChangesDriver
from tests.tables.iceberg.driver import Driver
from tests.tables.iceberg.faults import (
    Fault,
    Killed,
    conflict,
    killed,
    killed_after,
    lost_reply,
    lost_reply_as_conflict,
    lost_request,
)

EVENTS = [*FIRST, *SECOND]
START = [("a", 0, 0, 1), ("z", 0, 0, 0)]
TYPES = pytest.mark.parametrize("scd_type", [1, 2])


def also(work: Callable[[], object]) -> Fault:
    """Somebody else does something before the catalog gets the commit."""

    def fault(commit: Callable[[], Any]) -> Any:
        work()
        return commit()

    return fault


@TYPES
@pytest.mark.parametrize("fault", [lost_reply, lost_reply_as_conflict, conflict])
def test_a_commit_whose_reply_is_lost_is_found(tmp_path: Path, scd_type: int, fault: Fault) -> None:
    driver = ChangesDriver(tmp_path, scd_type)
    driver.apply(0, FIRST)
    driver.catalog.faults = [fault]
    driver.apply(1, SECOND)
    driver.apply(2, FIRST)
    assert driver.rows() == FOLDS[scd_type](EVENTS)
    assert len(driver.recorded()) == len(set(driver.recorded()))
    assert driver.orphans == []


@TYPES
def test_files_of_a_commit_that_is_not_recorded_stay_when_its_reply_is_lost_and_its_snapshot_expires(
    tmp_path: Path, scd_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With guarantee at_least_once only the record says that the events are applied."""
    monkeypatch.setattr("tests.tables.iceberg.changes_driver.MicroBatch", lambda *_: None)
    driver, other = ChangesDriver(tmp_path, scd_type), ChangesDriver(tmp_path, scd_type)

    def expired(commit: Callable[[], Any]) -> Any:
        commit()
        other.table.append(other.table.scan().to_arrow().slice(0, 0))
        table = other.table
        kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
        old = [each.snapshot_id for each in table.metadata.snapshots if each.snapshot_id not in kept]
        table.maintenance.expire_snapshots().by_ids(old).commit()
        return conflict(commit)

    driver.catalog.faults = [expired]
    driver.apply(0, EVENTS)
    assert driver.rows() == FOLDS[scd_type](EVENTS)
    assert len(driver.recorded()) == len(set(driver.recorded()))


@TYPES
def test_a_request_that_is_lost_fails_the_query_and_the_next_run_applies_the_events(
    tmp_path: Path, scd_type: int
) -> None:
    driver = ChangesDriver(tmp_path, scd_type)
    driver.catalog.faults = [lost_request]
    with pytest.raises(StoreUnavailableError):
        driver.apply(0, FIRST)
    again = ChangesDriver(tmp_path, scd_type)
    again.apply(0, FIRST)
    again.apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type](EVENTS)


@TYPES
def test_two_queries_that_commit_at_the_same_moment_do_not_overtake_each_other(
    tmp_path: Path, scd_type: int
) -> None:
    one, other = (ChangesDriver(tmp_path, scd_type, name) for name in ("one", "other"))
    one.apply(0, START)
    one.catalog.faults = [also(lambda: other.apply(0, SECOND))]
    one.apply(1, FIRST)
    one.apply(2, SECOND)
    assert one.rows() == FOLDS[scd_type]([*START, *EVENTS])
    assert one.orphans == []


@TYPES
def test_two_runs_of_a_query_apply_a_micro_batch_once(tmp_path: Path, scd_type: int) -> None:
    one, other = ChangesDriver(tmp_path, scd_type), ChangesDriver(tmp_path, scd_type)
    before = len(one.table.metadata.snapshots)
    one.catalog.faults = [also(lambda: other.apply(0, EVENTS))]
    one.apply(0, EVENTS)
    assert one.rows() == FOLDS[scd_type](EVENTS)
    assert len(one.table.metadata.snapshots) == before + 2, "one of the table, and one of its record"
    assert one.orphans == []


@TYPES
def test_a_run_that_is_paused_in_its_commit_cannot_undo_later_ones(tmp_path: Path, scd_type: int) -> None:
    one, other = ChangesDriver(tmp_path, scd_type), ChangesDriver(tmp_path, scd_type)
    one.apply(0, START)

    def overtake() -> None:
        other.apply(1, FIRST)
        other.apply(2, SECOND)

    one.catalog.faults = [also(overtake)]
    with pytest.raises(CheckpointRewoundError):
        one.apply(1, FIRST)
    assert one.rows() == FOLDS[scd_type]([*START, *EVENTS])
    with pytest.raises(CheckpointMismatchError):
        other.apply(2, FIRST, "another")


@TYPES
@pytest.mark.parametrize("fault", [killed, killed_after])
def test_a_dead_driver_leaves_no_trace(
    tmp_path: Path, scd_type: int, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, other = (ChangesDriver(tmp_path, scd_type, name) for name in ("one", "other"))
    driver.apply(0, START)
    driver.catalog.faults = [fault]
    with monkeypatch.context() as dead:
        dead.setattr("penstock.tables.iceberg.commit.delete_files", lambda *_: None)
        with pytest.raises(Killed):
            driver.apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type](START if fault is killed else [*START, *SECOND])
    other.apply(0, FIRST)
    done = [*START, *FIRST, *([] if fault is killed else SECOND)]
    assert driver.rows() == FOLDS[scd_type](done)
    assert len(driver.orphans) > 2, "staged events, and data files if they were not committed"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 90_000)
    again = ChangesDriver(tmp_path, scd_type, "one")
    assert driver.orphans == []
    again.apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type]([*START, *EVENTS])


@TYPES
def test_rows_that_others_write_during_a_commit_stay(tmp_path: Path, scd_type: int) -> None:
    """The record is as it was, and the table is not: both are required to be."""
    driver, other = ChangesDriver(tmp_path, scd_type), ChangesDriver(tmp_path, scd_type)
    driver.apply(0, START)
    extra = {"_valid_from": [5], "_valid_to": pa.nulls(1, pa.int64())} if scd_type == 2 else {}
    rows = pa.table({"k": ["own"], "v": [1], **extra})
    driver.catalog.faults = [also(lambda: other.table.append(rows))]
    driver.apply(1, EVENTS)
    assert driver.rows() == FOLDS[scd_type]([*START, *EVENTS, ("own", 1, 5, 1)])
    assert driver.orphans == []


@TYPES
@pytest.mark.parametrize("when", ["before the commit", "in the commit"])
def test_columns_that_are_added_and_moved_during_a_micro_batch_get_their_own_values(
    tmp_path: Path, scd_type: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both columns are text, so values in the wrong one would not be refused."""
    schema = spark.StructType([spark.StructField(name, spark.StringType()) for name in ("k", "a", "b")])
    schema = schema.add("_change_type", spark.StringType()).add("_commit_version", spark.LongType())
    driver, other = (ChangesDriver(tmp_path, scd_type, app, schema=schema) for app in ("one", "other"))
    driver.write(0, [("k1", "a1", "b1", 1, 1), ("k2", "a2", "b2", 1, 1)])

    def alter() -> None:
        with other.table.update_schema() as update:
            update.move_first("b").add_column("x", StringType()).move_first("x")

    if when == "in the commit":
        driver.catalog.faults = [also(alter), conflict]
    else:
        new_commit = ChangesWriter._new_commit

        def altered(*values: Any) -> ChangesCommit:
            alter()
            return new_commit(*values)

        monkeypatch.setattr(ChangesWriter, "_new_commit", altered)
    driver.write(1, [("k1", "a3", "b3", 2, 1), ("k3", "a4", "b4", 2, 1)])
    found = driver.table.scan().to_arrow().select(["k", "a", "b", "x"]).to_pylist()
    old = [("k1", "a1", "b1", None)] if scd_type == 2 else []
    new = [("k1", "a3", "b3", None), ("k2", "a2", "b2", None), ("k3", "a4", "b4", None)]
    assert sorted(tuple(row.values()) for row in found) == sorted([*old, *new])


def test_a_record_that_is_dropped_during_a_commit_is_not_made_anew(tmp_path: Path) -> None:
    """The table is as it was, and the record is not."""
    driver, other = ChangesDriver(tmp_path), ChangesDriver(tmp_path)
    driver.apply(0, START)
    driver.catalog.faults = [also(lambda: without_branch(other.table))]
    with pytest.raises(TableRefusedError) as caught:
        driver.apply(1, EVENTS)
    assert caught.value.condition == "TABLE_REFUSED.CHANGES_FORGOTTEN"
    assert driver.rows() == FOLDS[1](START)


def test_a_table_that_was_replaced_is_refused(tmp_path: Path) -> None:
    """As by CREATE OR REPLACE TABLE: its snapshots, its branches and its properties stay."""
    driver = ChangesDriver(tmp_path)
    driver.apply(0, EVENTS)
    rows = driver.table.scan().to_arrow()
    driver.table.manage_snapshots().remove_branch("main").commit()
    driver.table.append(rows.slice(0, 1))
    with pytest.raises(TableRefusedError) as caught:
        driver.apply(1, START)
    assert caught.value.condition == "TABLE_REFUSED.ROLLED_BACK"


def without_property(table: Table) -> None:
    with table.transaction() as transaction:
        transaction.remove_properties(STATE_PROPERTY)


def with_other_property(table: Table) -> None:
    with table.transaction() as transaction:
        transaction.set_properties({STATE_PROPERTY: "{}"})


def without_branch(table: Table) -> None:
    table.manage_snapshots().remove_branch(BRANCH).commit()


def with_moved_branch(table: Table) -> None:
    main = table.current_snapshot()
    assert main is not None
    table.manage_snapshots().create_branch(main.snapshot_id, BRANCH).commit()


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (without_property, "property penstock.changes was removed"),
        (with_other_property, "property penstock.changes cannot be read"),
        (without_branch, "branch penstock_applied is gone"),
        (with_moved_branch, "branch penstock_applied was moved"),
    ],
)
def test_a_table_that_has_lost_its_record_is_refused(
    tmp_path: Path, lose: Callable[[Table], None], why: str
) -> None:
    driver = ChangesDriver(tmp_path)
    driver.apply(0, FIRST)
    lose(driver.table)
    for attempt in (lambda: driver.apply(1, SECOND), lambda: ChangesDriver(tmp_path)):
        with pytest.raises(TableRefusedError, match=why) as caught:
            attempt()
        assert caught.value.condition == "TABLE_REFUSED.CHANGES_FORGOTTEN"
    assert driver.rows() == FOLDS[1](FIRST)


@pytest.mark.parametrize("later", [False, True])
def test_a_table_that_was_rolled_back_is_refused(tmp_path: Path, later: bool) -> None:
    driver = ChangesDriver(tmp_path)
    driver.apply(0, FIRST)
    before = driver.table.current_snapshot()
    assert before is not None
    driver.apply(1, SECOND)
    last = driver.table.current_snapshot()
    assert last is not None
    driver.table.manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
    if later:
        driver.table.append(pa.table({"k": ["own"], "v": [1]}))
    with pytest.raises(TableRefusedError, match=f"go back to snapshot {last.snapshot_id}") as caught:
        driver.apply(2, FIRST)
    assert caught.value.condition == "TABLE_REFUSED.ROLLED_BACK"
    with pytest.raises(TableRefusedError):
        ChangesDriver(tmp_path)
    driver.table.manage_snapshots().set_current_snapshot(last.snapshot_id).commit()
    driver.apply(2, [("a", 9, 9, 1)])
    assert driver.rows() == FOLDS[1]([*EVENTS, ("a", 9, 9, 1)])


@TYPES
def test_the_record_stays_when_snapshots_expire(tmp_path: Path, scd_type: int) -> None:
    driver = ChangesDriver(tmp_path, scd_type)
    driver.apply(0, FIRST)
    driver.apply(1, SECOND)
    driver.table.append(driver.table.scan().to_arrow().slice(0, 0))
    table = driver.table
    kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
    old = [each.snapshot_id for each in table.metadata.snapshots if each.snapshot_id not in kept]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    assert len(driver.table.metadata.snapshots) == 2
    ChangesDriver(tmp_path, scd_type).apply(2, [*FIRST, ("a", 9, 9, 1)])
    assert driver.rows() == FOLDS[scd_type]([*EVENTS, ("a", 9, 9, 1)])


def test_the_newest_snapshot_of_the_record_is_kept_however_old_it_is(tmp_path: Path) -> None:
    driver = ChangesDriver(tmp_path)
    driver.apply(0, FIRST)
    ref = driver.table.metadata.refs[BRANCH]
    assert ref.max_ref_age_ms is not None
    assert ref.max_ref_age_ms > 1000 * 86_400_000 * 365
    assert ref.min_snapshots_to_keep == 1
    named = json.loads(driver.table.properties[STATE_PROPERTY])
    assert named["snapshot"] == ref.snapshot_id


def test_a_catalog_without_branches_is_refused_when_the_query_starts(tmp_path: Path) -> None:
    """Some keep what a commit says of the main branch alone."""

    def forget(commit: Callable[[], Any]) -> Any:
        reply = commit()
        catalog = Driver(tmp_path, name="other").location.catalog
        without_branch(catalog.load_table(("shop", "t")))
        return reply

    with pytest.raises(TableRefusedError, match="not kept by the catalog"):
        ChangesDriver(tmp_path, faults=[forget])


@TYPES
@pytest.mark.parametrize("fault", ["other query", conflict, lost_reply_as_conflict])
def test_a_record_is_begun_once(tmp_path: Path, scd_type: int, fault: Any) -> None:
    if fault == "other query":
        fault = also(lambda: ChangesDriver(tmp_path, scd_type, "other").apply(0, FIRST))
    driver = ChangesDriver(tmp_path, scd_type, faults=[fault])
    ChangesDriver(tmp_path, scd_type, "other").apply(0, FIRST)
    driver.apply(0, SECOND)
    assert driver.rows() == FOLDS[scd_type](EVENTS)


def test_other_writers_that_are_always_faster_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    driver = ChangesDriver(tmp_path)
    driver.catalog.faults = [conflict] * 10
    with pytest.raises(CommitRefusedError, match="10 times"):
        driver.apply(0, FIRST)
    assert driver.rows() == []
    left = [name for name in driver.orphans if name.endswith(".parquet")]
    assert len(left) == 2, "rows and record, which the catalog was asked to commit, and no staged events"


@pytest.mark.parametrize("of", ["rows", "record"])
def test_files_that_are_gone_when_a_suspended_driver_wakes_are_not_committed(
    tmp_path: Path, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tables.iceberg.commit._OLD_SECONDS", -1.0)
    driver = ChangesDriver(tmp_path)
    send = Commit._commit_changes

    def cleaned_up(commit: Commit, transaction: Any, changes: FileChanges) -> Any:
        assert changes.applied_events_change is not None
        for file in changes.added if of == "rows" else changes.applied_events_change.added:
            Path(file.file_path.removeprefix("file://")).unlink()
        monkeypatch.setattr(Commit, "_commit_changes", send)
        raise CommitConflict

    monkeypatch.setattr(Commit, "_commit_changes", cleaned_up)
    with pytest.raises(CommitRefusedError, match="missing") as caught:
        driver.apply(0, FIRST)
    assert caught.value.condition == "COMMIT_REFUSED.STAGED_FILES_MISSING"
    assert driver.rows() == []
    ChangesDriver(tmp_path).apply(0, FIRST)
    assert driver.rows() == FOLDS[1](FIRST)


@TYPES
def test_a_table_is_compacted_beside_its_record(tmp_path: Path, scd_type: int) -> None:
    driver = ChangesDriver(tmp_path, scd_type)
    driver.apply(0, START)
    driver.catalog.faults = [also(lambda: compact(driver.location, 1 << 20, 2))]
    driver.apply(1, FIRST)
    compact(driver.location, 1 << 20, 2)
    driver.apply(2, SECOND)
    assert driver.rows() == FOLDS[scd_type]([*START, *EVENTS])


def test_a_dropped_table_starts_over(tmp_path: Path) -> None:
    driver = ChangesDriver(tmp_path)
    driver.apply(0, [("a", 5, 5, 1)])
    driver.catalog.drop_table(("shop", "t"))
    with pytest.raises(TableRefusedError, match="TABLE_GONE"):
        driver.apply(1, [("a", 6, 6, 1)])
    again = ChangesDriver(tmp_path, app_id="again")
    again.apply(0, [("a", 4, 4, 1)])
    assert again.rows() == [("a", 4)]


def test_a_feed_of_the_table_has_the_changes_of_its_rows_alone(tmp_path: Path) -> None:
    driver = ChangesDriver(tmp_path)
    for number, batch in enumerate([START, FIRST, SECOND]):
        driver.apply(number, batch)
    feed = IcebergFeed("shop.t", "lake", driver.location.properties).open()
    oldest = feed.oldest()
    rows: Counter[tuple[Any, ...]] = Counter()
    for change in changes(feed, oldest, feed.newest(oldest)).to_pylist():
        rows[change["k"], change["v"]] += 1 if change["_change_type"] == "insert" else -1
    assert sorted(rows.elements()) == FOLDS[1]([*START, *EVENTS])
