"""Reading rows of an exported Delta table in Spark tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import TableRefusedError
from penstock.export.table import exported_schema
from penstock.lake.parquet import FileSplit, align_to_schema, cast_to_schema, read_split
from penstock.lake.storage import DeltaLocation
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.schemas import to_struct

if TYPE_CHECKING:
    from deltalake import DeltaTable

_COLUMN_MAPPING = "delta.columnMapping.mode"
_SUPPORTED_FEATURES = {"timestampNtz"}
"""Table features that affect only the types of columns."""


def exported_frame(spark: SparkSession, location: DeltaLocation, version: int, rows: pa.Schema) -> DataFrame:
    """Return the rows of a version with its columns, in the types of the queue."""
    table = location.open(version)
    _require_plain_files(location, table)
    schema = exported_schema(pa.schema(table.schema().to_arrow()), rows)
    paths = [(unquote(path),) for path in pa.table(table.get_add_actions())["path"].to_pylist()]
    tasks = max(1, min(len(paths), 4 * spark.sparkContext.defaultParallelism))
    listed = spark.createDataFrame(paths, "path string").repartition(tasks)
    return listed.mapInArrow(ReadFiles(location, schema), to_struct(schema))


def _require_plain_files(location: DeltaLocation, table: DeltaTable) -> None:
    """Refuse a table whose rows cannot be read from its data files alone."""
    protocol, partitions = table.protocol(), table.metadata().partition_columns
    features = sorted({*(protocol.reader_features or ())} - _SUPPORTED_FEATURES)
    if partitions:
        unsupported = f"partition columns ({', '.join(partitions)})"
    elif features or table.metadata().configuration.get(_COLUMN_MAPPING, "none") != "none":
        unsupported = f"the table feature {', '.join(features) or 'columnMapping'}"
    else:
        return
    raise TableRefusedError(
        f"the Delta table {location.label} has {unsupported}, so its rows cannot be read from its files "
        "alone: read it with an engine for Delta tables, and add QueueExport.newer_rows",
        condition="TABLE_REFUSED.READ_WITH_DELTA",
        table=location.label,
    )


@dataclass
class ReadFiles:
    """The function of ``mapInArrow``: takes paths and returns the rows of the files."""

    location: DeltaLocation = field(repr=False)
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for paths in batches:
            for path in paths.column(0).to_pylist():
                with self.location.translating_errors(), self.location.files().open_input_file(path) as file:
                    for rows in read_split(file, FileSplit(), self.schema.names):
                        yield align_to_schema(cast_to_schema(rows, self.schema, self._refuse), self.schema)

    def _refuse(self, reason: str) -> Exception:
        return TableRefusedError(
            f"a file of the Delta table {self.location.label} does not have the columns of the table: "
            f"{reason}",
            condition="TABLE_REFUSED.READ_WITH_DELTA",
            table=self.location.label,
        )
