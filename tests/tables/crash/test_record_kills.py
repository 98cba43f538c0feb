"""Lake tables of queries that were killed around the commit of the record of keys: what was applied is what
is recorded, so nothing is lost and nothing repeated.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.tables.delta import lookups, vectors
from tests.support.processes import ChildProcess
from tests.tables.crash import delta_record, iceberg_record
from tests.tables.crash.record_batches import BATCHES, OTHERS
from tests.tables.delta.driver import FOLDS, Driver
from tests.tables.histories import Event
from tests.tables.iceberg.changes_driver import ChangesDriver

RunChild = Callable[..., ChildProcess]
DELTA_PLAN = [["WRITTEN", "RECORDED"], ["RECORDED", "RESTORED", "RECORDED"], ["RECORDED"], ["RECORDED"]]
ICEBERG_PLAN = [["WRITTEN", "BOTH"], ["RECORDED", "BOTH", "METADATA"], ["BOTH"], ["METADATA"]]
"""The moments at which each micro-batch is killed before its commit."""


def test_the_batches_have_what_a_broken_record_would_show() -> None:
    """One micro-batch changes no row, and the last one's rows are others without what that one records."""
    first, second, third, last = BATCHES
    for fold in FOLDS.values():
        before = [*first, *second]
        assert fold(first) != fold(before) == fold([*before, *third])
        assert fold([*before, *last]) != fold([*before, *third, *last])


def kill(run_child: RunChild, module: str, *arguments: object) -> None:
    child = run_child(module, *arguments)
    assert child.wait() == -signal.SIGKILL, child.output


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`any_size(way)`: as in the child, until the test ends."""
    for place, names in ((Driver, ("by_tasks", "by_vectors")), (lookups, ("_DRIVER_BYTES",))):
        for name in names:
            monkeypatch.setattr(place, name, getattr(place, name))
    for name in ("_MIN_FILE_BYTES", "_MAX_DELETED_SHARE"):
        monkeypatch.setattr(vectors, name, getattr(vectors, name))
    return delta_record.any_size


@pytest.mark.crash
@pytest.mark.few(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", delta_record.WAYS)
@pytest.mark.parametrize("scd_type", [1, 2])
def test_a_delta_table_has_what_its_record_has(
    tmp_path: Path, run_child: RunChild, any_size: Callable[[str], None], scd_type: int, way: str
) -> None:
    any_size(way)
    fold = FOLDS[scd_type]

    def killed(batch_id: int, moment: str) -> None:
        kill(run_child, "tests.tables.crash.delta_record", tmp_path, scd_type, way, batch_id, moment)

    killed(0, "CREATED")
    killed(0, "UNNAMED")
    done: list[Event] = []
    for batch_id, batch in enumerate(BATCHES):
        for moment in DELTA_PLAN[batch_id]:
            killed(batch_id, moment)
            driver = Driver(tmp_path, scd_type, "reader")
            assert driver.rows() == fold(done), (batch_id, moment)
            named = driver.writer.applied.version_for(driver.table())
            assert (driver.applied().version() > named) == (moment != "WRITTEN"), (batch_id, moment)
        if batch_id == 1:
            for number, event in enumerate(OTHERS):
                Driver(tmp_path, scd_type, "other").apply(number, [event])
            done += OTHERS
            killed(batch_id, "RECORDED")
            assert driver.rows() == fold(done)
        killed(batch_id, "COMMITTED")
        if batch_id == 2 and way == "deltalake":
            # A merge that changes no row is no commit, and the table did not get to name the record.
            assert driver.writer.applied.version_for(driver.table()) < driver.applied().version()
        else:
            done += batch
        assert driver.rows() == fold(done), batch_id
        Driver(tmp_path, scd_type).apply(batch_id, batch)
        done += batch
        assert driver.rows() == fold(done), batch_id
        assert driver.writer.applied.version_for(driver.table()) == driver.applied().version()
    version = driver.table().version()
    replay = Driver(tmp_path, scd_type, "replay")
    for batch_id, batch in enumerate([*BATCHES, OTHERS]):
        replay.apply(batch_id, batch)
    assert driver.rows() == fold(done)
    assert driver.table().version() == version, "it has no change that the table lacks"
    assert (len(driver.table().deletion_vectors().read_all()) > 0) == (way == "vectors")


@pytest.mark.crash_full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", iceberg_record.WAYS)
@pytest.mark.parametrize("scd_type", [1, 2])
def test_an_iceberg_table_has_what_its_record_has(
    tmp_path: Path, run_child: RunChild, scd_type: int, way: str
) -> None:
    fold = FOLDS[scd_type]

    def killed(batch_id: int, moment: str) -> None:
        kill(run_child, "tests.tables.crash.iceberg_record", tmp_path, scd_type, batch_id, moment)

    killed(0, "CREATED")
    killed(0, "BEGUN")
    driver = ChangesDriver(tmp_path, scd_type, "reader")
    driver.table.transaction().set_properties({"write.merge.mode": way}).commit_transaction()
    done: list[Event] = []
    recorded = driver.recorded()
    for batch_id, batch in enumerate(BATCHES):
        for moment in ICEBERG_PLAN[batch_id]:
            killed(batch_id, moment)
            assert driver.rows() == fold(done), (batch_id, moment)
            assert driver.recorded() == recorded, (batch_id, moment)
        if batch_id == 1:
            for number, event in enumerate(OTHERS):
                ChangesDriver(tmp_path, scd_type, "other").apply(number, [event])
            done += OTHERS
            recorded = driver.recorded()
            killed(batch_id, "BOTH")
            assert driver.rows() == fold(done)
        killed(batch_id, "COMMITTED")
        done += batch
        assert driver.rows() == fold(done), batch_id
        assert driver.recorded() != recorded, batch_id
        recorded = driver.recorded()
        ChangesDriver(tmp_path, scd_type).apply(batch_id, batch)
        assert driver.rows() == fold(done), batch_id
        assert driver.recorded() == recorded, batch_id
    snapshot = driver.table.metadata.current_snapshot_id
    replay = ChangesDriver(tmp_path, scd_type, "replay")
    for batch_id, batch in enumerate([*BATCHES, OTHERS]):
        replay.apply(batch_id, batch)
    assert driver.rows() == fold(done)
    assert driver.recorded() == recorded
    assert driver.table.metadata.current_snapshot_id == snapshot, "it has no change that the table lacks"
