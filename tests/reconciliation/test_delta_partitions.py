"""Partitioned Delta tables whose values deltalake would change in a repair."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.errors import TableRefusedError
from penstock.reconciliation.delta_copy import DeltaCopy

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def copy_of(folder: Path, rows: pa.Table) -> DeltaCopy:
    write_deltalake(str(folder / "t"), rows, partition_by=["part"])
    return DeltaCopy.of(f"delta://{folder}", "t", rows.schema, ("id",))


@pytest.mark.parametrize(
    ("part", "condition"),
    [
        (pa.array([b"a"]), "TABLE_REFUSED.PARTITIONING"),
        (pa.array([NO_VALUE]), "TABLE_REFUSED.PARTITION_VALUE"),
    ],
)
def test_a_copy_with_values_that_deltalake_changes_is_refused(
    tmp_path: Path, part: pa.Array, condition: str
) -> None:
    with pytest.raises(TableRefusedError) as caught:
        copy_of(tmp_path, pa.table({"id": [1], "part": part}))
    assert caught.value.condition == condition


def test_a_repair_does_not_write_a_text_that_deltalake_takes_for_null(tmp_path: Path) -> None:
    stored = pa.table({"id": [1, 2], "part": ["a", None]})
    copy = copy_of(tmp_path, stored)
    source = pa.table({"id": [1], "part": [NO_VALUE]})
    with pytest.raises(TableRefusedError) as caught:
        copy.repair([(1,)], lambda keys: source)
    assert caught.value.condition == "TABLE_REFUSED.PARTITION_VALUE"
    assert copy.repair([(1,)], lambda keys: source.slice(0, 0)) == 1
    left = pa.table(DeltaTable(str(tmp_path / "t")).scan()).select(["id", "part"])
    assert left.to_pylist() == [{"id": 2, "part": None}]
