"""Keys are looked up in parts of data files, each row in one of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask

from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.lookups import FilePart, LookupTask
from penstock.tables.iceberg.reading import FileSplit
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
    parts = [FilePart(FileScanTask(task.file, task.delete_files), FileSplit(n, count)) for n in range(count)]
    columns = Schema(*table.schema().fields)
    lookup = LookupTask(target, pa.table({"k": pa.array(keys, pa.int64())}), columns, parts)
    found = [row for number in range(count) for row in lookup.find_rows(number).to_pylist()]
    live = [key for key in keys if key < ROWS and key not in (0, 9, 10, 55)]
    assert found == [{"k": key, "v": f"v{key}"} for key in live]
