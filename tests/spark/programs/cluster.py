"""A cluster master with executors of its own; arguments: an embedded store's URL, and another's that may be
used.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import penstock
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


def refused(action: object) -> None:
    began = time.monotonic()
    try:
        action()  # type: ignore[operator]
    except Exception as error:
        print("REFUSED", "one machine's file" in str(error), round(time.monotonic() - began))
    else:
        print("TAKEN")


# Without register only the tasks know the master.
refused(lambda: batch(spark, embedded).collect())
penstock.register(spark)
refused(lambda: batch(spark, embedded))
refused(lambda: run(stream(spark, shared), embedded, "out", folder / "ck1"))
run(stream(spark, shared), shared, "out", folder / "ck2")
print("IDS", sorted(column(batch(spark, shared, "out"))))
spark.stop()
