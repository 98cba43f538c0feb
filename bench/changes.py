"""Post-processing of row-level change feeds, compared with Spark 4.3's rewrite in DataFrame operations."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

import penstock
from bench.harness import Result, pairs, peak_memory, scratch, speed, timed
from bench.spark_session import spark

Process = Callable[[DataFrame], DataFrame]
COMMITS = 20
ROWS = 200_000
PARTITIONS = 2
PROVIDERS = {
    "HDFS": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "RocksDB": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}


def contract() -> penstock.ChangeContract:
    return penstock.ChangeContract(
        "id",
        "rv",
        carryover_rows=True,
        intermediate_changes=True,
        updates_as_delete_and_insert=True,
        whole_commits=True,
    )


def write_feed(folder: Path, changed: float) -> int:
    """Write a copy-on-write feed, and return its number of rows.

    Each commit rewrites the same keys, and changes a share of them.
    """
    folder.mkdir()
    keys = np.arange(ROWS // 2, dtype=np.int64)
    random = np.random.default_rng(7)
    versions = np.zeros(len(keys), np.int64)
    for commit in range(1, COMMITS + 1):
        is_changed = random.random(len(keys)) < changed
        new_versions = np.where(is_changed, commit, versions)
        table = pa.concat_tables(
            [_rows(keys, versions, "delete", commit), _rows(keys, new_versions, "insert", commit)]
        )
        for part in range(PARTITIONS):
            path = folder / f"{commit:03}-{part}.parquet"
            pq.write_table(table.filter(pc.equal(pc.bit_wise_and(table["id"], 1), part)), path)
            os.utime(path, (1_700_000_000 + commit, 1_700_000_000 + commit))
        versions = new_versions
    return COMMITS * len(keys) * 2


def _rows(keys: np.ndarray, rv: np.ndarray, kind: str, commit: int) -> pa.Table:
    count = len(keys)
    text = pa.array(keys * 31 + rv).cast(pa.string())
    return pa.table(
        {
            "id": keys,
            "data": text,
            "x": (keys * 0.5 + rv),
            "rv": rv,
            "_change_type": pa.repeat(pa.scalar(kind), count),
            "_commit_version": np.full(count, commit, np.int64),
            "_commit_timestamp": pa.repeat(
                pa.scalar(1_700_000_000_000_000 + commit * 60_000_000), count
            ).cast(pa.timestamp("us", tz="UTC")),
        }
    )


def spark_stream(df: DataFrame) -> DataFrame:
    """Apply the streaming rewrite of Spark 4.3: watermark, collect, filter, inline, relabel."""
    columns = df.columns
    events = F.collect_list(F.struct(*columns)).alias("events")
    grouped = (
        df.withWatermark("_commit_timestamp", "0 seconds")
        .groupBy("id", "_commit_version", "_commit_timestamp")
        .agg(
            events,
            F.count_if(F.col("_change_type") == "delete").alias("d"),
            F.count_if(F.col("_change_type") == "insert").alias("i"),
            F.count("rv").alias("n"),
            F.min("rv").alias("low"),
            F.max("rv").alias("high"),
        )
    )
    filtered = grouped.where(
        ~((F.col("d") == 1) & (F.col("i") == 1) & (F.col("n") == 2) & (F.col("low") == F.col("high")))
    )
    rows = filtered.select("d", "i", F.inline("events"))
    return rows.withColumn("_change_type", _relabeled_type()).select(*columns)


def spark_batch(df: DataFrame) -> DataFrame:
    """Apply the batch rewrite of Spark 4.3, which uses a window."""
    columns = df.columns
    window = Window.partitionBy("id", "_commit_version")
    counted = df.select(
        *columns,
        F.count_if(F.col("_change_type") == "delete").over(window).alias("d"),
        F.count_if(F.col("_change_type") == "insert").over(window).alias("i"),
        F.count("rv").over(window).alias("n"),
        F.min("rv").over(window).alias("low"),
        F.max("rv").over(window).alias("high"),
    )
    filtered = counted.where(
        ~((F.col("d") == 1) & (F.col("i") == 1) & (F.col("n") == 2) & (F.col("low") == F.col("high")))
    )
    return filtered.withColumn("_change_type", _relabeled_type()).select(*columns)


def _relabeled_type() -> Column:
    pair = (F.col("d") == 1) & (F.col("i") == 1)
    kind = F.col("_change_type")
    return (
        F.when(pair & (kind == "delete"), "update_preimage")
        .when(pair & (kind == "insert"), "update_postimage")
        .otherwise(kind)
    )


def penstock_process(df: DataFrame) -> DataFrame:
    return penstock.changes.post_process(df, contract(), compute_updates=True)


def stream(changed: float, least: float, *, commits: int = 5) -> Result:
    """Measure the seconds for the whole feed.

    Each micro-batch has `commits` commits, and each commit has a file for each partition.
    """
    with scratch() as folder:
        rows = write_feed(folder / "feed", changed)

        def run(process: Process, provider: str) -> float:
            return _run(folder, process, provider, commits)

        # The first runs warm up the JVM. Without them, the second provider would look faster.
        for provider in PROVIDERS:
            run(penstock_process, provider), run(spark_stream, provider)
        best = min(PROVIDERS, key=lambda name: run(spark_stream, name))
        our_seconds, peer = pairs(lambda: run(penstock_process, best), lambda: run(spark_stream, best), 3)
        ratio = peer / our_seconds
        note = f"{rows / our_seconds:,.0f} rows/s, peer {rows / peer:,.0f} with {best}"
        name = f"change feed, stream, {changed:.0%} changed, {commits} commits a trigger"
        return Result(name, our_seconds, peer, ratio, f">= {least}", ratio >= least, note)


def _run(folder: Path, process: Process, provider: str, commits: int) -> float:
    session = spark()
    session.conf.set("spark.sql.streaming.stateStore.providerClass", PROVIDERS[provider])
    source = session.readStream.schema(session.read.parquet(str(folder / "feed")).schema)
    frame = source.option("maxFilesPerTrigger", commits * PARTITIONS).parquet(str(folder / "feed"))
    writer = process(frame).writeStream.format("noop")
    writer = writer.option("checkpointLocation", tempfile.mkdtemp(dir=folder)).trigger(availableNow=True)
    return timed(lambda: writer.start().awaitTermination())


def batch(changed: float, least: float) -> Result:
    """Measure the seconds for the whole feed in one batch."""
    with scratch() as folder:
        write_feed(folder / "feed", changed)
        frame = spark().read.parquet(str(folder / "feed"))

        def run(process: Process) -> float:
            processed = process(frame)
            return timed(lambda: processed.write.format("noop").mode("overwrite").save())

        name = f"change feed, batch, {changed:.0%} changed"
        return speed(name, lambda: run(penstock_process), lambda: run(spark_batch), least=least, rounds=3)


def measure_memory(rows: int) -> int:
    """Return the peak memory in bytes of a worker that processes all rows of one micro-batch."""
    program = f"from bench.changes import process_in_worker; process_in_worker({rows})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(result.stdout)


def process_in_worker(rows: int) -> None:
    """Process a micro-batch in which every row changed, as a worker does, and print the peak memory."""
    from penstock.changes.options import ChangeOptions
    from penstock.changes.passes.passes import Passes
    from penstock.changes.passes.rows import Layout
    from penstock.changes.stage import AllPasses, FirstPass, Packing
    from penstock.spark.shuffle_batches import shuffle_keys

    keys = np.arange(rows // 2, dtype=np.int64)
    table = pa.concat_tables([_rows(keys, keys * 0, "delete", 1), _rows(keys, keys * 0 + 1, "insert", 1)])
    layout = Layout(4, 5, 6, row_id=((0,),), data=((0,), (1,), (2,), (3,)), row_version=(3,))
    passes = Passes.of(contract(), ChangeOptions("dropCarryovers", True, 0))
    batches = table.to_batches(max_chunksize=10_000)
    count = 0
    first = FirstPass(layout, passes, packing=Packing(layout.row_id, shuffle_keys(2)))
    for processed in AllPasses(layout, passes, packed=True)(first(iter(batches))):
        count += processed.num_rows
    assert count == rows
    print(peak_memory())


def worker_memory() -> Result:
    """Measure the memory for 2 million rows, and its growth from 1 million."""
    smaller_mib, larger_mib = measure_memory(1_000_000) / 2**20, measure_memory(2_000_000) / 2**20
    note = f"{larger_mib:.0f} MiB at 2 million rows, {smaller_mib:.0f} at 1 million"
    max_mib = 1.5e9 / 2**20
    return Result(
        "change feed, worker memory",
        larger_mib,
        None,
        None,
        f"<= {max_mib:.0f} MiB",
        larger_mib < max_mib,
        note,
        "MiB",
    )
