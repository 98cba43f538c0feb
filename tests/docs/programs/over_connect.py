"""What works over Spark Connect, whose server this starts: a line for each capability.

The argument is a folder.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from penstock.ui.snapshots import Collector
from tests.support.waiting import wait_until

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
FOLDER = Path(sys.argv[1])
URL = f"sqlite:///{FOLDER}/shop.db"
SCHEMA = pa.schema([("id", pa.int64()), ("customer", pa.string())])
NOW = penstock.Trigger.available_now()

builder = SparkSession.builder.remote("local[2]")
for key, value in {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
store = penstock.connect(URL)
orders = store.create_queue("orders", SCHEMA, partitions=2, key=["customer"])
orders.append([{"id": number, "customer": "abc"[number % 3]} for number in range(30)])
feed = penstock.QueueFeed.create(
    "feed", SCHEMA, penstock.ChangeContract("id", intermediate_changes=True), store=URL
)
feed.append_commit(
    1, datetime(2026, 1, 1, tzinfo=UTC), [{"id": 1, "customer": "a", "_change_type": "insert"}]
)


def tried(name: str, action: Callable[[], object]) -> None:
    """Print what came of it, or the condition that it was refused with."""
    try:
        found = {"result": action()}
    except Exception as error:
        condition = getattr(error, "condition", None)
        found = {"refused": condition or type(error).__name__, "message": str(error)[:600]}
    print("TRIED", json.dumps({"name": name, **found}), flush=True)


def queue(name: str, schema: pa.Schema = SCHEMA) -> penstock.Queue:
    """A queue to write to, and a consumer of that name."""
    store.create_consumer(name).register("orders")
    return store.create_queue(name, schema)


def stream(consumer: str) -> Any:
    return spark.readStream.format("penstock").options(url=URL, consumer=consumer).load("orders")


def source(consumer: str) -> penstock.QueueSource:
    return penstock.QueueSource("orders", consumer=consumer, url=URL)


def ended(query: Any) -> None:
    query.awaitTermination()


def batch() -> int:
    penstock.register(spark)
    read = spark.read.format("penstock").option("url", URL).load("orders")
    store.create_queue("batch", SCHEMA)
    read.write.format("penstock").option("url", URL).mode("append").save("batch")
    return store.queue("batch").info().rows


def plain_stream(guarantee: str) -> int:
    out = queue(f"plain_{guarantee}")
    writer = (
        stream(out.name)
        .writeStream.format("penstock")
        .options(url=URL, guarantee=guarantee, checkpointLocation=str(FOLDER / out.name))
    )
    ended(writer.trigger(availableNow=True).start(out.name))
    return out.info().rows


def pipeline(name: str, change: Callable[[Any], Any] | None = None, **limit: Any) -> int:
    out = queue(name)
    made = penstock.stream(spark, source(name))
    if change is not None:
        made = made.transform(change)
    if limit:
        made = made.limit(**limit)
    written = made.write(penstock.QueueSink(name, url=URL))
    ended(written.start(name=name, checkpoint=FOLDER / name, trigger=NOW))
    return out.info().rows


def table() -> int:
    store.create_consumer("table").register("orders")
    counted = penstock.stream(spark, source("table")).transform(lambda df: df.groupBy("customer").count())
    sink = penstock.TableSink("counts", keys=["customer"], url=URL)
    ended(counted.write(sink, output_mode="update").start(checkpoint=FOLDER / "table", trigger=NOW))
    import sqlite3

    rows = sqlite3.connect(FOLDER / "shop.db").execute('select sum("count") from counts').fetchone()
    return int(rows[0])


def continuous() -> None:
    made = penstock.stream(spark, source("plain_exactly_once")).write(penstock.QueueSink("batch", url=URL))
    made.start(trigger=penstock.Trigger.continuous("1 second"))


def state() -> int:
    store.create_consumer("state").register("orders")
    counted = stream("state").groupBy("customer").count()
    writer = (
        counted.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(FOLDER / "state"))
    )
    ended(writer.trigger(availableNow=True).start())
    assert penstock.state.show(spark, FOLDER / "state").operators[0].rows == 3
    return penstock.state.read(spark, FOLDER / "state").count()


def own_function() -> int:
    """`penstock.exactly_once`, where the server runs the function."""
    store.create_consumer("own").register("orders")
    database = str(FOLDER / "own.db")

    def write(frame: Any, batch_id: int) -> None:
        import sqlite3

        number = frame.count()
        connection = sqlite3.connect(database)
        with penstock.exactly_once(connection, "own", "app", batch_id) as block:
            connection.execute("create table if not exists seen (n integer)")
            if block.new:
                connection.execute("insert into seen values (?)", (number,))
        connection.close()

    writer = stream("own").writeStream.foreachBatch(write).option("checkpointLocation", str(FOLDER / "own"))
    ended(writer.trigger(availableNow=True).start())
    import sqlite3

    return int(sqlite3.connect(database).execute("select sum(n) from seen").fetchone()[0])


def checked() -> list[bool]:
    report = penstock.modes.check(stream("own").groupBy("customer").count())
    return [report[mode].allowed for mode in ("append", "update", "complete")]


def published() -> list[str]:
    """The queries that the monitor page knows: a pipeline's, and a plain one of a session that publishes."""
    pipeline("silent")
    assert not spark.streams._sqlb._listener_bus, "a program that did not ask for it ends by itself"
    penstock.monitor(spark, url=URL)
    store.create_consumer("plain").register("orders")
    writer = stream("plain").writeStream.format("noop").option("checkpointLocation", str(FOLDER / "plain"))
    ended(writer.trigger(availableNow=True).queryName("plain").start())
    pipeline("told")
    page = Collector(URL)

    def names() -> set[str]:
        return {query["name"] for query in page.collect()["queries"] if query["rows_in"]} & {
            "plain",
            "told",
            "silent",
        }

    wait_until(lambda: len(names()) == 2, 60)
    found = sorted(names())
    page.close()
    return found


def logged() -> bool:
    """Whether the end of a query comes into the log."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(getattr(record, "action", ""))  # type: ignore[method-assign]  # shortest
    logging.getLogger("penstock.progress").addHandler(handler)
    logging.getLogger("penstock.progress").setLevel("DEBUG")
    penstock.log_progress(spark)
    pipeline("logged")
    wait_until(lambda: "terminated" in heard, 30)
    return "progress" in heard


def _first_rows() -> int:
    read = spark.read.format("penstock").option("url", URL).load("orders")
    return penstock.limits.first_rows(read, 2, per=["customer"]).count()


def _processed() -> int:
    rows = penstock.changes.read(spark, feed)
    contract = penstock.ChangeContract("id", carryover_rows=True, updates_as_delete_and_insert=True)
    return penstock.changes.post_process(rows, contract, compute_updates=True).count()


def _raw_changes() -> int:
    out = store.create_queue("raw", SCHEMA)
    changed = penstock.changes.read_stream(spark, feed).select("id", "customer")
    writer = changed.writeStream.format("penstock").options(url=URL, checkpointLocation=str(FOLDER / "raw"))
    ended(writer.trigger(availableNow=True).start("raw"))
    return out.info().rows


def _envelopes() -> list[dict[str, str]]:
    """An insert and an update as Debezium writes them, and something else."""

    def event(op: str, lsn: int, after: dict[str, Any], before: dict[str, Any] | None = None) -> str:
        source = {"connector": "postgresql", "ts_ms": 1767225600000, "lsn": lsn}
        return json.dumps({"before": before, "after": after, "op": op, "source": source})

    ada, eve = {"id": 1, "customer": "ada"}, {"id": 1, "customer": "eve"}
    return [{"value": value} for value in (event("c", 1, ada), event("u", 2, eve, ada), "no event")]


def _debezium(name: str) -> penstock.DebeziumFeed:
    store.create_queue(f"{name}_dead", penstock.changes.DEAD_LETTERS)
    dead = penstock.QueueSink(f"{name}_dead", url=URL)
    return penstock.DebeziumFeed("id bigint not null, customer string", row_id="id", dead_letters=dead)


def _debezium_batch() -> list[int]:
    """Change rows and dead letters."""
    frame = spark.createDataFrame(_envelopes(), "value string")
    rows = _debezium("batch").read(frame, compute_updates=True).count()
    return [rows, store.queue("batch_dead").info().rows]


def _debezium_stream() -> list[int]:
    store.create_queue("topic", pa.schema([("value", pa.string())])).append(_envelopes())
    store.create_consumer("topic").register("topic")
    out = store.create_queue("unwrapped", SCHEMA)
    events = spark.readStream.format("penstock").options(url=URL, consumer="topic").load("topic")
    changed = _debezium("stream").read(events, compute_updates=True).select("id", "customer")
    writer = changed.writeStream.format("penstock").options(url=URL, checkpointLocation=str(FOLDER / "topic"))
    ended(writer.trigger(availableNow=True).start("unwrapped"))
    return [out.info().rows, store.queue("stream_dead").info().rows]


def _between() -> int:
    before = spark.createDataFrame([(1, "a"), (2, "b")], "id bigint, customer string")
    after = before.where(F.col("id") == 1)
    return penstock.changes.diff(before, after, row_id="id").count()


tried("register, batch read and write", batch)
for each in ("exactly_once", "idempotent", "at_least_once"):
    tried(f"stream {each}", lambda each=each: plain_stream(each))
tried("pipeline", lambda: pipeline("pipeline", lambda df: df.where("id < 10")))
tried("publish", published)
tried("log_progress", logged)
tried("pipeline into a table", table)
tried("limit", lambda: pipeline("limited", n=7))
tried("limit for each key", lambda: pipeline("firsts", n=2, per=["customer"]))
tried("first_rows of a batch", _first_rows)
tried("changes.read", lambda: penstock.changes.read(spark, feed).count())
tried("changes.post_process of a batch", _processed)
tried("changes.read_stream without passes", _raw_changes)
tried(
    "changes.read_stream with passes",
    lambda: penstock.changes.read_stream(spark, feed, deduplication_mode="netChanges", net_window="commit"),
)
tried("changes.diff", _between)
tried("DebeziumFeed of a batch", _debezium_batch)
tried("DebeziumFeed of a stream", _debezium_stream)
tried("modes.check", checked)
tried("modes.preview", lambda: penstock.modes.preview(spark, lambda df: df, [[{"id": 1}]]))
tried("continuous", continuous)
tried("state", state)
tried("take", lambda: penstock.take(stream("own"), 1))
tried("sample", lambda: penstock.take_sample(stream("own"), 1))
tried("exactly_once", own_function)
spark.stop()
