"""The streaming job, a process of its own so that the demo can kill it.

Usage: ``python -m examples.flights.streaming_job URL CHECKPOINTS``

1. Two queries read the change feed exactly once: one writes the changes to the board, the other aggregates
   the delays of
   arrivals by carrier and hour. A third takes the first cancelled flights from the board as it fills, and
   stops by its limit.
2. Two SQL tables are maintained: the current flights, by the changes on the board, and each carrier's totals
   in update mode.
3. A batch computes the net changes of the last day, and a preview shows the output modes.
4. The delay alerts run through both triggers, to measure their latency.

Spark starts at once, the queries when a line arrives on standard input. The job can be killed at any point
and started again: each part resumes where it stopped, or starts over if it has no effect until it is
complete."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import penstock
from examples.flights.alerts import measure, without_fsync
from examples.flights.job_process import BEGIN, report_progress
from examples.flights.tables import (
    BOARD,
    CANCELLED,
    CANCELLED_LIMIT,
    CANCELLED_ROWS_PER_TRIGGER,
    CONSUMER,
    CURRENT,
    DAY,
    DELAYS,
    FLIGHTS,
    LAST_DAY_HOURS,
    PREVIEW,
    ROWS_PER_TASK,
    ROWS_PER_TRIGGER,
    TOTALS,
)


def board(changes: DataFrame) -> DataFrame:
    """Select the columns of the board."""
    gained = (F.col("arr_delay") - F.col("dep_delay")).alias("gained_minutes")
    return changes.select("flight_id", "carrier", "status", "_change_type", "_commit_version", gained)


def delays(changes: DataFrame) -> DataFrame:
    """Aggregate arrivals and their delay by carrier and hour, once the watermark has passed the hour."""
    new_version = (F.col("_change_type") == "insert") & (F.col("row_version") == F.col("_commit_version"))
    return (
        changes.where(new_version & (F.col("status") == "arrived"))
        .withWatermark("_commit_timestamp", "0 seconds")
        .groupBy(F.window("_commit_timestamp", "1 hour"), "carrier")
        .agg(F.count("*").alias("arrivals"), F.sum("arr_delay").alias("delay_minutes"))
        .select(F.col("window.start").alias("hour"), "carrier", "arrivals", "delay_minutes")
    )


def current(board: DataFrame) -> DataFrame:
    """Select the changes to apply to the table of current flights."""
    return board.select("flight_id", "carrier", "status", "gained_minutes", "_change_type", "_commit_version")


def cancelled(board: DataFrame) -> DataFrame:
    """Select the flights that were deleted from the board."""
    return board.where("_change_type = 'delete'").select("flight_id", "carrier", "_commit_version")


def totals(hours: DataFrame) -> DataFrame:
    """Sum each carrier's arrivals and delays over all hours."""
    sums = [F.sum(name).alias(name) for name in ("arrivals", "delay_minutes")]
    return hours.groupBy("carrier").agg(*sums)


def main(url: str, checkpoints: Path) -> None:
    """Run all parts of the job, those that an earlier process has finished excepted."""
    spark = penstock.session(
        "penstock demo",
        master="local[2]",
        url=url,
        stateful=True,
        memory="2g",
        conf={
            # In a program of a minute or two the optimizing compiler costs more than it saves.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": "2",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    feed = penstock.QueueFeed(FLIGHTS, url)
    options = {"maxRowsPerTrigger": ROWS_PER_TRIGGER, "rowsPerTask": ROWS_PER_TASK}
    changes = penstock.changes.read_stream(
        spark,
        feed,
        compute_updates=True,
        columns=["flight_id", "carrier", "status", "dep_delay", "arr_delay"],
        options=options,
    )
    raw_changes = penstock.changes.read_stream(
        spark,
        feed,
        deduplication_mode="none",
        columns=["carrier", "status", "arr_delay", "row_version"],
        options=options,
    )
    if sys.stdin.readline() != BEGIN:
        return
    threading.Thread(target=_exit_with_the_demo, daemon=True).start()
    first_cancelled = _start_cancelled(spark, checkpoints)
    _finish(
        _start(spark, "board", board(changes), BOARD, checkpoints),
        _start(spark, "delays", delays(raw_changes), DELAYS, checkpoints),
    )
    # A short feed may have fewer cancelled flights than the limit; the query would wait for more.
    first_cancelled.processAllAvailable()
    first_cancelled.stop()
    report_progress("All changes are on the board and in the aggregate; updating two SQL tables from them")
    _finish(*_start_tables(spark, checkpoints))
    report_progress("Computing the net changes of the last day, and previewing the output modes")
    _write_last_day(spark, feed, url)
    _preview_modes(spark, checkpoints.parent)
    report_progress("Measuring delay alerts through both triggers with two guarantees each: about a minute")
    measure(spark, without_fsync(url), checkpoints.parent, checkpoints)
    spark.stop()


def _exit_with_the_demo() -> None:
    """Kill this process group when the demo ends, before the demo's next run resumes the queries."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _finish(*queries: penstock.Query) -> None:
    for query in queries:
        query.awaitTermination()


def _start_cancelled(spark: SparkSession, checkpoints: Path) -> penstock.Query:
    source = penstock.QueueSource(
        BOARD, consumer=CANCELLED, options={"maxRowsPerTrigger": CANCELLED_ROWS_PER_TRIGGER}
    )
    return (
        penstock.stream(spark, source)
        .transform(cancelled)
        .limit(CANCELLED_LIMIT)
        .write(penstock.QueueSink(CANCELLED))
        .start(name=CANCELLED, checkpoint=checkpoints / CANCELLED)
    )


def _start_tables(spark: SparkSession, checkpoints: Path) -> list[penstock.Query]:
    flights = penstock.stream(spark, penstock.QueueSource(BOARD, consumer=CONSUMER)).transform(current)
    carriers = penstock.stream(spark, penstock.QueueSource(DELAYS, consumer=CONSUMER)).transform(totals)
    pipelines = {
        CURRENT: flights.write(penstock.TableSink(CURRENT, keys=["flight_id"], apply_changes=True)),
        TOTALS: carriers.write(penstock.TableSink(TOTALS, keys=["carrier"]), output_mode="update"),
    }
    trigger = penstock.Trigger.available_now()
    return [
        pipeline.start(name=name, checkpoint=checkpoints / name, trigger=trigger)
        for name, pipeline in pipelines.items()
    ]


def _preview_modes(spark: SparkSession, folder: Path) -> None:
    """Write a preview of the delays in each output mode, from the arrivals of three hours."""
    hours = [
        [
            ("arrived", "insert", "AA", hour, 5.0 * hour, hour, datetime(2013, 1, 1, hour, 10, tzinfo=UTC)),
            ("arrived", "insert", "UA", hour, -3.0, hour, datetime(2013, 1, 1, hour, 20, tzinfo=UTC)),
        ]
        for hour in (1, 2, 3)
    ]
    schema = (
        "status string, _change_type string, carrier string, row_version bigint, arr_delay double, "
        "_commit_version bigint, _commit_timestamp timestamp"
    )
    preview = penstock.modes.preview(spark, delays, hours, schema=schema)
    (folder / PREVIEW).write_text(str(preview))
    preview.picture((folder / PREVIEW).with_suffix(".svg"))


def _start(spark: SparkSession, name: str, frame: DataFrame, sink: str, checkpoints: Path) -> penstock.Query:
    return (
        penstock.stream(spark, frame)
        .write(penstock.QueueSink(sink), guarantee="exactly_once")
        .start(name=name, checkpoint=checkpoints / name, trigger=penstock.Trigger.available_now())
    )


def _write_last_day(spark: SparkSession, feed: penstock.QueueFeed, url: str) -> None:
    with penstock.connect(url) as store:
        if store.queue(DAY).info().rows:
            return
    first = feed.newest(-1) - LAST_DAY_HOURS + 1
    net = penstock.changes.read(
        spark, feed, starting_version=first, deduplication_mode="netChanges", compute_updates=True
    )
    net.select("flight_id", "_change_type", "status", "row_version").write.format("penstock").mode(
        "append"
    ).save(DAY)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
