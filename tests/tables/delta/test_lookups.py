"""Tasks look for stored rows in parts of files, and the rows of a file are then in its order."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from penstock.lake.storage import DeltaLocation
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta import lookups
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.lookups import POSITION, Lookup
from penstock.tables.delta.removed_positions import removals_with_keys, removals_with_new_valid_to
from penstock.tables.delta.schema import DeltaLayout
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import StoredFiles
from tests.tables.delta.row_queries import LocalSpark

SCHEMA = pa.schema([("k", pa.int64()), (VALID_FROM, pa.int64()), (VALID_TO, pa.int64())])
ROWS = 60


@pytest.fixture
def location(tmp_path: Path) -> DeltaLocation:
    """A table of two files with many row groups; each has all keys, and other versions of them."""
    location = DeltaLocation(str(tmp_path))
    table = location.create(SCHEMA)
    adds = []
    for number in range(2):
        path = tmp_path / f"{number}.parquet"
        keys = np.random.default_rng(number).permutation(ROWS)
        rows = pa.table([keys, np.full(ROWS, number), pa.nulls(ROWS, pa.int64())], schema=SCHEMA)
        pq.write_table(rows, path, row_group_size=3)
        adds.append(DataFile(path.name, ROWS, path.stat().st_size, "{}").add_action())
    table.create_write_transaction(adds, "append", table.schema())
    return location


@pytest.fixture
def lookup(location: DeltaLocation, monkeypatch: pytest.MonkeyPatch) -> Lookup:
    """It is done by tasks, in many parts."""
    monkeypatch.setattr(lookups, "_DRIVER_BYTES", -1)
    monkeypatch.setattr(lookups, "_SPLIT_BYTES", 256)
    stage = DeltaStage(location, DeltaLayout(SCHEMA, ("k",)), "app", 0)
    keys = pa.table({"k": [*range(0, ROWS, 2), ROWS + 1]})
    return Lookup(cast(SparkSession, LocalSpark()), stage, keys, SCHEMA)


def test_rows_are_found_in_the_order_of_their_file(location: DeltaLocation, lookup: Lookup) -> None:
    found = lookup.rows_by_file(StoredFiles(location, location.open()))
    assert len(found) == 2
    for file, rows in found:
        stored = pq.read_table(Path(location.path) / file.path)
        expected = [n for n, key in enumerate(stored["k"].to_pylist()) if key % 2 == 0]
        assert rows[POSITION].to_pylist() == expected
        assert rows.select(SCHEMA.names).equals(stored.take(expected).cast(SCHEMA))


def test_positions_of_rows_that_leave(location: DeltaLocation, lookup: Lookup) -> None:
    found = lookup.rows_by_file(StoredFiles(location, location.open()))
    leaving = removals_with_keys(found, pa.table({"k": [4, 8, 1]}))
    for file in leaving.stored_files:
        stored = pq.read_table(Path(location.path) / file.path)["k"].to_pylist()
        assert leaving.removals[file.identity].positions.tolist() == sorted(map(stored.index, (4, 8)))
    changed = pa.table([[4, 8, 8, 10], [1, 1, 7, 0], [5, 6, 7, 8]], schema=SCHEMA)
    ended = removals_with_new_valid_to(found, changed)
    by_version = {}
    for file in ended.stored_files:
        rows = pq.read_table(Path(location.path) / file.path)
        each = ended.removals[file.identity]
        assert each.new_values is not None
        assert each.positions.tolist() == sorted(each.positions.tolist())
        for position, row in zip(each.positions.tolist(), each.new_values.to_pylist(), strict=True):
            key, begun, _ = rows.slice(position, 1).to_pylist()[0].values()
            assert (row["k"], row[VALID_FROM]) == (key, begun)
            by_version[key, begun] = row[VALID_TO]
    assert by_version == {(4, 1): 5, (8, 1): 6, (10, 0): 8}
    assert removals_with_new_valid_to(found, changed.slice(0, 0)).stored_files == []
