"""An Iceberg table's change rows through Spark, against a bare data source with pyiceberg's own batches."""

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
    """The files of a table's snapshots, as pyiceberg scans them."""

    @classmethod
    def name(cls) -> str:
        return "bench_iceberg_files"

    def schema(self) -> str:
        return "id bigint, amount double, name string"

    def reader(self, schema: StructType) -> DataSourceReader:
        snapshots = [int(each) for each in self.options["snapshots"].split(",")]
        return _FilesReader(self.options["uri"], self.options["warehouse"], snapshots)


class _FilesReader(DataSourceReader):
    def __init__(self, uri: str, warehouse: str, snapshots: Sequence[int]) -> None:
        self._snapshots = snapshots
        self._given = {"type": "sql", "uri": uri, "warehouse": warehouse}

    def partitions(self) -> Sequence[InputPartition]:
        from pyiceberg.catalog import load_catalog

        table = load_catalog("default", **self._given).load_table("bench.orders")
        files = [file for each in self._snapshots for file in table.scan(snapshot_id=each).plan_files()]
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


@contextmanager
def _orders() -> Iterator[tuple[dict[str, str], Table, pa.Table]]:
    """A catalog's properties, its table of appends, and the rows in it."""
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
        yield given, table, whole


def _against_pyiceberg(given: dict[str, str], what: str, snapshots: Sequence[int], **options: Any) -> Result:
    """The feed against pyiceberg's batches of the same files, which some snapshots have."""
    feed = IcebergFeed("bench.orders", properties=given, row_id="id")
    rows_per_task = {"rowsPerTask": ROWS // TASKS}
    ours = penstock.changes.read(spark(), feed, deduplication_mode="none", options=rows_per_task, **options)
    spark().dataSource.register(IcebergFiles)
    catalog = {"uri": given["uri"], "warehouse": given["warehouse"]}
    held = ",".join(map(str, snapshots))
    peer = spark().read.format("bench_iceberg_files").options(**catalog, snapshots=held).load()
    return speed(what, lambda: _aggregated(ours), lambda: _aggregated(peer), least=0.8)


def appends() -> Result:
    """Appends of 2 million rows in all, two tasks on either side; ours has three columns more."""
    with _orders() as (given, table, _):
        return _against_pyiceberg(given, "Iceberg changes / pyiceberg's batches", [_newest(table)])


def copy_on_write() -> Result:
    """A commit that deletes one row of each file: all files are removed, and added without the row.

    Both sides read the removed and the added files.
    """
    with _orders() as (given, table, whole):
        before = _newest(table)
        places = range(0, ROWS, ROWS // COMMITS)
        table.delete(f"id in ({', '.join(str(whole['id'][place]) for place in places)})")
        return _against_pyiceberg(
            given,
            "Iceberg changes of a rewrite / pyiceberg's batches",
            [before, _newest(table)],
            starting_version=COMMITS + 1,
        )


def _newest(table: Table) -> int:
    found = table.current_snapshot()
    assert found is not None
    return found.snapshot_id


if __name__ == "__main__":
    for measured in (appends, copy_on_write):
        print(measured().line())
