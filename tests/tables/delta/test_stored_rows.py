"""Rows of a stored file are found by key, in parts of it, and read by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lake.deletion_vectors import DeletionVector, encode
from penstock.lake.parquet import FileSplit
from penstock.lake.storage import DeltaLocation
from penstock.tables.changes.lookup_keys import LookupKeys
from penstock.tables.delta import stored_rows
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.stored_files import StoredFile
from penstock.tables.delta.stored_rows import StoredRows

ROWS = 40
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string()), ("new", pa.int32())])
PLACES = st.sets(st.integers(0, ROWS - 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of row groups of several sizes; each key is there twice."""
    folder = tmp_path_factory.mktemp("files")
    rows = pa.table({"v": [f"v{n}" for n in range(ROWS)], "k": [n // 2 for n in range(ROWS)]})
    for size in (1, 7, ROWS):
        pq.write_table(rows, folder / f"{size}.parquet", row_group_size=size)
    return folder


def stored(folder: Path, size: int, deleted: set[int]) -> StoredRows:
    positions = np.array(sorted(deleted), np.int64)
    vector = DeletionVector.inline(encode(positions), len(positions))
    add = {"deletionVector": vector.action} if deleted else {}
    return StoredRows(DeltaLocation(str(folder)), StoredFile(f"{size}.parquet", 1, add))


@given(
    size=st.sampled_from([1, 7, ROWS]),
    deleted=PLACES,
    keys=st.sets(st.integers(-2, ROWS // 2 + 2)),
    count=st.integers(1, 9),
)
def test_live_rows_of_keys_are_found_in_one_piece_each(
    folder: Path, size: int, deleted: set[int], keys: set[int], count: int
) -> None:
    wanted = LookupKeys(pa.table({"k": pa.array(sorted(keys), pa.int64())}))
    rows = stored(folder, size, deleted)
    found = [
        (position, *row.values())
        for number in range(count)
        for positions, batch in rows.with_keys(wanted, SCHEMA, FileSplit(number, count))
        for position, row in zip(positions.tolist(), batch.to_pylist(), strict=True)
    ]
    expected = [n for n in range(ROWS) if n // 2 in keys and n not in deleted]
    assert found == [(n, n // 2, f"v{n}", None) for n in expected]
    assert rows.row_count == ROWS


@given(size=st.sampled_from([1, 7, ROWS]), places=PLACES)
def test_rows_are_read_by_position(folder: Path, size: int, places: set[int]) -> None:
    rows = stored(folder, size, set()).at_positions(np.array(sorted(places), np.int64), SCHEMA)
    found = [row for batch in rows for row in batch.to_pylist()]
    assert found == [{"k": n // 2, "v": f"v{n}", "new": None} for n in sorted(places)]


def test_only_row_groups_that_may_have_a_wanted_row_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_row_groups = [], stored_rows.read_row_groups

    def reading(file: pq.ParquetFile, groups: list[int], columns: list[str]) -> Any:
        read.append((groups, columns))
        return read_row_groups(file, groups, columns)

    monkeypatch.setattr(stored_rows, "read_row_groups", reading)
    list(stored(folder, 7, set()).at_positions(np.array([0, 6, 21, 39]), SCHEMA))
    assert read == [([group], SCHEMA.names) for group in (0, 3, 5)]
    read.clear()
    wanted = LookupKeys(pa.table({"k": pa.array([-1, 4, 16, 99], pa.int64())}))
    list(stored(folder, 7, set()).with_keys(wanted, SCHEMA, FileSplit()))
    assert read == [([group], SCHEMA.names) for group in (1, 4)]


def test_a_vector_of_another_file_is_left_to_deltalake(folder: Path) -> None:
    with pytest.raises(UnreadableFile):
        stored(folder, 7, {ROWS}).deleted.tolist()
