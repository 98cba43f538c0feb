"""``penstock table``: the files of Delta and Iceberg tables."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from tests.support.commands import Penstock


def test_small_files_are_merged(penstock: Penstock, tmp_path: Path) -> None:
    path = tmp_path / "lake/orders"
    for number in range(6):
        write_deltalake(str(path), pa.table({"n": [number]}), mode="append")
    compact = ("table", "compact", "orders", "--url", f"delta://{tmp_path}/lake")
    assert penstock(*compact).out.strip() == "merged 6 files of table 'orders' into 1"
    assert len(DeltaTable(str(path)).file_uris()) == 1
    assert penstock(*compact).out.strip() == "table 'orders' has no files to merge"
    assert penstock(*compact, "--json").json == {"table": "orders", "merged_files": 0, "new_files": 0}


def test_a_table_that_cannot_be_found_is_a_one_line_error(penstock: Penstock, tmp_path: Path) -> None:
    shown = penstock("table", "compact", "orders", "--url", f"delta://{tmp_path}", code=1).err
    assert "TABLE_REFUSED.NOT_FOUND" in shown
    shown = penstock("table", "compact", "orders", code=1).err
    assert "INVALID_URL.UNKNOWN_KIND" in shown
