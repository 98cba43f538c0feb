"""Reads of a queue in Spark, compared with a minimal Python data source over Arrow files of the same rows."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit

import penstock
from bench.arrow_files import ArrowFiles, write_files
from bench.data import SCHEMA, rows
from bench.harness import Result, scratch, speed, timed, worker_peaks
from bench.spark_session import spark
from penstock.store.log.segmenting import SEGMENT_ROWS

SMALL_APPENDS = 100_000


def aggregate(url: str, name: str) -> Result:
    """Measure 2 million rows in two partitions, with two tasks each."""
    with scratch() as folder:
        table = rows()
        with penstock.connect(url.format(folder=folder)) as store:
            queue = store.create_queue("bench_read", SCHEMA, partitions=2)
            half = table.num_rows // 2
            queue.append(table.slice(0, half), partition=0)
            queue.append(table.slice(half), partition=1)
            write_files(table, folder / "peer", 2, SEGMENT_ROWS)
            spark().dataSource.register(ArrowFiles)
            ours = spark().read.format("penstock").option("url", url.format(folder=folder)).load("bench_read")
            peer = spark().read.format("bench_arrow_files").load(str(folder / "peer"))
            try:
                return speed(
                    f"Spark read + aggregate, {name} / Arrow files",
                    lambda: _time_aggregate(ours),
                    lambda: _time_aggregate(peer),
                    least=0.8,
                )
            finally:
                store.drop_queue("bench_read")


def _time_aggregate(frame: DataFrame) -> float:
    totals = frame.agg(F.sum("id"), F.sum("amount"), F.max("name"))
    return timed(lambda: totals.collect())


def compacted(url: str, name: str) -> tuple[Result, float]:
    """Measure reads of one-row appends after compaction, compared with the same rows in one append.

    Return the seconds of the compaction, too. Maintenance is off during the appends, so that all compaction
    is in those seconds.
    """
    with scratch() as folder:
        store = penstock.connect(url.format(folder=folder))
        table = rows(SMALL_APPENDS)
        one, many = store.create_queue("one", SCHEMA), store.create_queue("many", SCHEMA)
        one.append(table)
        store.maintainer.close()
        _append_one_by_one(many)
        compaction_seconds = timed(many.compact)
        result = speed(
            f"full read of {SMALL_APPENDS:,} one-row appends, merged, {name}",
            lambda: timed(lambda: many.read(0, 0)),
            lambda: timed(lambda: one.read(0, 0)),
            least=0.67,
            rounds=15,
        )
        for queue in ("one", "many"):
            store.drop_queue(queue)
        store.close()
        return result, compaction_seconds


def _append_one_by_one(queue: penstock.Queue) -> None:
    table = rows(SMALL_APPENDS)
    for number in range(table.num_rows):
        queue.append(table.slice(number, 1))


def worker_memory(count: int = 10_000_000) -> int:
    """Return the peak memory in bytes of the Python worker that reads ``count`` rows in one task."""
    with scratch() as folder:
        url = f"sqlite:///{folder}/store.db"
        with penstock.connect(url) as store:
            queue = store.create_queue("large", SCHEMA)
            for _ in range(count // 1_000_000):
                queue.append(rows(1_000_000))
        before = worker_peaks()
        frame = spark().read.format("penstock").options(url=url, rowsPerTask=count).load("large")
        read = frame.agg(F.count("*"), F.sum("id"), F.max("name")).collect()[0][0]
        if read != count:
            raise SystemExit(f"read {read} rows of {count}")
        return max(peak for pid, peak in worker_peaks().items() if before.get(pid) != peak)
