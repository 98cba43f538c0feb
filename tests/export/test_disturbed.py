"""Exports while tables, queues and other programs change under them."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

import penstock
from penstock.errors import ConsumerInUseError
from tests.export.conftest import Begin, Export, append
from tests.export.lakes import DeltaLake, IcebergLake, Lake
from tests.support.waiting import wait_until


def test_a_restored_table_gets_the_rows_of_all_partitions_again(
    queue: penstock.Queue, export: Export, lake: Lake, tmp_path: Path
) -> None:
    append(queue, 1, partition=0)
    export().run()
    if isinstance(lake, DeltaLake):
        shutil.copytree(lake.folder, tmp_path / "backup")
    else:
        shutil.copy(tmp_path / "catalog.db", tmp_path / "backup.db")
    append(queue, 2, partition=1)
    export().run()
    if isinstance(lake, DeltaLake):
        shutil.rmtree(lake.folder)
        shutil.move(tmp_path / "backup", lake.folder)
    else:
        shutil.copy(tmp_path / "backup.db", tmp_path / "catalog.db")
    export().run()
    assert lake.numbers("orders") == [1, 2]


def test_tables_of_one_name_in_two_places_get_all_rows(
    store: penstock.Store, store_url: str, queue: penstock.Queue, tmp_path: Path
) -> None:
    places = [DeltaLake(tmp_path / name) for name in ("a", "b")]
    exports = [penstock.QueueExport("orders", store_url, place.url) for place in places]
    append(queue, 1, partition=0)
    for each in exports:
        each.run()
    append(queue, 2, partition=1)
    exports[0].run()
    # The other one's consumer keeps the row.
    queue.trim(1, 1)
    exports[1].run()
    assert [place.numbers("orders") for place in places] == [[1, 2], [1, 2]]


def test_a_consumer_of_a_query_is_refused(
    store: penstock.Store, queue: penstock.Queue, export: Export
) -> None:
    store.create_consumer("export").register("orders")
    with store.database.transaction() as tx:
        tx.change(f"update {_registration(store)} set app_id = 'x'")
    with pytest.raises(ConsumerInUseError, match="a query has used"):
        export().run()


def _registration(store: penstock.Store) -> str:
    if store.database.dialect == "sqlite":
        return "penstock_registration"
    return f"{store.database.url.schema}.registration"


def test_columns_and_partitions_that_come_while_an_export_follows(
    queue: penstock.Queue, following: Begin, lake: Lake
) -> None:
    exporting = following()
    append(queue, 1, partition=0)
    wait_until(lambda: exporting.status().rows == 1)
    queue.add_partitions(1)
    append(queue, 2, partition=2)
    wait_until(lambda: exporting.status().rows == 2)
    queue.add_columns(pa.schema([("more", pa.float64())]))
    queue.append([{"n": 3, "more": 0.5}], 1)
    wait_until(lambda: exporting.status().rows == 3)
    rows = lake.rows("orders").sort_by("n").select(["n", "more"]).to_pylist()
    assert rows == [{"n": 1, "more": None}, {"n": 2, "more": None}, {"n": 3, "more": 0.5}]


def test_a_column_that_is_dropped_while_an_export_follows_is_added_again(
    queue: penstock.Queue, following: Begin, lake: Lake
) -> None:
    exporting = following()
    append(queue, 1)
    wait_until(lambda: exporting.status().rows == 1)
    lake.drop_column("orders", "s")
    append(queue, 2)
    wait_until(lambda: lake.count("orders") == 2)
    rows = sorted(lake.rows("orders").to_pylist(), key=lambda row: int(row["n"]))
    assert rows == [{"n": 1, "s": None}, {"n": 2, "s": "2"}]


def test_a_table_that_is_deleted_while_an_export_follows_is_created_again(
    queue: penstock.Queue, following: Begin, lake: Lake
) -> None:
    exporting = following()
    append(queue, 1, partition=0)
    wait_until(lambda: exporting.status().rows == 1)
    if isinstance(lake, DeltaLake):
        # At once, as far as the export can see: a folder without some of its log is another matter.
        (lake.folder / "orders").rename(lake.folder / "deleted")
    elif isinstance(lake, IcebergLake):
        lake.catalog.drop_table(("shop", "orders"))
    append(queue, 2, partition=1)
    wait_until(lambda: lake.count("orders") == 2)


@pytest.mark.few(2)
def test_rows_that_keep_coming_do_not_make_commits_more_often(
    queue: penstock.Queue, following: Begin
) -> None:
    append(queue, 1)
    # What is there at the start is exported at once, and later rows half a minute later.
    exporting = following(every=30)
    stopping = threading.Event()

    def keep_appending() -> None:
        while not stopping.wait(0.02):
            append(queue, 1)

    thread = threading.Thread(target=keep_appending)
    thread.start()
    try:
        wait_until(lambda: exporting.status().commits == 1)
        threading.Event().wait(2)
        assert exporting.status().commits == 1
    finally:
        stopping.set()
        thread.join()


@pytest.fixture
def iceberg(tmp_path: Path) -> IcebergLake:
    return IcebergLake(tmp_path)


def _losing_replies(monkeypatch: pytest.MonkeyPatch, after: Callable[[int], None]) -> None:
    """Have the catalog answer that a commit failed which it has made; call a function in between."""
    commit, calls = SqlCatalog.commit_table, [0]

    def lost(self: SqlCatalog, *values: Any) -> Any:
        calls[0] += 1
        call = calls[0]
        commit(self, *values)
        after(call)
        raise CommitFailedException("the reply was lost, and this is the answer to its repetition")

    monkeypatch.setattr(SqlCatalog, "commit_table", lost)


def test_no_file_of_a_commit_is_deleted_whatever_the_catalog_answers(
    store_url: str, queue: penstock.Queue, iceberg: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exporting() -> penstock.QueueExport:
        return penstock.QueueExport("orders", store_url, iceberg.url, table="shop.orders")

    exporting().run()
    append(queue, 1, partition=0)
    monkeypatch.setattr(penstock.QueueExport, "_lock_name", property(lambda self: str(uuid.uuid4())))

    def overtake(call: int) -> None:
        if call == 1:
            append(queue, 2, partition=0)
            with monkeypatch.context() as patch:
                patch.undo()
                exporting().run()

    _losing_replies(monkeypatch, overtake)
    exporting().run()
    assert iceberg.numbers("orders") == [1, 2]


def test_merged_files_stay_if_the_reply_is_lost(
    store_url: str, queue: penstock.Queue, iceberg: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporting = penstock.QueueExport("orders", store_url, iceberg.url, table="shop.orders")
    for n in range(31):
        append(queue, n)
        exporting.run()
    append(queue, 31)
    _losing_replies(monkeypatch, lambda call: None)
    exporting.run()
    assert iceberg.numbers("orders") == list(range(32))
    assert iceberg.files("orders") == 1
