"""The demo's streaming job: a process of its own, so that it can be killed in the middle.

``python -m penstock.demo.job URL CHECKPOINTS`` reads the change feed from its queue with two queries, exactly once: one
transforms every change row, the other aggregates the delays of arrivals by carrier and hour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

import penstock as ps
from penstock.demo.tables import CHANGES, DELAYS, ROWS, ROWS_PER_TRIGGER
from penstock.pipeline.query import Query


def transformed(changes: DataFrame) -> DataFrame:
    """Every change row: what it says about which flight, and whether it only carries the flight over."""
    carried = F.col("row_version") != F.col("_commit_version")
    return changes.select(
        "flight_id",
        "carrier",
        "status",
        "_change_type",
        "_commit_version",
        (carried & (F.col("_change_type") == "insert")).alias("carried_over"),
        (F.col("arr_delay") - F.col("dep_delay")).alias("gained_minutes"),
    )


def delays(changes: DataFrame) -> DataFrame:
    """Arrivals and their delay by carrier and hour; an hour is out when the feed has gone past it."""
    new = (F.col("_change_type") == "insert") & (F.col("row_version") == F.col("_commit_version"))
    return (
        changes.where(new & (F.col("status") == "arrived"))
        .withWatermark("_commit_timestamp", "0 seconds")
        .groupBy(F.window("_commit_timestamp", "1 hour"), "carrier")
        .agg(F.count("*").alias("arrivals"), F.sum("arr_delay").alias("delay_minutes"))
        .select(F.col("window.start").alias("hour"), "carrier", "arrivals", "delay_minutes")
    )


def main(url: str, checkpoints: Path) -> None:
    """Run both queries over all that is in the queue."""
    spark = ps.session(
        "penstock demo",
        master="local[2]",
        url=url,
        stateful=True,
        memory="2g",
        conf={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": "2",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    rows = _start(spark, "rows", transformed, ROWS, checkpoints)
    totals = _start(spark, "delays", delays, DELAYS, checkpoints)
    for query in (rows, totals):
        query.awaitTermination()
    spark.stop()


def _start(
    spark: SparkSession, name: str, transform: Callable[[DataFrame], DataFrame], sink: str, checkpoints: Path
) -> Query:
    limit = {"maxRowsPerTrigger": ROWS_PER_TRIGGER, "alignToAppends": True}
    return (
        ps.stream(spark, ps.QueueSource(CHANGES, consumer=name, options=limit))
        .transform(transform)
        .write(ps.QueueSink(sink), guarantee="exactly_once")
        .start(name=name, checkpoint=checkpoints / name, trigger=ps.Trigger.available_now())
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
