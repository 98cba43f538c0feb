"""A cluster master with executors of its own; arguments: an embedded store's URL, and another's that may be
used.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

import penstock
from penstock.store.url import parse_url
from tests.support.spark_queues import SCHEMA, batch, column, run, stream, table
from tests.support.sparks import make_spark

embedded, shared = sys.argv[1:]
folder = Path(tempfile.mkdtemp())
for url in (embedded, shared):
    with penstock.connect(url) as store:
        store.create_queue("orders", SCHEMA, partitions=2).append(table(range(3)))
        store.create_queue("out", SCHEMA)

spark = make_spark(folder, "local-cluster[2,1,512]", spark__executor__memory="512m")
spark.sparkContext.setLogLevel("OFF")


def copied(partitions: int) -> None:
    """Copy a queue of so many partitions, each of which is a task."""
    with penstock.connect(shared) as store:
        source = store.create_queue(f"of {partitions}", SCHEMA, partitions=partitions)
        store.create_queue(f"out of {partitions}", SCHEMA)
        for partition in range(partitions):
            source.append(table([partition]), partition=partition)
    rows = stream(spark, shared, f"of {partitions}")
    run(rows, shared, f"out of {partitions}", folder / f"ck {partitions}", guarantee="exactly_once")
    assert sorted(column(batch(spark, shared, f"out of {partitions}"))) == list(range(partitions))


def sessions_while(action: Callable[[], None]) -> int:
    """Return the most sessions that the server had at once meanwhile."""
    found, done = [0], threading.Event()

    def look() -> None:
        with psycopg.connect(parse_url(shared).target, autocommit=True) as connection:
            while not done.wait(0.02):
                query = "select count(*) - 1 from pg_stat_activity where backend_type = 'client backend'"
                found.append(connection.execute(query).fetchone()[0])  # type: ignore[index]

    looking = threading.Thread(target=look)
    looking.start()
    try:
        action()
    finally:
        done.set()
        looking.join()
    return max(found)


def refused(action: object) -> None:
    began = time.monotonic()
    try:
        action()  # type: ignore[operator]
    except Exception as error:
        print("REFUSED", "a file on one machine" in str(error), round(time.monotonic() - began))
    else:
        print("TAKEN")


# Without register only the tasks know the master.
refused(lambda: batch(spark, embedded).collect())
penstock.register(spark)
refused(lambda: batch(spark, embedded))
refused(lambda: run(stream(spark, shared), embedded, "out", folder / "ck1"))
run(stream(spark, shared), shared, "out", folder / "ck2")
print("IDS", sorted(column(batch(spark, shared, "out"))))
# The Python workers are there now, and each has its connection.
for partitions in (2, 64):
    print("SESSIONS", partitions, sessions_while(lambda count=partitions: copied(count)))
spark.stop()
