"""Change feeds for tests: rows, and streams of them that fall into micro-batches as a test wants."""

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


def contract(flags: Sequence[str] = "CU", **more: object) -> penstock.ChangeContract:
    """A contract with the flags that are named: C for carry-overs, I for intermediate changes, U for updates
    in two."""
    given = {
        "row_id": "id",
        "row_version": "rv",
        "carryover_rows": "C" in flags,
        "intermediate_changes": "I" in flags,
        "updates_as_delete_and_insert": "U" in flags,
        **more,
    }
    return penstock.ChangeContract(**given)


def table(rows: Sequence[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows with times in microseconds."""
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
    """The rows of a table, times in microseconds."""
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
    """A stream whose micro-batches are files."""

    def __init__(self, spark: SparkSession, folder: Path, schema: pa.Schema = SCHEMA) -> None:
        self._spark, self._folder, self._schema = spark, folder / "in", schema
        self._count = 0
        self._folder.mkdir()

    def add(self, *batches: Sequence[Row]) -> None:
        for rows in batches:
            path = self._folder / f"{self._count:05}.parquet"
            pq.write_table(table(rows, self._schema), path)
            # Spark takes the oldest ones first.
            os.utime(path, (1_700_000_000 + self._count, 1_700_000_000 + self._count))
            self._count += 1

    def read(self, files: int = 1) -> DataFrame:
        """A stream of micro-batches of so many files each."""
        sample = self._spark.createDataFrame(table([], self._schema))
        reader = self._spark.readStream.schema(sample.schema).option("maxFilesPerTrigger", files)
        return reader.parquet(str(self._folder))


class Sink:
    """Where a query's rows go; they are kept by micro-batch."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.batches: dict[int, list[Row]] = {}

    def run(self, df: DataFrame, mode: str = "append", **trigger: object) -> Counter[Row]:
        """All that comes out of what is there."""
        self.drain(df, mode, **trigger)
        return self.rows()

    def drain(self, df: DataFrame, mode: str = "append", **trigger: object) -> None:
        """The same of rows that cannot be counted, such as those with structs; they are in ``batches``."""
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
