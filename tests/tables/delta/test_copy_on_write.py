"""Output mode update by copy on write: which files are copied, of every writer, with keys of every type."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import CommitRefusedError
from penstock.tables.delta.copy_on_write import CopyOnWrite, Replacement
from penstock.tables.delta.data_files import DataFile
from penstock.tables.delta.rows_commit import RowsCommit
from tests.tables.delta.overtaken import SCHEMA, table_of
from tests.tables.delta.row_queries import RowQuery

KEYS = st.tuples(st.integers(0, 6), st.sampled_from(["", "x", "é😀", "y" * 40]))
BATCHES = st.lists(st.dictionaries(KEYS, st.integers(0, 99), min_size=1, max_size=8), min_size=1, max_size=5)


def halves(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    return rows.slice(0, rows.num_rows // 2), rows.slice(rows.num_rows // 2)


@pytest.mark.parametrize("keys", [["a"], ["b"], ["a", "b"]])
def test_a_table_equals_a_fold_of_its_micro_batches(tmp_path: Path, keys: list[str]) -> None:
    numbers = iter(range(1000))

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(batches=BATCHES)
    def check(batches: list[dict[tuple[int, str], int]]) -> None:
        query = RowQuery(tmp_path / str(next(numbers)), SCHEMA, "update", keys)
        folded: dict[Any, tuple[int, str, int]] = {}
        for number, batch in enumerate(batches):
            distinct = {tuple(key["ab".index(k)] for k in keys): (*key, v) for key, v in batch.items()}
            rows = pa.Table.from_pylist(
                [dict(zip("abv", row, strict=True)) for row in distinct.values()], SCHEMA
            )
            folded |= distinct
            query.write(number, *halves(rows))
            query.write(number, *halves(rows))
            assert query.rows() == sorted(folded.values(), key=repr)
            assert query.table().version() == number + 1
        assert len(query.own_files()) == len(query.table().file_uris())

    check()


def test_only_files_with_a_key_of_the_micro_batch_are_replaced(tmp_path: Path) -> None:
    query = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    for number in range(3):
        query.write(number, table_of({(10 * number + n, "x"): 0 for n in (0, 1, 9)}))
    before = set(query.own_files())
    query.write(3, table_of({(15, "y"): 1, (21, "y"): 1}))
    after = set(query.own_files())
    assert len(before - after) == 1, (
        "that with the row 21; the range of the second file has 15, and it has not"
    )
    assert len(after - before) == 2
    assert query.table().to_pyarrow_table().num_rows == 10
    query.write(4, table_of({(key, "z"): 2 for key in (0, 1, 9)}))
    assert len(query.own_files()) == len(after), "all rows of the first file are replaced"


def test_null_keys_of_stored_rows_and_repeated_ones_are_kept_or_replaced_together(tmp_path: Path) -> None:
    write_deltalake(
        str(tmp_path), pa.table({"a": [None, 1, 1, 2], "b": ["n", "p", "q", "r"], "v": [0] * 4}, SCHEMA)
    )
    query = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    query.write(0, table_of({(1, "new"): 5}))
    assert query.rows() == [(1, "new", 5), (2, "r", 0), (None, "n", 0)]


@pytest.mark.parametrize("mode", ["append", "complete"])
def test_another_run_of_a_query_adds_nothing_in_any_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    one, other = (RowQuery(tmp_path, SCHEMA, mode) for _ in range(2))
    calls, commit = [lambda: other.write(0, rows)], RowsCommit.__call__
    rows = table_of({(1, "x"): 0})

    def committing(self: RowsCommit, *arguments: Any) -> None:
        if calls:
            calls.pop()()
        commit(self, *arguments)

    monkeypatch.setattr(RowsCommit, "__call__", committing)
    one.write(0, rows)
    assert one.rows() == [(1, "x", 0)]
    assert one.table().version() == 1


def test_complete_mode_also_replaces_what_is_appended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, late = RowQuery(tmp_path, SCHEMA, "complete"), table_of({(2, "late"): 1})
    calls, open_table = [lambda: write_deltalake(str(tmp_path), late, mode="append")], RowsCommit.__call__

    def committing(self: RowsCommit, *arguments: Any) -> None:
        if calls:
            calls.pop()()
        open_table(self, *arguments)

    monkeypatch.setattr(RowsCommit, "__call__", committing)
    query.write(0, table_of({(1, "x"): 0}))
    assert query.rows() == [(1, "x", 0)]


TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "date": (pa.date32(), list(range(0, 3000, 1000))),
    "timestamp": (pa.timestamp("us", "UTC"), [123_456, 123_999, 124_000]),
    "timestamp_ntz": (pa.timestamp("us"), [123_456, 123_999, 124_000]),
    "decimal": (pa.decimal128(38, 10), [Decimal("1.0000000001"), Decimal("1.0000000002"), Decimal(10) ** 27]),
    "text": (pa.string(), ["é" * 40, "é" * 40 + "\U0010ffff", "z"]),
    "binary": (pa.binary(), [b"", b"\xff", b"\x00"]),
    "boolean": (pa.bool_(), [True, False]),
    "tinyint": (pa.int8(), [-128, 0, 127]),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("writer", ["deltalake", "penstock"])
def test_keys_of_every_type_are_found_in_files_of_every_writer(
    tmp_path: Path, name: str, writer: str
) -> None:
    kind, keys = TYPES[name]
    schema = pa.schema([("k", kind), ("v", pa.int64())])
    query = RowQuery(tmp_path, schema, "update", ["k"])
    for number, key in enumerate(keys):
        rows = pa.table({"k": pa.array([key], kind), "v": [0]}, schema)
        if writer == "penstock":
            query.write(number, rows)
        else:
            write_deltalake(str(tmp_path), rows, mode="append")
    for number, key in enumerate(keys):
        query.write(10 + number, pa.table({"k": pa.array([key], kind), "v": [1]}, schema))
        assert query.table().to_pyarrow_table()["v"].to_pylist().count(1) == number + 1
    assert len(query.rows()) == len(keys)


def test_files_with_escaped_paths_are_left_to_deltalake(tmp_path: Path) -> None:
    query = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    query.write(0, table_of({(1, "x"): 0}))
    path, table = tmp_path / "with space.parquet", query.table()
    pq.write_table(table_of({(1, "y"): 0, (2, "y"): 0}), path)
    foreign = DataFile(path.name, 2, path.stat().st_size, '{"numRecords":2}').add_action()
    table.create_write_transaction([foreign], "append", table.schema())
    query.write(1, table_of({(2, "new"): 5}))
    assert query.rows() == [(1, "x", 0), (1, "y", 0), (2, "new", 5)]


def test_files_with_columns_of_other_types_are_left_to_deltalake(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    query = RowQuery(tmp_path, schema, "update", ["a"])
    path, table = tmp_path / "other.parquet", query.table()
    pq.write_table(pa.table({"a": [1, 2], "at": pa.array([0, 0], pa.timestamp("us"))}), path)
    foreign = DataFile(path.name, 2, path.stat().st_size, '{"numRecords":2}').add_action()
    table.create_write_transaction([foreign], "append", table.schema())
    query.write(0, pa.table({"a": [2], "at": [5]}, schema))
    assert sorted(query.table().to_pyarrow_table()["a"].to_pylist()) == [1, 2]
    assert query.own_files() == []


def test_old_columns_are_read_as_null(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), pa.table({"a": [1, 2], "b": ["x", "y"]}))
    added = pa.table({"a": [3], "b": ["z"], "v": [3]})
    write_deltalake(str(tmp_path), added, mode="append", schema_mode="merge")
    query = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    query.write(0, table_of({(2, "new"): 5}))
    assert query.rows() == [(1, "x", None), (2, "new", 5), (3, "z", 3)]
    assert len(query.own_files()) == 2


def test_bounds_are_unknown_where_a_file_has_none(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("v", pa.float64())])
    query = RowQuery(tmp_path, schema, "update", ["a"])
    query.write(0, pa.table({"a": [1, 2], "v": [math.nan, 1.0]}, schema))
    query.write(1, pa.table({"a": [2, 3], "v": [2.0, math.inf]}, schema))
    assert [row for row in query.rows() if row[0] != 1] == [(2, 2.0), (3, math.inf)]
    assert len(query.rows()) == 3


def test_commits_of_files_write_checkpoints(tmp_path: Path) -> None:
    properties = {"delta.checkpointInterval": "3"}
    DeltaTable.create(str(tmp_path), Schema.from_arrow(SCHEMA), configuration=properties)
    query = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    for number in range(7):
        query.write(number, table_of({(number, "x"): number, (number + 1, "y"): number}))
    assert (tmp_path / "_delta_log/_last_checkpoint").exists()
    assert query.rows() == [*((n, "x", n) for n in range(7)), (7, "y", 6)]
    assert len(query.table().file_uris(file_pruning_predicate="a >= 6")) == 1


def test_a_driver_that_wakes_after_a_vacuum_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VACUUM has deleted the files that it wrote before it was suspended."""
    query = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    query.write(0, table_of({(1, "x"): 0}))
    stage, files = query.stage(1, table_of({(1, "y"): 1}))
    stage.delete_uncommitted(files)
    monkeypatch.setattr("penstock.tables.delta.stage.time.time", lambda: stage.started_at + 8 * 86_400)
    files_of_keys = CopyOnWrite.replacement
    monkeypatch.setattr(CopyOnWrite, "replacement", lambda *_: Replacement())
    with pytest.raises(CommitRefusedError, match="STAGED_FILES_MISSING"):
        query.commit(stage, files)
    monkeypatch.setattr(CopyOnWrite, "replacement", files_of_keys)
    query.write(1, table_of({(1, "z"): 1}))
    assert query.rows() == [(1, "z", 1)]
