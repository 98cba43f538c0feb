"""Compaction of Delta tables, beside other writers, and the names of tables that are compacted."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

import penstock
from penstock.errors import CommitRefusedError, InvalidInputError, InvalidUrlError, TableRefusedError
from penstock.lake.storage import DeltaLocation


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A Delta table of six files."""
    path = str(tmp_path / "orders")
    for number in range(6):
        _append(path, number)
    return path


def _append(path: str, number: int) -> None:
    rows = pa.table({"day": [number % 2, number % 2], "n": [2 * number, 2 * number + 1]})
    write_deltalake(path, rows, mode="append", partition_by=["day"])


def _files(path: str) -> int:
    return len(DeltaTable(path).file_uris())


def _rows(path: str) -> list[int]:
    return sorted(DeltaTable(path).to_pyarrow_table()["n"].to_pylist())


def test_the_files_of_a_partition_become_one(path: str, tmp_path: Path) -> None:
    done = penstock.compact_table("orders", f"delta://{tmp_path}")
    assert done == penstock.TableCompaction(merged_files=6, new_files=2, commits=1)
    assert (_files(path), _rows(path)) == (2, list(range(12)))
    assert penstock.compact_table("orders", f"delta://{tmp_path}") == penstock.TableCompaction()


def test_a_writer_that_is_faster_is_waited_for(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = DeltaLocation.find

    def find_before_another_replaces_all(location: DeltaLocation) -> DeltaTable | None:
        table = find(location)
        monkeypatch.setattr(DeltaLocation, "find", find)
        write_deltalake(path, pa.table({"day": [0], "n": [7]}), mode="overwrite")
        for number in range(3):
            _append(path, number)
        return table

    monkeypatch.setattr(DeltaLocation, "find", find_before_another_replaces_all)
    penstock.compact_table("orders", f"delta://{tmp_path}")
    assert (_files(path), _rows(path)) == (2, [0, 1, 2, 3, 4, 5, 7])


def test_writers_that_are_always_faster_are_reported(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = DeltaLocation.find

    def find_before_another_deletes(location: DeltaLocation) -> DeltaTable | None:
        table = find(location)
        DeltaTable(path).delete()
        _append(path, 1)
        _append(path, 1)
        return table

    monkeypatch.setattr(DeltaLocation, "find", find_before_another_deletes)
    with pytest.raises(CommitRefusedError, match="at each of 10 attempts to merge files"):
        penstock.compact_table("orders", f"delta://{tmp_path}")
    assert _rows(path) == [2, 2, 3, 3]


def test_the_reason_of_a_conflict_is_told_on_one_line_without_secrets(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CommitFailedError("Transaction failed for key geheim\n  0: a cause\n  1: another")

    monkeypatch.setattr("deltalake.table.TableOptimizer.compact", fail)
    with pytest.raises(CommitRefusedError, match=r"\(Transaction failed for key …\)\. No row"):
        penstock.compact_table("orders", f"delta://{tmp_path}?storage.AWS_SECRET_ACCESS_KEY=geheim")


def test_wrong_arguments_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(TableRefusedError) as caught:
        penstock.compact_table("nothing", f"delta://{tmp_path}")
    assert caught.value.condition == "TABLE_REFUSED.NOT_FOUND"
    with pytest.raises(InvalidUrlError):
        penstock.compact_table("orders", "sqlite:///shop.db")
    with pytest.raises(InvalidUrlError):
        penstock.compact_table("orders")
    with pytest.raises(InvalidInputError, match=r"file_bytes must be 1,024 or more, not 10"):
        penstock.compact_table("orders", f"delta://{tmp_path}", file_bytes=10)
    assert _files(path) == 6
