"""A query on real executors: ``python -m tests.cluster.job URL FOLDER KIND``."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

import penstock as ps
from tests.support.sparks import make_spark

MASTER = "local-cluster[2,1,1024]"


def doubled(rows: DataFrame) -> DataFrame:
    return rows.select("id", (F.col("id") * 2).alias("value"))


def counted(rows: DataFrame) -> DataFrame:
    """Rows of each thousand ids; a group is out when the watermark has passed it."""
    times = rows.withColumn("time", F.timestamp_seconds("id")).withWatermark("time", "0 seconds")
    groups = times.groupBy(F.window("time", "1000 seconds")).agg(F.count("*").alias("value"))
    return groups.select(F.unix_timestamp("window.start").alias("id"), "value")


def main(url: str, folder: Path, kind: str) -> None:
    spark = make_spark(folder / "spark", MASTER, spark__executor__memory="512m")
    print("application", spark.sparkContext.applicationId, flush=True)
    query = (
        ps.stream(
            spark,
            ps.QueueSource(
                "in", consumer="c", url=url, options={"maxRowsPerTrigger": 1000, "rowsPerTask": 500}
            ),
        )
        .transform(counted if kind == "stateful" else doubled)
        .write(ps.QueueSink("out", url=url), guarantee="exactly_once")
        .start(checkpoint=folder / "checkpoint", trigger=ps.Trigger.available_now())
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
