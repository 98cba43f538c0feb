"""Exports that pause in mid-commit, and wake when things have changed."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.transforms import IdentityTransform

import penstock
from penstock.errors import DataLostError, QueueNotFoundError, StoreUnavailableError
from penstock.export.delta_table import DeltaExportTable
from penstock.export.iceberg_table import IcebergExportTable
from penstock.export.source import ExportSource
from penstock.tables.iceberg import attempts
from tests.export.conftest import Export, append
from tests.export.lakes import DeltaLake, IcebergLake, Lake

Pause = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Pause:
    """Have the next commit call a function, before its rows are read or after its files are written."""
    rows = ExportSource.rows

    def pause(moment: str, act: Callable[[], object]) -> None:
        def read(source: ExportSource, plan: Any) -> Iterator[pa.RecordBatch]:
            monkeypatch.setattr(ExportSource, "rows", rows)
            if moment == "before":
                act()
            yield from rows(source, plan)
            if moment == "after":
                act()

        monkeypatch.setattr(ExportSource, "rows", read)

    return pause


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an export had lost its lock while it was paused."""
    monkeypatch.setattr(penstock.QueueExport, "_lock_name", property(lambda self: str(uuid.uuid4())))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_rows_that_another_exported_and_that_were_trimmed_meanwhile(
    store: penstock.Store, queue: penstock.Queue, export: Export, lake: Lake, pause: Pause, moment: str,
    lockless: None,
) -> None:  # fmt: skip
    append(queue, 1, 2, partition=0)

    def overtake() -> None:
        export().run()
        queue.trim(0, 2)
        append(queue, 3, partition=0)

    pause(moment, overtake)
    assert export().run().rows == 0, "row 3 came after it began"
    assert export().run().rows == 1
    assert lake.numbers("orders") == [1, 2, 3]


def test_rows_that_were_trimmed_before_anyone_exported_them_are_an_error(
    store: penstock.Store, queue: penstock.Queue, export: Export, lake: Lake, pause: Pause
) -> None:
    append(queue, 1, partition=0)
    export().run()
    append(queue, 2, 3, partition=0)

    def lose() -> None:
        store.consumer("export").unregister("orders")
        queue.trim(0, 2)
        store.consumer("export").register("orders")

    pause("before", lose)
    with pytest.raises(DataLostError):
        export().run()
    assert lake.numbers("orders") == [1]


def test_a_queue_that_is_dropped_meanwhile_is_an_error(
    store: penstock.Store, queue: penstock.Queue, export: Export, lake: Lake, pause: Pause
) -> None:
    append(queue, 1, partition=0)
    pause("after", lambda: store.drop_queue("orders", force=True))
    with pytest.raises(QueueNotFoundError):
        export().run()
    # They were read before it was dropped.
    assert lake.numbers("orders") == [1]


@pytest.mark.parametrize("hours", [0.5, 30])
def test_files_that_a_clean_up_may_have_deleted_are_written_again(
    queue: penstock.Queue, pause: Pause, monkeypatch: pytest.MonkeyPatch, hours: float,
    tmp_path: Path, store_url: str,
) -> None:  # fmt: skip
    lake = IcebergLake(tmp_path)
    append(queue, 1)
    now = time.time
    pause("after", lambda: monkeypatch.setattr(attempts.time, "time", lambda: now() + hours * 3600))
    exporting = penstock.QueueExport("orders", store_url, lake.url, table="shop.orders")
    reads = _counted(monkeypatch)
    exporting.run()
    assert lake.numbers("orders") == [1]
    assert len(reads) == (1 if hours < 1 else 2)


def test_a_table_that_is_partitioned_meanwhile_takes_the_rows(
    queue: penstock.Queue, pause: Pause, tmp_path: Path, store_url: str
) -> None:
    lake = IcebergLake(tmp_path)
    exporting = penstock.QueueExport("orders", store_url, lake.url, table="shop.orders")
    append(queue, 1)
    exporting.run()

    def partition() -> None:
        with lake.catalog.load_table("shop.orders").update_spec() as update:
            update.add_field("n", IdentityTransform(), "n")

    append(queue, 2, 3)
    pause("after", partition)
    exporting.run()
    assert lake.numbers("orders") == [1, 2, 3]
    partitions = lake.catalog.load_table("shop.orders").inspect.partitions()
    assert partitions["record_count"].to_pylist() == [1, 1, 1]


def test_an_error_while_files_are_merged_costs_no_row(
    queue: penstock.Queue, export: Export, lake: Lake, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    kind = DeltaExportTable if isinstance(lake, DeltaLake) else IcebergExportTable
    original, calls = kind.compact_small_files, []

    def fail_once(table: Any) -> None:
        calls.append(table)
        if len(calls) == 1:
            raise StoreUnavailableError("it is away", condition="STORE_UNAVAILABLE.TABLE_STORAGE", table="x")
        original(table)

    monkeypatch.setattr(kind, "compact_small_files", fail_once)
    exporting = export()
    with caplog.at_level(logging.WARNING, "penstock.export"):
        append(queue, 1)
        assert exporting.run().rows == 1
    assert [record.action for record in caplog.records] == ["files_not_merged"]  # type: ignore[attr-defined]
    append(queue, 2)
    exporting.run()
    assert lake.numbers("orders") == [1, 2]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Count how often an export writes files."""
    written, calls = IcebergExportTable._write_files, []

    def write(*values: Any) -> Any:
        calls.append(None)
        return written(*values)

    monkeypatch.setattr(IcebergExportTable, "_write_files", write)
    return calls
