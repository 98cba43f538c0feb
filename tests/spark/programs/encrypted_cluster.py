"""A cluster master that encrypts Spark's RPC; arguments: a store's URL, and a folder.

A continuous query runs on it, and a change feed whose tasks ask the driver.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import penstock
from penstock.spark.driver_connection import Connection
from tests.support.change_frames import collected, contract, frame
from tests.support.spark_queues import SCHEMA, batch, column, table
from tests.support.sparks import make_spark

url, folder = sys.argv[1], Path(sys.argv[2])
seen = bytearray()


class Recorded(socket.socket):
    """A connection that records what has come over the wire."""

    def recv(self, *arguments: int) -> bytes:
        found = super().recv(*arguments)
        seen.extend(found)
        return found


def record(connection: Connection, sock: socket.socket) -> None:
    initialize(connection, Recorded(sock.family, sock.type, fileno=sock.detach()))


initialize = Connection.__init__
Connection.__init__ = record  # type: ignore[method-assign]

with penstock.connect(url) as store:
    queue = store.create_queue("orders", SCHEMA, partitions=2)
    queue.append(table(range(3)))
    store.create_queue("out", SCHEMA)

spark = make_spark(
    folder / "spark",
    "local-cluster[1,4,1024]",
    spark__executor__memory="1024m",
    spark__authenticate="true",
    spark__authenticate__secret="of this test",
    spark__network__crypto__enabled="true",
)
spark.sparkContext.setLogLevel("OFF")
spark.conf.set("spark.penstock.url", url)
penstock.register(spark)
query = (
    penstock.stream(spark, penstock.QueueSource("orders"))
    .write(penstock.QueueSink("out"), guarantee="exactly_once")
    .start(checkpoint=str(folder / "ck"), trigger=penstock.Trigger.continuous("100 ms"))
)
query.processAllAvailable()
query.stop()
print("CONTINUOUS", sorted(column(batch(spark, url, "out"))))
print("MESSAGES", len(seen) > 0, b"hello" in seen)

seen.clear()
start = 1_700_000_000_000_000
rows = [(key, "a", 7, kind, 7, start) for key, kind in [(1, "delete"), (2, "insert"), (1, "insert")]]
feed = frame(spark, rows).repartition(2)
done = penstock.changes.post_process(feed, contract("CU", whole_commits=True), compute_updates=True)
print("CHANGES", sorted(key for key, *_ in collected(done)))
print("QUESTIONS", len(seen) > 0)
spark.stop()
