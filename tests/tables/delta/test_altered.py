"""Delta tables whose columns another program changes while a query runs: no value is dropped or changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from penstock.errors import SchemaMismatchError, TableRefusedError
from tests.tables.delta.driver import Driver
from tests.tables.delta.row_queries import RowQuery

ROWS = pa.schema([("k", pa.string()), ("v", pa.int64())])
Write = Callable[[int, str, int], None]


def start(folder: Path, kind: str) -> Write:
    """Start a query that writes rows, or applies changes; return what writes a micro-batch with a row."""
    if kind.startswith("changes"):
        driver = Driver(folder, int(kind[-1]))
        driver.by_tasks = "task" in kind
        return lambda batch_id, key, value: driver.apply(batch_id, [(key, value, batch_id + 1, 1)])
    query = RowQuery(folder / "t", ROWS, kind, ["k"] if kind == "update" else [])
    return lambda batch_id, key, value: query.write(batch_id, pa.table([[key], [value]], schema=ROWS))


def replace_columns(path: Path, select: str) -> list[tuple[object, ...]]:
    """Replace the columns of a table, as another engine does; return its rows."""
    rows = pa.table(QueryBuilder().register("t", DeltaTable(str(path))).execute(select).read_all())
    write_deltalake(str(path), rows, mode="overwrite", schema_mode="overwrite")
    return stored(path)


def stored(path: Path) -> list[tuple[object, ...]]:
    return sorted(
        (tuple(row.values()) for row in pa.table(DeltaTable(str(path)).scan()).to_pylist()), key=repr
    )


@pytest.mark.parametrize(
    "kind", ["append", "update", "changes by tasks 1", "changes 1", "changes by tasks 2"]
)
@pytest.mark.parametrize(
    ("columns", "reason"),
    [("* exclude (v)", "it has no column 'v'"), ("* replace (cast(v as int) as v)", "'v' is integer")],
)
def test_a_table_that_does_not_accept_the_rows_any_more_is_refused(
    tmp_path: Path, kind: str, columns: str, reason: str
) -> None:
    write = start(tmp_path, kind)
    write(0, "a", 1)
    before = replace_columns(tmp_path / "t", f"select {columns} from t")
    with pytest.raises(SchemaMismatchError, match=reason) as caught:
        write(1, "b", 2**40)
    assert caught.value.condition == "SCHEMA_MISMATCH.TABLE_DIFFERS"
    assert stored(tmp_path / "t") == before


@pytest.mark.parametrize("kind", ["append", "update", "changes by tasks 1"])
def test_columns_that_are_added_or_moved_do_not_matter(tmp_path: Path, kind: str) -> None:
    write = start(tmp_path, kind)
    write(0, "a", 1)
    replace_columns(tmp_path / "t", "select v, nullif('x', k) as other, k from t")
    write(1, "b", 2)
    assert stored(tmp_path / "t") == [(1, "x", "a"), (2, None, "b")]


@pytest.mark.parametrize("kind", ["append", "update", "complete", "changes by tasks 1"])
def test_a_table_that_is_dropped_is_reported_as_gone(tmp_path: Path, kind: str) -> None:
    write = start(tmp_path, kind)
    write(0, "a", 1)
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(TableRefusedError, match="start the query again") as caught:
        write(1, "b", 2)
    assert caught.value.condition == "TABLE_REFUSED.TABLE_GONE"


def test_a_recreated_table_gets_changes_once_the_query_starts_again(tmp_path: Path) -> None:
    write = start(tmp_path, "changes by tasks 1")
    write(0, "a", 1)
    schema = DeltaTable(str(tmp_path / "t")).schema()
    shutil.rmtree(tmp_path / "t")
    DeltaTable.create(str(tmp_path / "t"), schema)
    with pytest.raises(TableRefusedError, match=r"recreated.*start the query again") as caught:
        write(1, "b", 2)
    assert caught.value.condition == "TABLE_REFUSED.TABLE_GONE"
    start(tmp_path, "changes by tasks 1")(1, "b", 2)
    assert stored(tmp_path / "t") == [("b", 2)]
