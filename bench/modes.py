"""Check of output modes, compared with Spark's own checker."""

from __future__ import annotations

import time
from statistics import median

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from bench.harness import Result
from bench.spark_session import spark
from penstock.modes.checking.report import MODES
from penstock.spark.internals.query_start import check_output_mode

OPERATORS = 30
_MAX_SECONDS = 0.05
_ROUNDS = 31


def plan() -> DataFrame:
    """Return a query of 30 operators: two streams, a time-range join, windows, projections and filters."""
    session = spark()

    def stream(suffix: str) -> DataFrame:
        rate = session.readStream.format("rate").load()
        frame = rate.select(F.col("timestamp").alias(f"ts{suffix}"), (F.col("value") % 7).alias(f"k{suffix}"))
        frame = frame.withWatermark(f"ts{suffix}", "10 seconds")
        for number in range(4):
            frame = frame.where(F.col(f"k{suffix}") != 100 + number).withColumn(
                f"c{suffix}{number}", F.lit(number)
            )
        return frame

    joined = stream("").join(stream("2"), F.expr("k = k2 and ts between ts2 and ts2 + interval 1 minute"))
    counted = joined.groupBy(F.window("ts", "1 minute"), "k").count()
    return (
        counted.where("count > 0").withColumn("double", F.col("count") * 2).where("double > 1").drop("double")
    )


def check() -> Result:
    """Measure the check of all three modes for a plan of 30 operators, including Spark's checker."""
    frame = plan()
    nodes = len(str(frame._jdf.queryExecution().analyzed().treeString()).splitlines())
    assert nodes >= OPERATORS, nodes
    ours, peers = [], []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        penstock.modes.check(frame, sink="noop")
        middle = time.perf_counter()
        for mode in MODES:
            check_output_mode(frame, mode)
        ours.append(middle - start)
        peers.append(time.perf_counter() - middle)
    our_median, peer_median = median(ours), median(peers)
    note = f"{nodes} operators, first {ours[0] * 1000:.0f} ms; peer is Spark's checker alone"
    bar = f"<= {_MAX_SECONDS * 1000:.0f} ms"
    return Result(
        "check of output modes",
        our_median,
        peer_median,
        peer_median / our_median,
        bar,
        our_median <= _MAX_SECONDS,
        note,
    )
