"""The change feed of an Iceberg table, as far as it goes without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from asking import needs
from pyiceberg.catalog import load_catalog

import penstock

here = Path.cwd()
properties = {"type": "sql", "uri": f"sqlite:///{here}/catalog.db", "warehouse": f"file://{here}/warehouse"}
catalog = load_catalog("smoke", **properties)
catalog.create_namespace("shop")
rows = pa.table({"id": [1, 2, 3], "name": ["ada", "bob", "cyd"]})
table = catalog.create_table("shop.orders", rows.schema)
table.append(rows)
table.append(rows)
feed = penstock.IcebergFeed("shop.orders", "smoke", properties, row_id="id").open()
description = feed.describe()
assert description.schema.names[:2] == ["id", "name"]
oldest = feed.oldest()
newest = feed.newest(oldest)
assert [commit.rows for commit in feed.commits(oldest, newest)] == [3, 3]
tasks = feed.tasks(oldest, newest, 1000)
assert sum(batch.num_rows for task in tasks for batch in feed.read(task, description.schema)) == 6
needs("spark", lambda: penstock.changes.read)
