"""Change rows for tests, and streams of them whose micro-batches a test chooses."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import penstock

Row = tuple[object, ...]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("data", pa.string()),
        ("rv", pa.int64()),
        ("_change_type", pa.string()),
        ("_commit_version", pa.int64()),
        ("_commit_timestamp", pa.timestamp("us", tz="UTC")),
    ]
)


def contract(flags: Sequence[str] = "CU", **options: object) -> penstock.ChangeContract:
    """Return a contract with flags: C carry-overs, I intermediate changes, U updates in two rows."""
    fields = {
        "row_id": "id",
        "row_version": "rv",
        "carryover_rows": "C" in flags,
        "intermediate_changes": "I" in flags,
        "updates_as_delete_and_insert": "U" in flags,
        **options,
    }
    return penstock.ChangeContract(**fields)


def table(rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return a table of rows whose times are given in microseconds."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table(
        [
            pa.array(column, pa.int64()).cast(field.type)
            if pa.types.is_timestamp(field.type)
            else pa.array(column, field.type)
            for column, field in zip(columns, schema, strict=True)
        ],
        schema=schema,
    )


def tuples(rows: pa.Table) -> list[Row]:
    """Return the rows of a table, with times in microseconds."""
    columns = [
        column.cast(pa.int64()).to_pylist() if pa.types.is_timestamp(column.type) else column.to_pylist()
        for column in rows.columns
    ]
    return list(zip(*columns, strict=True))


def frame(spark: SparkSession, rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> DataFrame:
    return spark.createDataFrame(table(rows, schema))


def collected(df: DataFrame) -> Counter[Row]:
    return Counter(tuples(df.toArrow()))


class Files:
    """Stream whose micro-batches are files."""

    def __init__(self, spark: SparkSession, folder: Path, schema: pa.Schema = SCHEMA) -> None:
        self._spark, self._folder, self._schema = spark, folder / "in", schema
        self._count = 0
        self._folder.mkdir()

    def add(self, *batches: Sequence[Row]) -> None:
        for rows in batches:
            path = self._folder / f"{self._count:05}.parquet"
            pq.write_table(table(rows, self._schema), path)
            # Spark reads the oldest files first.
            os.utime(path, (1_700_000_000 + self._count, 1_700_000_000 + self._count))
            self._count += 1

    def read(self, files: int = 1) -> DataFrame:
        """Return a stream whose micro-batches have `files` files each."""
        sample = self._spark.createDataFrame(table([], self._schema))
        reader = self._spark.readStream.schema(sample.schema).option("maxFilesPerTrigger", files)
        return reader.parquet(str(self._folder))


class Sink:
    """Sink that keeps a query's rows by micro-batch."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.batches: dict[int, list[Row]] = {}

    def run(self, df: DataFrame, mode: str = "append", **trigger: object) -> Counter[Row]:
        """Run a query on all available rows, and return its output."""
        self.drain(df, mode, **trigger)
        return self.rows()

    def drain(self, df: DataFrame, mode: str = "append", **trigger: object) -> None:
        """Run a query on all available rows. Rows that are not hashable are read from ``batches``."""
        query = (
            df.writeStream.foreachBatch(self._keep)
            .outputMode(mode)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )
        query.awaitTermination()

    def rows(self) -> Counter[Row]:
        return Counter(row for rows in self.batches.values() for row in rows)

    def _keep(self, df: DataFrame, batch: int) -> None:
        self.batches[batch] = tuples(df.toArrow())
