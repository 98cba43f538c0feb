"""Deletion vectors: deltalake reads those that Penstock writes, and damaged ones are noticed."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from penstock.lake.deletion_vectors import (
    CorruptDeletionVector,
    DeletionVector,
    decode,
    encode,
    vector_file_content,
)
from tests.tables.delta.vectors import added, create, give_vector, live

ROWS = 200_000
SCHEMA = pa.schema([("a", pa.int64())])
POSITIONS = [
    [0],
    [ROWS - 1],
    [65_535, 65_536, 131_072],
    list(range(0, ROWS, 3)),
    list(range(10, 150_000)),
    list(range(ROWS)),
]


def array(positions: list[int]) -> np.ndarray:
    return np.array(positions, np.int64)


def stored(folder: Path, positions: list[int], subfolder: str) -> DeletionVector:
    data = encode(array(positions))
    vector = DeletionVector.in_file(subfolder, uuid.uuid4(), data, len(positions))
    assert vector.path is not None
    (folder / subfolder).mkdir(exist_ok=True)
    (folder / vector.path).write_bytes(vector_file_content(data))
    return vector


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.sets(st.integers(0, 2**32 - 1)), st.sets(st.integers(0, 5000), min_size=100)))
def test_positions_come_back(positions: set[int]) -> None:
    ordered = sorted(positions)
    data = encode(array(ordered))
    assert decode(data).tolist() == ordered
    inline = DeletionVector.inline(data, len(ordered))
    again = DeletionVector.of(inline.action)
    assert again == inline
    assert again.positions(LocalFileSystem()).tolist() == ordered


@pytest.mark.parametrize("positions", POSITIONS, ids=lambda found: f"{len(found)}-{found[0]}")
@pytest.mark.parametrize("where", ["inline", "file", "subfolder"])
def test_deltalake_reads_what_is_written(tmp_path: Path, positions: list[int], where: str) -> None:
    create(tmp_path, SCHEMA)
    write_deltalake(str(tmp_path), pa.table({"a": range(ROWS)}, SCHEMA), mode="append")
    if where == "inline":
        vector = DeletionVector.inline(encode(array(positions)), len(positions))
    else:
        vector = stored(tmp_path, positions, "_penstock_vectors" if where == "subfolder" else "")
    (add,) = added(tmp_path, 1)
    give_vector(tmp_path, add, vector)
    left = pa.table(DeltaTable(str(tmp_path)).scan())["a"].to_numpy()
    assert np.array_equal(np.sort(left), np.setdiff1d(np.arange(ROWS), positions))
    files = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    assert np.array_equal(vector.positions(files), positions)


def test_vacuum_leaves_vectors_in_the_subfolder(tmp_path: Path) -> None:
    create(tmp_path, SCHEMA)
    write_deltalake(str(tmp_path), pa.table({"a": range(10)}, SCHEMA), mode="append")
    (add,) = added(tmp_path, 1)
    give_vector(tmp_path, add, stored(tmp_path, [1, 2], "_penstock_vectors"))
    table = DeltaTable(str(tmp_path))
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(live(tmp_path)) == 8


@pytest.mark.parametrize("cut", ["end", "middle", "size", "other"])
def test_damaged_vectors_are_refused(tmp_path: Path, cut: str) -> None:
    vector = stored(tmp_path, [1, 2, 70_000], "")
    assert vector.path is not None
    path = tmp_path / vector.path
    data = bytearray(path.read_bytes())
    if cut == "end":
        data = data[:-1]
    elif cut == "middle":
        data[len(data) // 2] ^= 1
    elif cut == "size":
        data[4] ^= 1
    else:
        data = bytearray(vector_file_content(encode(array([1, 2, 70_001]))[:-1] + b"\0"))
        vector = DeletionVector(vector.storage, vector.path_or_inline, vector.size, 4, vector.offset)
    path.write_bytes(data)
    with pytest.raises(CorruptDeletionVector):
        vector.positions(SubTreeFileSystem(str(tmp_path), LocalFileSystem()))


def test_vectors_of_unknown_kinds_are_refused() -> None:
    files = LocalFileSystem()
    with pytest.raises(CorruptDeletionVector, match="'p'"):
        DeletionVector("p", "file:///t/deletion_vector.bin", 10, 1, 1).positions(files)
    with pytest.raises(CorruptDeletionVector, match="portable"):
        decode(b"\x00" * 40)
    with pytest.raises(CorruptDeletionVector, match="text"):
        DeletionVector("i", "~~~~~", 4, 1).positions(files)
    with pytest.raises(CorruptDeletionVector, match="length"):
        DeletionVector("i", "00000", 40, 1).positions(files)
