"""Queues, without any extra."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

began = time.process_time()
import penstock  # noqa: E402 - it is timed

took = time.process_time() - began
assert took < 0.25, f"importing penstock took {took:.3f} s"
assert "pyarrow" not in sys.modules

import pyarrow as pa  # noqa: E402
from asking import THERE, command_needs, needs  # noqa: E402

URL = "sqlite:///plain.db"
store = penstock.connect(URL)
orders = store.create_queue(
    "orders", pa.schema([("id", pa.int64()), ("name", pa.string())]), key=["id"], partitions=2
)
assert orders.append([{"id": number, "name": "ada"} for number in range(100)]).rows == 100
billing = store.create_consumer("billing")
billing.register("orders", vital=True)
for partition in range(orders.partitions):
    pull = billing.pull("orders", partition)
    billing.advance("orders", partition, old=pull.start, new=pull.end)
assert billing.lag("orders").rows == 0
producer = store.producer("orders", "web")
producer.append([{"id": 1, "name": "bob"}], sequence=1)
producer.append([{"id": 1, "name": "bob"}], sequence=1)
assert producer.skipped == 1
assert orders.read(0, 0).num_rows + orders.read(1, 0).num_rows == 101
small = store.create_queue("small", pa.schema([("id", pa.int64())]))
for number in range(70):
    small.append([{"id": number}])
small.compact()
assert small.info().partitions[0].segments < 70
assert small.read(0, 0)["id"].to_pylist() == list(range(70))
folder = store.create_queue("folder", pa.schema([("text", pa.string())]), payloads="payloads")
folder.append([{"text": os.urandom(1 << 17).hex()}])
assert len(list(Path("payloads").glob("**/*.segments"))) == 1
assert len(folder.read(0, 0)["text"][0].as_py()) == 1 << 18
feed = penstock.QueueFeed.create(
    "feed", pa.schema([("id", pa.int64())]), penstock.ChangeContract("id"), store=URL, partitions=3
)
for version, change_type in enumerate(["insert", "delete"]):
    changes = [{"id": number, "_change_type": change_type} for number in range(100)]
    feed.append_commit(version, datetime.now(UTC), changes)
assert feed.newest(-1) == 1
assert [commit.rows for commit in feed.open().commits(-1, 1)] == [100, 100]
parts = [store.queue("feed").read(partition, 0) for partition in range(3)]
assert all(part.num_rows for part in parts)
assert pa.concat_tables(parts)["_commit_version"].to_pylist().count(1) == 100
store.maintain()
store.close()

heavy = {"numpy", "pandas", "psycopg", "py4j", "pyspark", "rich", "typer", "deltalake", "pyiceberg"}
loaded = heavy & set(sys.modules)
# pyarrow takes these along where they are there.
assert loaded <= {"numpy", "pandas"}, loaded
needs("postgres", lambda: penstock.connect("postgresql://nobody@127.0.0.1:1/none"))
needs("delta", lambda: penstock.DeltaFeed("/nowhere", "id").open().describe())
needs("iceberg", lambda: penstock.IcebergFeed("a.b").open().describe())
needs("objects", lambda: penstock.connect(URL).create_queue("bucket", orders.schema, payloads="s3://b/rows"))
needs("spark", lambda: penstock.session)
needs("spark", lambda: penstock.stream)
needs("spark", lambda: penstock.changes.read)
needs("spark", lambda: penstock.modes.check)
if "cli" not in THERE:
    command_needs("cli", "queue", "list")
