"""A run with everything that shows or keeps something; arguments: a store's URL with a password, a folder.

A session with an event log at INFO, micro-batch and continuous queries that report to the monitor page, a
failing query, the page and its metrics, and commands. What they print is this program's output; all else is
in the folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

import httpx
import psutil

import penstock
from penstock.ui.server import open_server
from tests.support.commands import run_penstock
from tests.support.exposure import explained
from tests.support.spark_queues import SCHEMA, batch, table

url, folder = sys.argv[1], Path(sys.argv[2])
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
events = folder / "events"
events.mkdir()

with penstock.connect(url) as store:
    store.create_queue("orders", SCHEMA, partitions=2).append(table(range(3)))
    store.create_queue("out", SCHEMA)
    for name in ("batches", "epochs", "failing"):
        store.create_consumer(name).register("orders")

settings = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.dir": events.as_uri(),
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
}
# What is sent to the JVM. Later options of readers are, too, so that Py4J's own log would show them.
py4j = logging.getLogger("py4j")
py4j.setLevel(logging.DEBUG)
spark = penstock.session(url=url, master="local[4]", pipelined=True, conf=settings)
py4j.setLevel(logging.WARNING)
spark.sparkContext.setLogLevel("INFO")

checkpoints = [str(folder / name) for name in ("batches", "epochs", "failing")]
triggers = (penstock.Trigger.available_now(), penstock.Trigger.continuous("100 ms"))
for checkpoint, trigger in zip(checkpoints, triggers, strict=False):
    consumer = Path(checkpoint).name
    # The store is once the session's, and once named.
    source = penstock.QueueSource("orders", consumer, None if consumer == "batches" else url)
    query = penstock.stream(spark, source).write(penstock.QueueSink("out", url=url))
    started = query.start(name=consumer, checkpoint=checkpoint, trigger=trigger)
    started.processAllAvailable()
    print("PROGRESS", started.recentProgress)
    if consumer == "epochs":
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            # This program itself has the URL as its argument.
            with contextlib.suppress(psutil.Error):
                print("PROCESS", *process.cmdline()[: -2 if process.pid == os.getpid() else None])
    started.stop()

try:
    made = penstock.stream(spark, penstock.QueueSource("orders", "failing", url)).transform(
        lambda frame: frame.selectExpr("cast(raise_error(name) as bigint) as id", "name")
    )
    made.write(penstock.QueueSink("out", url=url)).start(
        name="failing", checkpoint=checkpoints[-1], trigger=penstock.Trigger.available_now()
    ).awaitTermination()
except Exception:
    print("FAILED")

read = batch(spark, url).where("id > 0")
print("PLAN", explained(read), read.count(), spark.conf.getAll)
address = str(spark.sparkContext.uiWebUrl)
for page in ("/SQL/", "/environment/", "/jobs/", "/api/v1/applications", "/StreamingQuery/"):
    print("SPARK PAGE", httpx.get(address + page, timeout=60, follow_redirects=True).text)

with open_server(url, checkpoints=checkpoints, port=0) as server:
    threading.Thread(target=server.serve_until_ended, daemon=True).start()
    for path in ("api/snapshot", "metrics", ""):
        print("PAGE", httpx.get(server.address + path, timeout=60).text)
    server.should_exit = True

for words in (
    ("store", "info"),
    ("queue", "list"),
    ("queue", "peek", "orders"),
    ("consumer", "lag"),
    ("query", "list", "--json"),
):
    result = run_penstock(*words, "-vv", "--url", url)
    print("COMMAND", result.out, result.err)
result = run_penstock("queue", "peek", "nothing", "--debug", "--url", url, code=1)
print("COMMAND", result.err)
spark.stop()
