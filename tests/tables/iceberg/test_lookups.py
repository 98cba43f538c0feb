"""Keys are looked up in parts of data files, each row in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask

from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.keys import WantedKeys
from penstock.tables.iceberg.lookups import FilePart, LookupTask
from penstock.tables.iceberg.reading import Part
from tests.tables.iceberg.deletes import delete_rows
from tests.tables.iceberg.driver import Driver

ROWS = 100


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """A table of one file, with ten row groups of ten rows, of which some are deleted."""
    driver = Driver(tmp_path)
    driver.write(0, [(number, f"v{number}") for number in range(ROWS)])
    (task,) = driver.table.scan().plan_files()
    path = task.file.file_path.removeprefix("file://")
    rows = pq.read_table(path)
    pq.write_table(rows, path, row_group_size=10)
    delete_rows(driver.table, lambda row: row["k"] in (0, 9, 10, 55))
    return driver


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 13])
@pytest.mark.parametrize("keys", [[5, 9, 10, 11, 55, 56, 99], [1000], list(range(ROWS))])
def test_each_row_is_found_in_one_part(driver: Driver, count: int, keys: list[int]) -> None:
    table = driver.table
    (task,) = table.scan().plan_files()
    target = FileTarget.of("t", table.io, table.metadata, "token")
    parts = [FilePart(FileScanTask(task.file, task.delete_files), Part(n, count)) for n in range(count)]
    columns = Schema(*table.schema().fields)
    lookup = LookupTask(target, pa.table({"k": pa.array(keys, pa.int64())}), columns, parts)
    found = [row for number in range(count) for row in lookup.found(number).to_pylist()]
    live = [key for key in keys if key < ROWS and key not in (0, 9, 10, 55)]
    assert found == [{"k": key, "v": f"v{key}"} for key in live]


NUMBERS = st.lists(st.integers(0, 30), max_size=25)
KINDS = [pa.int32(), pa.int64(), pa.timestamp("us"), pa.timestamp("us", "UTC")]


@given(stored=NUMBERS, keys=st.lists(st.none() | st.integers(0, 30), max_size=8), kind=st.sampled_from(KINDS))
def test_ordered_and_unordered_rows_are_found_alike(
    stored: list[int], keys: list[int | None], kind: pa.DataType
) -> None:
    for values in (stored, sorted(stored), sorted(stored, reverse=True)):
        column = pa.chunked_array([_of(kind, values[:7]), _of(kind, values[7:])])
        found = WantedKeys(pa.table({"other": _of(kind, keys)})).places_in(pa.table({"k": column}))
        assert found.tolist() == [place for place, value in enumerate(values) if value in keys]


def _of(kind: pa.DataType, values: Sequence[int | None]) -> pa.Array:
    return pa.array(values, pa.int64() if pa.types.is_timestamp(kind) else kind).cast(kind)
