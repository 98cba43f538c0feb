"""Exports to tables that are rolled back: to before their last commit, or only other writers' commits."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table.update import RemoveSnapshotRefUpdate

import penstock
from penstock.errors import TableRefusedError
from penstock.export.table import QueueId, TableChangedError
from penstock.export.targets import location_of, table_at
from tests.export.conftest import SCHEMA, Export, append
from tests.export.lakes import DeltaLake, IcebergLake, Lake

LOST = "TABLE_REFUSED.EXPORT_ROLLED_BACK"


def version(lake: Lake) -> int:
    if isinstance(lake, DeltaLake):
        return DeltaTable(str(lake.folder / "orders")).version()
    assert isinstance(lake, IcebergLake)
    snapshot = lake.catalog.load_table(("shop", "orders")).current_snapshot()
    assert snapshot is not None
    return snapshot.snapshot_id


def roll_back(lake: Lake, to: int) -> None:
    if isinstance(lake, DeltaLake):
        DeltaTable(str(lake.folder / "orders")).restore(to)
        return
    assert isinstance(lake, IcebergLake)
    # Also forwards again, which rollback_to_snapshot refuses.
    lake.catalog.load_table(("shop", "orders")).manage_snapshots().set_current_snapshot(to).commit()


def write(lake: Lake, *numbers: int) -> None:
    """Append rows, as another program does."""
    rows = pa.table({"n": pa.array(numbers, pa.int64()), "s": [str(n) for n in numbers]})
    if isinstance(lake, DeltaLake):
        write_deltalake(str(lake.folder / "orders"), rows, mode="append")
        return
    assert isinstance(lake, IcebergLake)
    lake.catalog.load_table(("shop", "orders")).append(rows)


def expire(lake: IcebergLake, *snapshots: int) -> None:
    table = lake.catalog.load_table(("shop", "orders"))
    table.maintenance.expire_snapshots().by_ids(list(snapshots)).commit()


def exported_twice(queue: penstock.Queue, export: Export, lake: Lake) -> list[int]:
    """The versions of a table after its first commit, and after its second."""
    versions = []
    for number in (1, 2):
        append(queue, number)
        export().run()
        versions.append(version(lake))
    return versions


def refused(export: Export) -> str:
    with pytest.raises(TableRefusedError) as raised:
        export().run()
    assert raised.value.condition == LOST
    return str(raised.value)


def test_a_table_without_rows_of_the_last_commit_is_refused_until_it_has_them_again(
    queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    first, last = exported_twice(queue, export, lake)
    roll_back(lake, first)
    append(queue, 3)
    assert f"restore {'version' if isinstance(lake, DeltaLake) else 'snapshot'} {last}" in refused(export)
    with pytest.raises(TableRefusedError):
        export().newer_rows()
    assert lake.numbers("orders") == [1]
    roll_back(lake, last)
    export().run()
    assert lake.numbers("orders") == [1, 2, 3]


def test_a_rolled_back_table_is_refused_after_other_writers_have_gone_on(
    queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    first, last = exported_twice(queue, export, lake)
    roll_back(lake, first)
    write(lake, 10)
    write(lake, 11)
    refused(export)
    if isinstance(lake, IcebergLake):
        # A snapshot that is older than it is among the ancestors.
        expire(lake, last)
        refused(export)


def test_a_rollback_that_takes_back_only_the_commits_of_others_is_none(
    queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    _, last = exported_twice(queue, export, lake)
    write(lake, 10)
    append(queue, 3)
    roll_back(lake, last)
    export().run()
    assert lake.numbers("orders") == [1, 2, 3]
    write(lake, 11)
    before = version(lake)
    write(lake, 12)
    roll_back(lake, before)
    append(queue, 4)
    export().run()
    assert lake.numbers("orders") == [1, 2, 3, 4, 11]


def test_a_table_of_others_that_was_rolled_back_before_the_first_export_is_filled(
    queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    export().run()
    write(lake, 10)
    before = version(lake)
    write(lake, 11)
    roll_back(lake, before)
    for number in (1, 2):
        append(queue, number)
        export().run()
    assert lake.numbers("orders") == [1, 2, 10]


def test_a_rollback_to_a_compaction_takes_back_no_rows(
    queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    for number in range(32):
        append(queue, number, partition=0)
        export().run()
    assert lake.files("orders") == 1
    compacted = version(lake)
    write(lake, 100)
    roll_back(lake, compacted)
    append(queue, 32)
    export().run()
    assert lake.numbers("orders") == list(range(33))


def test_a_rollback_during_an_export_is_refused_at_its_commit(
    store: penstock.Store, queue: penstock.Queue, export: Export, lake: Lake
) -> None:
    first, _ = exported_twice(queue, export, lake)
    append(queue, 3, partition=0)
    name = QueueId(store.uuid, "orders", queue.record.generation)
    table = table_at(location_of(lake.url, lake.named("orders")), name, 1 << 20)
    table.load()
    positions = table.positions(2)
    roll_back(lake, first)
    rows = pa.RecordBatch.from_pylist([{"n": 3, "s": "3"}], SCHEMA)
    # A RESTORE conflicts with the commits of others.
    with pytest.raises((TableRefusedError, TableChangedError)):
        table.append(SCHEMA, iter([rows]), {0: positions[0] + 1})
    assert lake.numbers("orders") == [1]
    refused(export)


def test_a_restore_by_time_is_noticed_and_one_to_the_same_rows_is_not(
    queue: penstock.Queue, tmp_path: Path, store_url: str
) -> None:
    lake = DeltaLake(tmp_path)

    def run() -> None:
        penstock.QueueExport("orders", store_url, lake.url).run()

    append(queue, 1)
    run()
    before = datetime.now(UTC) + timedelta(milliseconds=50)
    time.sleep(0.1)
    append(queue, 2)
    run()
    after = datetime.now(UTC) + timedelta(milliseconds=50)
    time.sleep(0.1)
    write(lake, 10)
    folder = str(lake.folder / "orders")
    DeltaTable(folder).restore(after)
    run()
    DeltaTable(folder).restore(before)
    with pytest.raises(TableRefusedError):
        run()


def test_a_restore_is_judged_by_the_part_of_the_log_that_is_left(
    queue: penstock.Queue, tmp_path: Path, store_url: str
) -> None:
    lake = DeltaLake(tmp_path)
    append(queue, 1)
    penstock.QueueExport("orders", store_url, lake.url).run()
    for number in range(10, 14):
        write(lake, number)
    folder = lake.folder / "orders"
    DeltaTable(str(folder)).create_checkpoint()
    roll_back(lake, version(lake) - 1)
    # The export's commit is among those that a clean-up deletes.
    for number in range(version(lake) - 3):
        (folder / f"_delta_log/{number:020}.json").unlink()
    append(queue, 2)
    penstock.QueueExport("orders", store_url, lake.url).run()
    assert lake.numbers("orders") == [1, 2, 10, 11, 12]


@pytest.mark.parametrize("tagged", [False, True])
def test_an_export_goes_on_after_its_snapshot_has_expired(
    queue: penstock.Queue, tmp_path: Path, store_url: str, tagged: bool
) -> None:
    lake = IcebergLake(tmp_path)

    def run() -> None:
        penstock.QueueExport("orders", store_url, lake.url, table="shop.orders").run()

    append(queue, 1)
    run()
    own = version(lake)
    if tagged:
        lake.catalog.load_table(("shop", "orders")).manage_snapshots().create_tag(own, "kept").commit()
    write(lake, 10)
    between = version(lake)
    write(lake, 11)
    expire(lake, *([between] if tagged else [own, between]))
    append(queue, 2)
    run()
    assert lake.numbers("orders") == [1, 2, 10, 11]


def test_a_table_that_was_emptied_or_replaced_is_refused(
    queue: penstock.Queue, tmp_path: Path, store_url: str
) -> None:
    lake = IcebergLake(tmp_path)
    export = penstock.QueueExport("orders", store_url, lake.url, table="shop.orders")
    append(queue, 1)
    export.run()
    table = lake.catalog.load_table(("shop", "orders"))
    # As CREATE OR REPLACE TABLE does, which keeps the snapshots.
    lake.catalog.commit_table(table, (), (RemoveSnapshotRefUpdate(ref_name="main"),))
    refused(lambda: export)
    write(lake, 10)
    refused(lambda: export)
    write(lake, 11)
    refused(lambda: export)
