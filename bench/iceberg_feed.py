"""Iceberg: the change rows of a table through Spark, against a bare Python data source that yields pyiceberg's own batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import penstock as ps
from bench.data import rows
from bench.harness import Result, scratch, speed, timed
from bench.spark_session import spark
from penstock.changes.feeds.iceberg import IcebergFeed

COMMITS = 8
ROWS = 2_000_000
TASKS = 2


class _Files(InputPartition):
    def __init__(self, work: bytes) -> None:
        super().__init__(None)
        self.work = work


class IcebergFiles(DataSource):
    """The files of a table's appends, as pyiceberg scans them."""

    @classmethod
    def name(cls) -> str:
        return "bench_iceberg_files"

    def schema(self) -> str:
        return "id bigint, amount double, name string"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _FilesReader(self.options["uri"], self.options["warehouse"])


class _FilesReader(DataSourceReader):
    def __init__(self, uri: str, warehouse: str) -> None:
        self._given = {"type": "sql", "uri": uri, "warehouse": warehouse}

    def partitions(self) -> Sequence[InputPartition]:
        from pyiceberg.catalog import load_catalog

        table = load_catalog("default", **self._given).load_table("bench.orders")
        files = list(table.scan().plan_files())
        parts = [files[place::TASKS] for place in range(TASKS)]
        return [_Files(pickle.dumps((table.metadata, table.io, part))) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        assert isinstance(partition, _Files)
        metadata, io, files = pickle.loads(partition.work)
        return ArrowScan(metadata, io, metadata.schema(), AlwaysTrue()).to_record_batches(files)


def _aggregated(frame: DataFrame) -> float:
    totals = frame.agg(F.sum("id"), F.sum("amount"), F.max("name"))
    return timed(lambda: totals.collect())


def appends() -> Result:
    """Appends of 2 million rows in all, two tasks on either side; ours has three columns more."""
    from pyiceberg.catalog import load_catalog

    with scratch() as folder:
        given = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/lake",
        }
        catalog = load_catalog("default", **given)
        catalog.create_namespace("bench")
        whole = rows(ROWS)
        table = catalog.create_table("bench.orders", whole.schema)
        for number in range(COMMITS):
            table.append(whole.slice(number * (ROWS // COMMITS), ROWS // COMMITS))
        feed = IcebergFeed("bench.orders", properties=given, row_id="id")
        ours = ps.changes.read(
            spark(), feed, deduplication_mode="none", options={"rowsPerTask": ROWS // TASKS}
        )
        spark().dataSource.register(IcebergFiles)
        options = {"uri": given["uri"], "warehouse": given["warehouse"]}
        peer = spark().read.format("bench_iceberg_files").options(**options).load()
        return speed(
            "Iceberg changes / pyiceberg's batches",
            lambda: _aggregated(ours),
            lambda: _aggregated(peer),
            least=0.8,
        )


if __name__ == "__main__":
    print(appends().line())
