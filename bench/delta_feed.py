"""Change data feed of a Delta table in Spark, compared with deltalake's reader in a minimal data source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import penstock
from bench.harness import Result, pairs, scratch, timed
from bench.spark_session import spark
from penstock.feeds.delta import DeltaFeed
from penstock.spark.schemas import to_struct

COMMITS = 8
ROWS = 145_000
PLAIN = pa.schema(
    [
        ("id", pa.int64()),
        ("amount", pa.float64()),
        ("name", pa.string()),
        ("_change_type", pa.string()),
        ("_commit_version", pa.int64()),
        ("_commit_timestamp", pa.timestamp("us")),
    ]
)


def write_table(path: Path) -> int:
    """Write appends and updates of half of the rows, and return the number of change rows."""
    random = np.random.default_rng(7)
    for commit in range(COMMITS // 2):
        ids = np.arange(commit * ROWS, (commit + 1) * ROWS, dtype=np.int64)
        names = pa.array([f"name-{number % 5000}-{number}" for number in ids.tolist()])
        rows = pa.table({"id": ids, "amount": random.random(ROWS), "name": names})
        write_deltalake(path, rows, mode="append", configuration={"delta.enableChangeDataFeed": "true"})
        DeltaTable(path).update(predicate=f"id % 2 = {commit % 2}", updates={"amount": "amount + 1"})
    return sum(commit.rows for commit in DeltaFeed(str(path), "id").open().commits(-1, 10**6, 10**9))


class Versions(InputPartition):
    """Range of versions."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(None)
        self.first, self.last = first, last


class PlainReader(DataSourceReader):
    """Reader that returns the batches of ``load_cdf``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def partitions(self) -> Sequence[InputPartition]:
        return [Versions(0, COMMITS // 2 - 1), Versions(COMMITS // 2, COMMITS - 1)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Versions)
        table = DeltaTable(self._path)
        reader = pa.RecordBatchReader.from_stream(
            table.load_cdf(starting_version=partition.first, ending_version=partition.last)
        )
        # Spark accepts only the types of the schema.
        yield from (batch.cast(PLAIN) for batch in reader)


class PlainDelta(DataSource):
    """Data source that adds nothing to deltalake's reader."""

    @classmethod
    def name(cls) -> str:
        return "plain_delta"

    def schema(self) -> StructType:
        return to_struct(PLAIN)

    def reader(self, schema: StructType) -> DataSourceReader:
        return PlainReader(self.options["path"])


def feed() -> Result:
    """Measure the seconds to read the whole feed and discard the rows."""
    with scratch() as folder:
        path = folder / "table"
        rows = write_table(path)
        session = spark()
        session.dataSource.register(PlainDelta)

        def run(frame: DataFrame) -> float:
            return timed(lambda: frame.write.format("noop").mode("overwrite").save())

        def ours() -> DataFrame:
            return penstock.changes.read(session, DeltaFeed(str(path), "id"), deduplication_mode="none")

        def peer() -> DataFrame:
            return session.read.format("plain_delta").load(str(path))

        assert ours().count() == peer().count() == rows
        our_seconds, other = pairs(lambda: run(ours()), lambda: run(peer()), 5)
        ratio = other / our_seconds
        note = f"{rows / our_seconds:,.0f} rows/s, peer {rows / other:,.0f}"
        return Result("Delta feed through Spark", our_seconds, other, ratio, ">= 0.8", ratio >= 0.8, note)


if __name__ == "__main__":
    print(feed().line())
