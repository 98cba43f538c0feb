"""A driver of a standalone cluster; arguments: the master, a store's URL, and a folder that only it sees.

Prints what it has done, and when something is to be killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import penstock
from tests.support.spark_queues import batch, column, stream
from tests.support.sparks import make_spark

ROWS = 40_000
master, url, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def rows(spark: SparkSession, first: int) -> None:
    """Write rows that compress badly, from the executors."""
    made = spark.range(first, first + ROWS, numPartitions=4).selectExpr("id", "sha2(string(id), 512) as name")
    made.write.format("penstock").options(url=url).mode("append").save("in")


def seen(queue: str) -> tuple[int, int]:
    """The rows of a queue, and the different ones."""
    found = column(batch(spark, url, queue))
    return len(found), len(set(found))


def ended(query: StreamingQuery, name: str) -> None:
    query.processAllAvailable()
    query.stop()
    print(name, *seen(name), flush=True)


spark = make_spark(
    folder / "spark",
    master,
    spark__executor__memory="768m",
    spark__executor__cores="2",
    # The paths of the driver's machine are not those of a worker's.
    spark__executor__extraJavaOptions="-XX:TieredStopAtLevel=1",
)
spark.sparkContext.setLogLevel("OFF")
spark.conf.set("spark.penstock.url", url)
penstock.register(spark)

rows(spark, 0)
print("in", *seen("in"), flush=True)

for guarantee in ("exactly_once", "idempotent"):
    copied = stream(spark, url, "in", maxRowsPerTrigger=ROWS // 8).writeStream.format("penstock")
    query = (
        copied.options(url=url, guarantee=guarantee, checkpointLocation=str(folder / guarantee))
        .trigger(availableNow=True)
        .start(guarantee)
    )
    while query.isActive and (query.lastProgress is None or query.lastProgress.batchId < 1):
        time.sleep(0.05)
    print("RUNNING", guarantee, flush=True)
    query.awaitTermination()
    print(guarantee, *seen(guarantee), flush=True)

source = penstock.QueueSource("in", "continuous")
continuous = (
    penstock.stream(spark, source)
    .write(penstock.QueueSink("continuous"), guarantee="exactly_once")
    .start(checkpoint=str(folder / "continuous"), trigger=penstock.Trigger.continuous("500 ms"))
)
rows(spark, ROWS)
ended(continuous, "continuous")
print("compacted", penstock.compact(spark, "exactly_once") > 0, flush=True)
print("after", *seen("exactly_once"), flush=True)
spark.stop()
