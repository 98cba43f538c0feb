"""The change feed of a Delta table, as far as it goes without Spark."""

from __future__ import annotations

import deltalake
import pyarrow as pa
from asking import needs

import penstock

rows = pa.table({"id": [1, 2, 3], "name": ["ada", "bob", "cyd"]})
deltalake.write_deltalake("table", rows, configuration={"delta.enableChangeDataFeed": "true"})
deltalake.DeltaTable("table").delete("id = 2")
feed = penstock.DeltaFeed("table", "id").open()
description = feed.describe()
assert description.schema.names[:2] == ["id", "name"]
newest = feed.newest(feed.oldest())
assert newest == 1
found = [batch for task in feed.tasks(-1, newest, 1000) for batch in feed.read(task, description.schema)]
assert sum(batch.num_rows for batch in found) == 4, found
needs("spark", lambda: penstock.changes.read)
needs("spark", lambda: penstock.TableSink)
