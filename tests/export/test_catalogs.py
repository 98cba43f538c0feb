"""Exports to Iceberg tables in the catalogs that users have: REST catalogs and AWS Glue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

import penstock
from tests.export.conftest import append
from tests.support.iceberg_catalogs import CATALOGS
from tests.support.spark_queues import one_store


@one_store
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", CATALOGS)
def test_rows_are_exported_once_although_a_reply_is_lost(
    kind: str, store_url: str, queue: penstock.Queue, tmp_path: Path
) -> None:
    with CATALOGS[kind](tmp_path) as catalog:
        append(queue, 1, 2)
        command = [sys.executable, "-m", "penstock", "queue", "export", "orders", catalog.url]
        command += ["--table", "shop.orders", "--url", store_url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == {"queue": "orders", "table": "shop.orders", "rows": 2, "commits": 1}
        assert catalog.secret not in done.stdout + done.stderr
        append(queue, 3)
        catalog.lose_reply()
        export = penstock.QueueExport("orders", store_url, catalog.url, table="shop.orders")
        export.run()
        export.run()
        rows = load_catalog("lake", **catalog.properties).load_table(("shop", "orders")).scan().to_arrow()
        assert sorted(rows["n"].to_pylist()) == [1, 2, 3]
        assert catalog.secret not in f"{export!r}"
