"""The data files of a Delta table, as an attempt to commit has loaded it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lake.storage import DeltaLocation
from penstock.tables.delta import stored_files, vectors
from penstock.tables.delta.applied_table import AppliedTable
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.removed_rows import key_bounds
from penstock.tables.delta.statistics import FileStatistics
from penstock.tables.delta.stored_files import StoredFiles
from tests.tables.delta.driver import FIRST, FOLDS, SECOND, Driver


class Reads:
    """The logs that are read, by the name of the table's folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        adds_in_log = stored_files.adds_in_log

        def reading(location: DeltaLocation, version: int, paths: Collection[str]) -> Any:
            self.read.append("t" if location.path.endswith("/t") else "record")
            return adds_in_log(location, version, paths)

        monkeypatch.setattr(stored_files, "adds_in_log", reading)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_an_attempt_reads_each_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scd_type: int
) -> None:
    monkeypatch.setattr(Driver, "by_vectors", True)
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)
    driver, reads = Driver(tmp_path, scd_type), Reads(monkeypatch)
    driver.apply(0, FIRST)
    for number, events in enumerate((SECOND, [("a", 9, 9, 1), ("b", 9, 9, 0)]), 1):
        reads.read.clear()
        driver.apply(number, events)
        assert sorted(reads.read) == ["record", "t"]
    assert driver.rows() == FOLDS[scd_type]([*FIRST, *SECOND, ("a", 9, 9, 1), ("b", 9, 9, 0)])


def test_another_attempt_reads_the_log_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "by_vectors", True)
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)
    one, other = Driver(tmp_path, 1, "one"), Driver(tmp_path, 1, "other")
    one.apply(0, FIRST)
    hooks: list[Callable[[], None]] = [lambda: other.apply(0, SECOND)]
    record = AppliedTable.record

    def recording(applied: AppliedTable, *arguments: Any) -> int:
        if hooks:
            hooks.pop()()
        return record(applied, *arguments)

    monkeypatch.setattr(AppliedTable, "record", recording)
    reads = Reads(monkeypatch)
    last = [("a", 9, 9, 1), ("d", 9, 9, 0)]
    one.apply(1, last)
    assert one.rows() == FOLDS[1]([*FIRST, *SECOND, *last])
    assert reads.read.count("t") == 3, "of this one, of the other one, which commits first, of this one again"


@given(
    files=st.lists(st.lists(st.integers(-50, 50), min_size=1, max_size=4), min_size=1, max_size=12),
    keys=st.sets(st.integers(-60, 60), max_size=40),
    kind=st.sampled_from([pa.int64(), pa.string(), pa.timestamp("us", "UTC")]),
)
def test_no_file_with_a_key_is_left_out(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], keys: set[int], kind: pa.DataType
) -> None:
    found = near(tmp_path_factory.mktemp("t"), files, sorted(keys), kind)
    assert {number for number, rows in enumerate(files) if keys & set(rows)} <= found


def test_files_between_the_keys_are_not_looked_through(tmp_path: Path) -> None:
    """Those of old rows, for example, if new rows and a few of the first ones change."""
    files = [[10 * number, 10 * number + 9] for number in range(20)]
    assert near(tmp_path, files, [1, 2, *range(180, 200)], pa.int64()) == {0, 18, 19}
    assert near(tmp_path / "other", files, [], pa.int64()) == set()


def near(folder: Path, files: list[list[int]], keys: list[int], kind: pa.DataType) -> set[int]:
    """The numbers of the files that may have one of the keys."""
    schema = pa.schema([("k", kind)])

    def column(values: list[int]) -> pa.Table:
        numbers = pa.array(values, pa.int64())
        return pa.table({"k": numbers.cast(kind)}, schema)

    location = DeltaLocation(str(folder))
    table, adds = location.create(schema), []
    for number, rows in enumerate(files):
        statistics = FileStatistics.of(schema, ["k"])
        statistics.add(column(rows).combine_chunks().to_batches()[0])
        adds.append(DataFile(f"{number}.parquet", len(rows), 1, statistics.to_json()).add_action())
    table.create_write_transaction(adds, "append", table.schema())
    found = StoredFiles(location, location.open()).overlapping(schema, key_bounds(column(keys)))
    return {int(file.path.removesuffix(".parquet")) for file in found}
