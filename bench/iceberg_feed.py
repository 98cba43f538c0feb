"""Change rows of an Iceberg table in Spark, compared with a minimal data source of pyiceberg's batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import penstock
from bench.data import rows
from bench.harness import Result, scratch, speed, timed
from bench.spark_session import spark
from penstock.feeds.iceberg import IcebergFeed

if TYPE_CHECKING:
    from pyiceberg.table import Table

COMMITS = 8
ROWS = 2_000_000
TASKS = 2


class _Files(InputPartition):
    def __init__(self, work: bytes) -> None:
        super().__init__(None)
        self.work = work


class IcebergFiles(DataSource):
    """Data source of the files of a table's snapshots, as pyiceberg scans them."""

    @classmethod
    def name(cls) -> str:
        return "bench_iceberg_files"

    def schema(self) -> str:
        return "id bigint, amount double, name string"

    def reader(self, schema: StructType) -> DataSourceReader:
        snapshots = [int(snapshot) for snapshot in self.options["snapshots"].split(",")]
        return _FilesReader(self.options["uri"], self.options["warehouse"], snapshots)


class _FilesReader(DataSourceReader):
    def __init__(self, uri: str, warehouse: str, snapshots: Sequence[int]) -> None:
        self._snapshots = snapshots
        self._catalog_properties = {"type": "sql", "uri": uri, "warehouse": warehouse}

    def partitions(self) -> Sequence[InputPartition]:
        from pyiceberg.catalog import load_catalog

        table = load_catalog("default", **self._catalog_properties).load_table("bench.orders")
        files = [
            file for snapshot in self._snapshots for file in table.scan(snapshot_id=snapshot).plan_files()
        ]
        parts = [files[task::TASKS] for task in range(TASKS)]
        return [_Files(pickle.dumps((table.metadata, table.io, part))) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        assert isinstance(partition, _Files)
        metadata, io, files = pickle.loads(partition.work)
        return ArrowScan(metadata, io, metadata.schema(), AlwaysTrue()).to_record_batches(files)


def _time_aggregate(frame: DataFrame) -> float:
    totals = frame.agg(F.sum("id"), F.sum("amount"), F.max("name"))
    return timed(lambda: totals.collect())


@contextmanager
def _orders() -> Iterator[tuple[dict[str, str], Table, pa.Table]]:
    """Yield a catalog's properties, its table, and the rows that were appended to it."""
    from pyiceberg.catalog import load_catalog

    with scratch() as folder:
        properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/lake",
        }
        catalog = load_catalog("default", **properties)
        catalog.create_namespace("bench")
        all_rows = rows(ROWS)
        table = catalog.create_table("bench.orders", all_rows.schema)
        for number in range(COMMITS):
            table.append(all_rows.slice(number * (ROWS // COMMITS), ROWS // COMMITS))
        yield properties, table, all_rows


def _compare_with_pyiceberg(
    properties: dict[str, str], name: str, snapshots: Sequence[int], **options: Any
) -> Result:
    """Compare the feed with pyiceberg's batches of the same files, which belong to some snapshots."""
    feed = IcebergFeed("bench.orders", properties=properties, row_id="id")
    rows_per_task = {"rowsPerTask": ROWS // TASKS}
    ours = penstock.changes.read(spark(), feed, deduplication_mode="none", options=rows_per_task, **options)
    spark().dataSource.register(IcebergFiles)
    catalog = {"uri": properties["uri"], "warehouse": properties["warehouse"]}
    snapshot_ids = ",".join(map(str, snapshots))
    peer = spark().read.format("bench_iceberg_files").options(**catalog, snapshots=snapshot_ids).load()
    return speed(name, lambda: _time_aggregate(ours), lambda: _time_aggregate(peer), least=0.8)


def appends() -> Result:
    """Measure appends of 2 million rows, with two tasks each. Ours has three more columns."""
    with _orders() as (properties, table, _):
        return _compare_with_pyiceberg(
            properties, "Iceberg changes / pyiceberg's batches", [_current_snapshot(table)]
        )


def copy_on_write() -> Result:
    """Measure a commit that deletes a row of each file, which replaces all files.

    Both read the removed and the added files.
    """
    with _orders() as (properties, table, all_rows):
        before = _current_snapshot(table)
        positions = range(0, ROWS, ROWS // COMMITS)
        table.delete(f"id in ({', '.join(str(all_rows['id'][position]) for position in positions)})")
        return _compare_with_pyiceberg(
            properties,
            "Iceberg changes of a rewrite / pyiceberg's batches",
            [before, _current_snapshot(table)],
            starting_version=COMMITS + 1,
        )


def _current_snapshot(table: Table) -> int:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return snapshot.snapshot_id


if __name__ == "__main__":
    for benchmark in (appends, copy_on_write):
        print(benchmark().line())
