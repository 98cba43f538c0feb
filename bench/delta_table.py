"""Writes to a Delta table by Spark's tasks, compared with writes by deltalake on the driver.

Tables with features that require it are still written on the driver. The sink cannot be faster than Spark
reads the rows and passes them to Python. So the time of both without a sink is measured, too, and that of
Spark's Parquet writer, which needs no Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

import penstock
from bench.harness import Result, bounded, pairs, peak_memory, scratch, speed
from bench.spark_session import spark
from penstock.spark.schemas import numbered_columns
from penstock.tables.delta import writer

ROWS = 5_000_000
FILES = 10
ROUNDS = 3
SCHEMA = "id bigint, name string, value double"


def append(rows: int = ROWS, batches: int = 1, rounds: int = ROUNDS) -> Result:
    """Measure a number of rows in one micro-batch or in ten."""
    with scratch() as folder:
        bench = _Bench(folder, rows, batches)
        name = f"Delta, {rows:,} rows in {batches} / through the driver"
        return speed(name, bench.by_tasks, bench.by_driver, least=3, rounds=rounds)


def bounds(rows: int = ROWS, rounds: int = ROUNDS) -> list[Result]:
    """Measure single steps of the sink, compared with the whole write through the driver."""
    steps = {
        "read by Spark": _read_rows,
        "handed to Python": _pass_to_python,
        "written by Spark as Parquet": _write_parquet,
    }
    with scratch() as folder:
        bench = _Bench(folder, rows, 1)
        return [
            bounded(f"{rows:,} rows {name} / through the driver", ours, None, "s", peer=peer)
            for name, step in steps.items()
            for ours, peer in [pairs(partial(bench.without_sink, step), bench.by_driver, rounds)]
        ]


def driver_memory() -> list[Result]:
    """Measure the peak memory of the driver's Python process, which must not grow with the rows."""
    few, many = (_peak_of(rows) / 2**20 for rows in (ROWS // 5, ROWS))
    return [
        bounded("Delta, driver's peak, 1M rows", few, None, "MiB"),
        bounded("Delta, driver's peak, 5M rows", many, few + 50, "MiB"),
    ]


def _peak_of(rows: int) -> int:
    command = [sys.executable, "-m", "bench.delta_table", str(rows)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(result.stdout.splitlines()[-1])["peak"])


class _Bench:
    def __init__(self, folder: Path, rows: int, batches: int) -> None:
        self.folder, self.rows, self.batches, self.runs = folder, rows, batches, 0
        (folder / "source").mkdir()
        for number in range(FILES):
            pq.write_table(_rows(number * rows // FILES, (number + 1) * rows // FILES), self._source(number))

    def _source(self, number: int) -> Path:
        return self.folder / "source" / f"{number}.parquet"

    def by_tasks(self) -> float:
        return self.run()

    def by_driver(self) -> float:
        with _through_deltalake():
            return self.run()

    def run(self) -> float:
        """Write the rows, and return the seconds of the micro-batches that Spark reports."""
        self.runs += 1
        table = f"t{self.runs}"
        stream = penstock.stream(spark(), self._rows())
        query = stream.write(penstock.TableSink(table, url=f"delta://{self.folder}/tables")).start(
            checkpoint=self.folder / f"ck{self.runs}", trigger=penstock.Trigger.available_now()
        )
        query.awaitTermination()
        written = DeltaTable(str(self.folder / "tables" / table))
        assert written.to_pyarrow_dataset().count_rows() == self.rows
        assert written.version() == self.batches
        return _add_batch_seconds(query)

    def without_sink(self, step: Callable[[DataFrame, str], None]) -> float:
        """Call a function with each micro-batch and a folder, and return the seconds that Spark reports."""
        self.runs += 1
        folder = str(self.folder / f"part{self.runs}")
        writer = self._rows().writeStream.foreachBatch(lambda frame, _: step(frame, folder))
        query = writer.option("checkpointLocation", f"{folder}-ck").trigger(availableNow=True).start()
        query.awaitTermination()
        return _add_batch_seconds(query)

    def _rows(self) -> DataFrame:
        read = spark().readStream.schema(SCHEMA).option("maxFilesPerTrigger", FILES // self.batches)
        return read.parquet(str(self.folder / "source"))


def _add_batch_seconds(query: StreamingQuery | penstock.Query) -> float:
    return sum(progress.durationMs.get("addBatch", 0) for progress in query.recentProgress) / 1000


def _read_rows(frame: DataFrame, _: str) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _pass_to_python(frame: DataFrame, _: str) -> None:
    numbered_columns(frame).mapInArrow(_count_rows, "rows bigint").collect()


def _count_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch([pa.array([sum(batch.num_rows for batch in batches)])], names=["rows"])


def _write_parquet(frame: DataFrame, folder: str) -> None:
    frame.write.option("compression", "zstd").parquet(folder)


def _through_deltalake() -> AbstractContextManager[object]:
    return patch.object(writer, "obstacle", lambda *_: "is measured")


def _rows(start: int, end: int) -> pa.Table:
    numbers = np.arange(start, end)
    names = pa.array([f"name {number}" for number in range(start, end)])
    return pa.table({"id": numbers, "name": names, "value": np.random.default_rng(7).random(end - start)})


def main(rows: int) -> None:
    with scratch() as folder:
        _Bench(folder, rows, 1).run()
        print(json.dumps({"peak": peak_memory()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
