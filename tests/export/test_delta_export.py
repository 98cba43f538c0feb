"""What exports and Delta tables do beyond what they do with all tables."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import penstock
from penstock.errors import CheckpointMismatchError, SchemaMismatchError, TableRefusedError
from penstock.export.delta_table import DeltaExportTable
from penstock.tables.delta.transactions import commit_properties
from tests.export.conftest import Export, append
from tests.export.lakes import DeltaLake, Lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return DeltaLake(tmp_path)


def test_an_older_version_of_the_table_gets_its_rows_again(
    queue: penstock.Queue, export: Export, lake: Lake,
    tmp_path: Path, store: penstock.Store,
) -> None:  # fmt: skip
    append(queue, 1, partition=0)
    export().run()
    before = DeltaTable(f"{tmp_path}/lake/orders").version()
    append(queue, 2, partition=0)
    export().run()
    # A backup of the folder from before the second commit.
    (tmp_path / f"lake/orders/_delta_log/{before + 1:020}.json").unlink()
    export().run()
    assert lake.numbers("orders") == [1, 2]
    assert store.consumer("export").offsets("orders")[0] == 2


def test_a_queue_with_fewer_rows_than_the_table_is_refused(
    store: penstock.Store, queue: penstock.Queue, export: Export, tmp_path: Path
) -> None:
    append(queue, 1, partition=0)
    export().run()
    name = f"penstock-queue:{store.uuid}:orders:{queue.record.generation}:0"
    write_deltalake(
        f"{tmp_path}/lake/orders",
        pa.table({"n": [2], "s": ["x"]}),
        mode="append",
        commit_properties=commit_properties({name: 2}),
    )
    with pytest.raises(CheckpointMismatchError, match="up to 2, and the queue ends at 1"):
        export().run()


def test_a_table_with_other_columns_is_refused_and_one_with_more_is_not(
    queue: penstock.Queue, export: Export, tmp_path: Path
) -> None:
    append(queue, 1)
    write_deltalake(f"{tmp_path}/lake/more", pa.table({"x": [1], "s": ["a"], "n": pa.array([0], pa.int64())}))
    export(table="more").run()
    table = DeltaTable(f"{tmp_path}/lake/more").to_pyarrow_table().sort_by("n")
    assert table.to_pylist() == [{"x": 1, "s": "a", "n": 0}, {"x": None, "s": "1", "n": 1}]
    write_deltalake(f"{tmp_path}/lake/other", pa.table({"n": ["text"], "s": ["a"]}))
    with pytest.raises(SchemaMismatchError):
        export(table="other").run()


def test_a_table_that_forgets_is_refused(queue: penstock.Queue, export: Export, tmp_path: Path) -> None:
    write_deltalake(
        f"{tmp_path}/lake/orders",
        pa.table({"n": pa.array([0], pa.int64()), "s": ["a"]}),
        configuration={"delta.setTransactionRetentionDuration": "interval 1 days"},
    )
    with pytest.raises(TableRefusedError, match="drop the record"):
        export().run()


@pytest.mark.parametrize("reading", ["run", "newer_rows"])
def test_a_table_that_is_deleted_while_it_is_read_is_looked_at_again(
    queue: penstock.Queue,
    export: Export,
    reading: str,
    lake: DeltaLake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append(queue, 1)
    exporting = export()
    exporting.run()
    load = DeltaExportTable.load

    def load_and_lose(table: DeltaExportTable) -> bool:
        monkeypatch.undo()
        is_there = load(table)
        (lake.folder / "orders").rename(tmp_path / "deleted")
        return is_there

    monkeypatch.setattr(DeltaExportTable, "load", load_and_lose)
    if reading == "newer_rows":
        version, rows = exporting.newer_rows()
        assert (version, rows.read_all()["n"].to_pylist()) == (None, [1])
    else:
        exporting.run()
        assert lake.numbers("orders") == [1]
