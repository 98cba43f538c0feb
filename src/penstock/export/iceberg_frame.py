"""Reading rows of an exported Iceberg table in Spark tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import FileScanTask

from penstock.errors import TableRefusedError
from penstock.export.table import exported_schema
from penstock.lake.parquet import cast_to_schema
from penstock.spark.error_boundary import iterate_in_worker
from penstock.spark.schemas import to_struct
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.keys import all_files
from penstock.tables.iceberg.location import IcebergLocation, translate_error
from penstock.tables.iceberg.numbered_tasks import task_count
from penstock.tables.iceberg.reading import StoredFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def exported_frame(
    spark: SparkSession, location: IcebergLocation, snapshot: int, rows: pa.Schema
) -> DataFrame:
    """Return the rows of a snapshot with the table's columns, in the types of the queue."""
    table = location.open()
    with location.translating_errors("its files cannot be listed"):
        # There is no filter, so tasks need no residual expression.
        files = [FileScanTask(task.file, task.delete_files) for task in all_files(table, snapshot)]
    schema = exported_schema(schema_to_pyarrow(table.schema(), include_field_ids=False), rows)
    tasks = task_count(spark, len(files))
    source = FileTarget.of(location.label, table.io, table.metadata, "")
    return spark.range(0, len(files), 1, tasks).mapInArrow(
        ReadFiles(source, files, schema), to_struct(schema)
    )


@dataclass
class ReadFiles:
    """The function of ``mapInArrow``: takes the numbers of data files and returns their rows."""

    source: FileTarget = field(repr=False)
    files: Sequence[FileScanTask] = field(repr=False)
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._rows(batches))

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        io, metadata = self.source.io, self.source.metadata
        try:
            for number in (number for batch in batches for number in batch.column(0).to_pylist()):
                file = StoredFile(io, metadata, self.files[number])
                for rows in file.live_rows(metadata.schema()):
                    yield cast_to_schema(rows, self.schema, self._refuse)
        except TableRefusedError:
            raise
        except Exception as error:
            raise translate_error(
                error, self.source.table, "a data file cannot be read", io.properties
            ) from None

    def _refuse(self, reason: str) -> Exception:
        return TableRefusedError(
            f"the Iceberg table {self.source.table} has columns of other types than the queue: {reason}. "
            "Read it with an engine for Iceberg tables, and add QueueExport.newer_rows",
            condition="TABLE_REFUSED.READ_WITH_ICEBERG",
            table=self.source.table,
        )
