"""A day of triggers of a second leaves few files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import penstock

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())])
MINUTES, TRIGGERS, ROWS = 1440, 60, 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_day_of_small_commits_leaves_few_files(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db?synchronous=normal"
    with penstock.connect(url) as store:
        queue = store.create_queue("orders", SCHEMA)
        export = penstock.QueueExport("orders", url, f"delta://{tmp_path}")
        most = n = 0
        for _ in range(MINUTES):
            for _ in range(TRIGGERS):
                queue.append(pa.table({"n": range(n, n + ROWS), "s": [f"row {n}"] * ROWS}, schema=SCHEMA))
                n += ROWS
            export.run()
            most = max(most, len(DeltaTable(f"{tmp_path}/orders").file_uris()))
    table = DeltaTable(f"{tmp_path}/orders").to_pyarrow_table()
    assert sorted(table["n"].to_pylist()) == list(range(n))
    print(f"{MINUTES * TRIGGERS:,} triggers, {n:,} rows, at most {most} files")
    assert most <= 200
