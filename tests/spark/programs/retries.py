"""Tasks that fail at first, after they have written: `local[2,4]` gives each four attempts; argument: a
store's URL.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

import penstock
from tests.support.spark_queues import SCHEMA, fill, ids_in, run, stream
from tests.support.sparks import make_spark


def fail_at_first(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
    context = TaskContext.get()
    if context is not None and context.attemptNumber() < 2 and context.partitionId() == 1:
        raise ValueError("deliberately")


url = sys.argv[1]
folder = Path(tempfile.mkdtemp())
spark = make_spark(folder, "local[2,4]")
spark.sparkContext.setLogLevel("OFF")
penstock.register(spark)
with penstock.connect(url) as store:
    queue = store.create_queue("orders", SCHEMA, partitions=3)
    for partition in range(3):
        fill(queue, range(partition * 10, partition * 10 + 5), partition=partition)
    for guarantee in ("exactly_once", "idempotent"):
        queue.register(store.create_consumer(guarantee).name)
        out = store.create_queue(guarantee, SCHEMA)
        frame = stream(spark, url, consumer=guarantee).mapInArrow(fail_at_first, "id bigint, name string")
        run(frame, url, guarantee, folder / guarantee, guarantee=guarantee, maxRowsPerWrite=2)
        print(guarantee, sorted(ids_in(out)), store.info().staged_segments)
    out = store.create_queue("batch", SCHEMA)
    frame = (
        spark.range(0, 9, 1, 3)
        .selectExpr("id", "'x' as name")
        .mapInArrow(fail_at_first, "id long, name string")
    )
    frame.write.format("penstock").options(url=url, maxRowsPerWrite=1).mode("append").save("batch")
    print("batch", sorted(ids_in(out)), store.info().staged_segments)
spark.stop()
