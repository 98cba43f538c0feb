"""The demo's streaming job: a process of its own, so that it can be killed in the middle.

``python -m penstock.demo.job URL CHECKPOINTS`` reads the change feed with two queries, exactly once: one brings what has
changed to the board, the other aggregates the delays of arrivals by carrier and hour. Behind them two SQL tables are kept: the
flights as they are now, by the changes on the board, and each carrier's totals, in output mode update. Beside them a query takes
the first cancelled flights from the board as it fills, and ends by its limit. Then a batch tells what is
different after the last day, and a preview what each output mode would have given. At last the delay alerts run through both
triggers, to see what they take. It begins when it is told to on its standard input; until then Spark starts. It can be killed at any
point and started again: each part goes on where it stood, or begins anew where it leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

import penstock as ps
from penstock.demo.alerts import quick
from penstock.demo.jobs import BEGIN, tell
from penstock.demo.latency import measure
from penstock.demo.tables import (
    BOARD,
    CANCELLED,
    CONSUMER,
    CURRENT,
    DAY,
    DELAYS,
    FIRST,
    FLIGHTS,
    HOURS,
    PREVIEW,
    ROWS_PER_LOOK,
    ROWS_PER_TASK,
    ROWS_PER_TRIGGER,
    TOTALS,
)
from penstock.pipeline.query import Query


def board(changes: DataFrame) -> DataFrame:
    """What has changed about which flight."""
    gained = (F.col("arr_delay") - F.col("dep_delay")).alias("gained_minutes")
    return changes.select("flight_id", "carrier", "status", "_change_type", "_commit_version", gained)


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


def now(changed: DataFrame) -> DataFrame:
    """The changes that a table of the flights is kept by."""
    return changed.select(
        "flight_id", "carrier", "status", "gained_minutes", "_change_type", "_commit_version"
    )


def cancelled(changed: DataFrame) -> DataFrame:
    """Flights that have left the board."""
    return changed.where("_change_type = 'delete'").select("flight_id", "carrier", "_commit_version")


def totals(hours: DataFrame) -> DataFrame:
    """A carrier's arrivals and delays of all hours."""
    sums = [F.sum(name).alias(name) for name in ("arrivals", "delay_minutes")]
    return hours.groupBy("carrier").agg(*sums)


def main(url: str, checkpoints: Path) -> None:
    """Run both queries over all that is in the queue."""
    spark = ps.session(
        "penstock demo",
        master="local[2]",
        url=url,
        stateful=True,
        memory="2g",
        conf={
            # In a program of a minute or two a compiler that takes its time costs more than it saves.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": "2",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    feed = ps.QueueFeed(FLIGHTS, url)
    limit = {"maxRowsPerTrigger": ROWS_PER_TRIGGER, "rowsPerTask": ROWS_PER_TASK}
    changed = ps.changes.read_stream(
        spark,
        feed,
        compute_updates=True,
        columns=["flight_id", "carrier", "status", "dep_delay", "arr_delay"],
        options=limit,
    )
    as_written = ps.changes.read_stream(
        spark,
        feed,
        deduplication_mode="none",
        columns=["carrier", "status", "arr_delay", "row_version"],
        options=limit,
    )
    if sys.stdin.readline() != BEGIN:
        return
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    first_cancelled = _take_cancelled(spark, checkpoints)
    _finish(
        _start(spark, "board", board(changed), BOARD, checkpoints),
        _start(spark, "delays", delays(as_written), DELAYS, checkpoints),
    )
    # Of a short feed there may be fewer; the query would go on waiting for them.
    first_cancelled.processAllAvailable()
    first_cancelled.stop()
    tell("All of it is on the board and in the aggregate; keeping two SQL tables by it")
    _finish(*_keep_tables(spark, checkpoints))
    tell("What is different after the last day, and what each output mode would give")
    _write_last_day(spark, feed, url)
    _show_modes(spark, checkpoints.parent)
    tell("Delay alerts, through both triggers with two guarantees each, in real time: about a minute")
    measure(spark, quick(url), checkpoints.parent, checkpoints)
    spark.stop()


def _end_with_the_demo() -> None:
    """What the demo's process leaves, the next run of the demo carries on: nothing else may do so meanwhile."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _finish(*queries: Query) -> None:
    for query in queries:
        query.awaitTermination()


def _take_cancelled(spark: SparkSession, checkpoints: Path) -> Query:
    """The first ones only, from a board that is being written."""
    live = ps.QueueSource(BOARD, consumer=CANCELLED, options={"maxRowsPerTrigger": ROWS_PER_LOOK})
    return (
        ps.stream(spark, live)
        .transform(cancelled)
        .limit(FIRST)
        .write(ps.QueueSink(CANCELLED))
        .start(name=CANCELLED, checkpoint=checkpoints / CANCELLED)
    )


def _keep_tables(spark: SparkSession, checkpoints: Path) -> list[Query]:
    current = ps.TableSink(CURRENT, keys=["flight_id"], apply_changes=True)
    by_carrier = ps.TableSink(TOTALS, keys=["carrier"])
    changed = ps.stream(spark, ps.QueueSource(BOARD, consumer=CONSUMER)).transform(now)
    hours = ps.stream(spark, ps.QueueSource(DELAYS, consumer=CONSUMER)).transform(totals)
    pipelines = {CURRENT: changed.write(current), TOTALS: hours.write(by_carrier, output_mode="update")}
    trigger = ps.Trigger.available_now()
    return [
        pipeline.start(name=name, checkpoint=checkpoints / name, trigger=trigger)
        for name, pipeline in pipelines.items()
    ]


def _show_modes(spark: SparkSession, folder: Path) -> None:
    """What the delays would be in each output mode, of three hours' arrivals."""
    hours = [
        [
            ("arrived", "insert", "AA", hour, 5.0 * hour, hour, datetime(2013, 1, 1, hour, 10, tzinfo=UTC)),
            ("arrived", "insert", "UA", hour, -3.0, hour, datetime(2013, 1, 1, hour, 20, tzinfo=UTC)),
        ]
        for hour in (1, 2, 3)
    ]
    schema = (
        "status string, _change_type string, carrier string, row_version bigint, arr_delay double, _commit_version bigint, "
        "_commit_timestamp timestamp"
    )
    shown = ps.modes.preview(spark, delays, hours, schema=schema)
    (folder / PREVIEW).write_text(str(shown))
    shown.picture((folder / PREVIEW).with_suffix(".svg"))


def _start(spark: SparkSession, name: str, frame: DataFrame, sink: str, checkpoints: Path) -> Query:
    return (
        ps.stream(spark, frame)
        .write(ps.QueueSink(sink), guarantee="exactly_once")
        .start(name=name, checkpoint=checkpoints / name, trigger=ps.Trigger.available_now())
    )


def _write_last_day(spark: SparkSession, feed: ps.QueueFeed, url: str) -> None:
    with ps.connect(url) as store:
        if store.queue(DAY).info().rows:
            return
    first = feed.newest(feed.oldest()) - HOURS + 1
    net = ps.changes.read(
        spark, feed, starting_version=first, deduplication_mode="netChanges", compute_updates=True
    )
    net.select("flight_id", "_change_type", "status", "row_version").write.format("penstock").mode(
        "append"
    ).save(DAY)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
