"""The data source, pipelines, change feeds, modes, limits, state and looks, on SQLite."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pyarrow as pa
from asking import needs

import penstock
from penstock.spark.driver_certificate import driver_tls

logging.basicConfig()
URL = "sqlite:///spark.db"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
store = penstock.connect(URL)
orders = store.create_queue("orders", pa.schema([("id", pa.int64()), ("amount", pa.float64())]), partitions=2)
orders.append([{"id": number, "amount": float(number)} for number in range(100)])
store.create_queue("large", orders.schema)
store.create_consumer("large").register("orders")

spark = penstock.session(
    "smoke",
    master="local[2]",
    url=URL,
    stateful=True,
    conf={
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        # A busy machine takes its time to start Python.
        "spark.python.authenticate.socketTimeout": "5m",
    },
)
penstock.log_progress(spark)
assert spark.read.format("penstock").load("orders").where("amount >= 50").count() == 50

NOW = penstock.Trigger.available_now()
source = penstock.QueueSource("orders", consumer="large")
query = (
    penstock.stream(spark, source)
    .transform(lambda df: df.where("amount >= 50"))
    .write(penstock.QueueSink("large"))
)
started = query.start(name="large", checkpoint="checkpoints/large", trigger=NOW)
assert started.awaitTermination() is None
assert store.queue("large").info().rows == 50

counts = penstock.stream(spark, penstock.QueueSource("orders")).transform(
    lambda df: df.groupBy("amount").count()
)
sink = penstock.TableSink("totals", keys=["amount"])
counts.write(sink, output_mode="update").start(
    checkpoint="checkpoints/totals", trigger=NOW
).awaitTermination()
state = penstock.state.show(spark, "checkpoints/totals")
assert state.operators[0].rows == 100
assert penstock.state.read(spark, "checkpoints/totals").count() == 100

frame = spark.readStream.format("penstock").load("orders")
assert len(penstock.take(frame, 5)) == 5
assert len(penstock.take(frame.dropDuplicates(["id"]), 3, timeout=None)) == 3
assert len(penstock.take_sample(frame, 5)) == 5
report = penstock.modes.check(frame.groupBy("id").count())
assert not report["append"].allowed
assert report["complete"].allowed
schema = "id bigint, amount double"
assert "append" in str(
    penstock.modes.preview(spark, lambda df: df.where("id > 1"), [[(1, 1.0)], [(2, 2.0)]], schema=schema)
)

store.create_queue("each", orders.schema)
keyed = (
    penstock.stream(spark, penstock.QueueSource("orders"))
    .limit(1, per=["id"])
    .write(penstock.QueueSink("each"))
)
keyed.start(checkpoint="checkpoints/each", trigger=NOW).awaitTermination()
assert store.queue("each").info().rows == 100
first = penstock.stream(spark, penstock.QueueSource("orders")).limit(10).write(penstock.QueueSink("each"))
first.start(checkpoint="checkpoints/first", trigger=NOW).awaitTermination()
assert store.queue("each").info().rows == 110

contract = penstock.ChangeContract("id", intermediate_changes=True, updates_as_delete_and_insert=True)
feed = penstock.QueueFeed.create(
    "feed", pa.schema([("id", pa.int64()), ("name", pa.string())]), contract, store=URL
)
feed.append_commit(1, NOON, [{"id": 1, "name": "ada", "_change_type": "insert"}])
feed.append_commit(
    2,
    NOON,
    [{"id": 1, "name": "ada", "_change_type": "delete"}, {"id": 1, "name": "eve", "_change_type": "insert"}],
)
found = penstock.changes.read(spark, feed, starting_version=2, compute_updates=True).collect()
assert sorted(row._change_type for row in found) == ["update_postimage", "update_preimage"]
net = penstock.changes.read(spark, feed, deduplication_mode="netChanges", compute_updates=True).toPandas()
assert list(net["name"]) == ["eve"]

store.create_queue("quick", orders.schema)
store.create_consumer("quick").register("orders")
quick = penstock.stream(spark, penstock.QueueSource("orders", consumer="quick")).write(
    penstock.QueueSink("quick")
)
running = quick.start(checkpoint="checkpoints/quick", trigger=penstock.Trigger.continuous("200 ms"))
running.processAllAvailable()
running.stop()
assert store.queue("quick").info().rows == 100

needs("postgres", lambda: penstock.connect("postgresql://nobody@127.0.0.1:1/none"))
needs(
    "postgres", lambda: penstock.PostgresFeed("postgresql://nobody@127.0.0.1:1/none", "p").open().describe()
)
needs("delta", lambda: penstock.DeltaFeed("/nowhere", "id").open().describe())
needs("delta", lambda: penstock.stream(spark, penstock.DeltaFeed("/nowhere", "id")).to_df())
needs("encryption", driver_tls)
needs("iceberg", lambda: penstock.changes.read(spark, "iceberg:a.b"))
spark.stop()
store.close()
