"""The change feed of an Iceberg table, as far as it goes without Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from asking import THERE, needs
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


def written_by_the_sink() -> None:
    """A table is filled, then a row is replaced by position, and another one by a copy of the file."""
    spark = penstock.session("smoke", master="local[2]", conf={"spark.ui.enabled": "false"})
    named = "&".join(f"property.{name}={value}" for name, value in properties.items())
    sink = penstock.TableSink("shop.counts", ["id"], f"iceberg:smoke?{named}")
    deletes = []
    for number, (ids, mode) in enumerate(
        [("0, 1000", ""), ("7, 8", "merge-on-read"), ("8, 9", "copy-on-write")]
    ):
        if mode:
            counts = catalog.load_table("shop.counts")
            counts.transaction().set_properties({"write.merge.mode": mode}).commit_transaction()
        folder = str(here / f"rows {number}")
        spark.sql(f"select id, {number} as n from range({ids})").write.parquet(folder)
        stream = spark.readStream.schema("id bigint, n int").parquet(folder)
        query = penstock.stream(spark, stream).write(sink, output_mode="update")
        now = penstock.Trigger.available_now()
        query.start(checkpoint=here / f"checkpoint {number}", trigger=now).awaitTermination()
        files = list(catalog.load_table("shop.counts").scan().plan_files())
        deletes.append(sum(len(file.delete_files) for file in files))
    found = catalog.load_table("shop.counts").scan().to_arrow().sort_by("id")["n"].to_pylist()
    assert found == [{7: 1, 8: 2}.get(number, 0) for number in range(1000)]
    assert deletes == [0, 1, 0], deletes


if "spark" in THERE:
    written_by_the_sink()
