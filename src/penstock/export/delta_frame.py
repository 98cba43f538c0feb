"""Reader of an exported Delta table's rows in Spark tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import TableRefusedError
from penstock.export.table import with_columns_of
from penstock.lake.parquet import Piece, completed, fitted, read_piece
from penstock.lake.storage import DeltaPlace
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.schemas import to_struct

if TYPE_CHECKING:
    from deltalake import DeltaTable

_MAPPING = "delta.columnMapping.mode"
_READ_FEATURES = {"timestampNtz"}
"""Table features that affect only the types of columns."""


def exported_frame(spark: SparkSession, place: DeltaPlace, version: int, rows: pa.Schema) -> DataFrame:
    """Return the rows of a version, with its columns, in the types of a queue's rows."""
    table = place.open(version)
    _require_plain(place, table)
    schema = with_columns_of(pa.schema(table.schema().to_arrow()), rows)
    paths = [(unquote(path),) for path in pa.table(table.get_add_actions())["path"].to_pylist()]
    tasks = max(1, min(len(paths), 4 * spark.sparkContext.defaultParallelism))
    listed = spark.createDataFrame(paths, "path string").repartition(tasks)
    return listed.mapInArrow(ReadFiles(place, schema), to_struct(schema))


def _require_plain(place: DeltaPlace, table: DeltaTable) -> None:
    """Refuse a table whose rows cannot be read from its files alone."""
    protocol, partitions = table.protocol(), table.metadata().partition_columns
    features = sorted({*(protocol.reader_features or ())} - _READ_FEATURES)
    if partitions:
        wrong = f"partition columns ({', '.join(partitions)})"
    elif features or table.metadata().configuration.get(_MAPPING, "none") != "none":
        wrong = f"the table feature {', '.join(features) or 'columnMapping'}"
    else:
        return
    raise TableRefusedError(
        f"the Delta table {place.shown} has {wrong}, so its rows cannot be read from its files alone: "
        "read it with an engine for Delta tables, and add QueueExport.newer_rows",
        condition="TABLE_REFUSED.READ_WITH_DELTA",
        table=place.shown,
    )


@dataclass
class ReadFiles:
    """The function of ``mapInArrow``: takes paths and returns the rows of the files."""

    place: DeltaPlace = field(repr=False)
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for paths in batches:
            for path in paths.column(0).to_pylist():
                with self.place.translating_errors(), self.place.files().open_input_file(path) as file:
                    for rows in read_piece(file, Piece(), self.schema.names):
                        yield completed(fitted(rows, self.schema, self._refuse), self.schema)

    def _refuse(self, what: str) -> Exception:
        return TableRefusedError(
            f"a file of the Delta table {self.place.shown} has other columns than the table: {what}",
            condition="TABLE_REFUSED.READ_WITH_DELTA",
            table=self.place.shown,
        )
