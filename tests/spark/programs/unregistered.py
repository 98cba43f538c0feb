"""A session that nobody has registered anything with, and that logs all it has to say; argument: a store's
URL.

Reads, writes and streams, explains, and fails on purpose; what it prints and logs must not have the URL's
password in it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import penstock
from tests.support.spark_queues import SCHEMA, batch, run, stream, table
from tests.support.sparks import make_spark

url = sys.argv[1]
folder = Path(tempfile.mkdtemp())

with penstock.connect(url) as store:
    store.create_queue("orders", SCHEMA).append(table(range(3)))
    store.create_queue("out", SCHEMA)
    store.consumer("billing") if "billing" in store.consumers() else store.create_consumer("billing")
    store.queue("orders").register("billing")

spark = make_spark(folder, "local[2]")
spark.sparkContext.setLogLevel("INFO")

frame = batch(spark, url, includeMetadataColumns=True)
print("READ", frame.count())
frame.where("id = 1").explain(True)
frame.select("id", "name").write.format("penstock").option("url", url).mode("append").save("out")
query = run(stream(spark, url, consumer="billing"), url, "out", folder / "ck", trigger={"once": True})
query.explain(True)
print("WROTE", batch(spark, url, "out").count(), query.recentProgress)

for wrong in (
    lambda: batch(spark, url, "ordes"),
    lambda: batch(spark, url, consumer="biling").collect(),
    lambda: batch(spark, url.replace("@", "x@", 1)).collect(),
    lambda: run(stream(spark, url, consumer="billing"), url, "out", folder / "ck2", guarantee="often"),
    lambda: run(stream(spark, url).selectExpr("id as idd"), url, "out", folder / "ck3"),
):
    try:
        wrong()
    except Exception as error:
        print("REFUSED", type(error).__name__, error)

statuses = spark._jsparkSession.sharedState().statusStore().executionsList()
for index in range(statuses.size()):
    print("UI", statuses.apply(index).physicalPlanDescription(), statuses.apply(index).description())
spark.stop()
print("DONE")
