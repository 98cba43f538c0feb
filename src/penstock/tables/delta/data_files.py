"""Data files that tasks write for a Delta table, and their reports to the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.tables.delta.statistics import FileStatistics

BATCH_ROWS = 65_536
_SAMPLE_ROWS = 8192
REPORT_DDL = "file string, rows bigint, size bigint, statistics string, query string"
_REPORT_SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("statistics", pa.string()),
        ("query", pa.string()),
    ]
)


class UnreadableFile(Exception):
    """Penstock cannot read or replace a file of another writer, so deltalake has to commit."""


@dataclass(frozen=True)
class DataFile:
    """A file that a task has written."""

    path: str
    """The path within the table's folder."""
    rows: int
    size: int
    statistics: str
    """The JSON of the add action's ``stats``, for the indexed columns of the table."""

    def add_action(self) -> Any:
        """Return deltalake's ``AddAction``."""
        return import_deltalake("deltalake.transaction").AddAction(
            path=self.path,
            size=self.size,
            partition_values={},
            modification_time=time.time_ns() // 1_000_000,
            data_change=True,
            stats=self.statistics,
        )

    def log_action(self) -> dict[str, Any]:
        """Return the same action as it is written in the log."""
        return {
            "add": {
                "path": self.path,
                "partitionValues": {},
                "size": self.size,
                "modificationTime": time.time_ns() // 1_000_000,
                "dataChange": True,
                "stats": self.statistics,
            }
        }


def file_report(file: DataFile | None, query: str | None) -> pa.RecordBatch:
    """Return a task's report: the file that it wrote, if any, and the id of its query."""
    values = (None, 0, 0, None) if file is None else (file.path, file.rows, file.size, file.statistics)
    columns = dict(zip(_REPORT_SCHEMA.names, ([value] for value in (*values, query)), strict=True))
    return pa.RecordBatch.from_pydict(columns, schema=_REPORT_SCHEMA)


def files_from_reports(reports: Sequence[Any]) -> list[DataFile]:
    """Return the files in collected reports."""
    return [
        DataFile(report.file, report.rows, report.size, report.statistics)
        for report in reports
        if report.file is not None
    ]


def write_file(
    location: DeltaLocation,
    path: str,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    indexed: Sequence[str],
) -> DataFile | None:
    """Write batches to a file in the table's folder; return None without batches.

    ``indexed`` are the columns that get statistics.
    """
    first = next(batches, None)
    if first is None:
        return None
    statistics = FileStatistics.of(schema, indexed)
    with (
        location.translating_errors(untranslated=(UnreadableFile,)),
        location.files().open_output_stream(path, buffer_size=1 << 20) as out,
    ):
        with pq.ParquetWriter(
            out,
            schema,
            compression="zstd",
            use_dictionary=_dictionary_columns(first),
            write_statistics=_footer_statistics_columns(schema),
        ) as writer:
            batch: pa.RecordBatch | None = first
            while batch is not None:
                statistics.add(batch)
                writer.write_batch(batch)
                batch = next(batches, None)
        size = out.tell()
    return DataFile(path, statistics.rows, size, statistics.to_json())


def _dictionary_columns(batch: pa.RecordBatch) -> list[str] | bool:
    """Return the columns to dictionary-encode, whose values repeat; others would get slower and larger."""
    sample = batch.slice(0, _SAMPLE_ROWS)
    names = [
        field.name
        for field, column in zip(sample.schema, sample.columns, strict=True)
        if not pat.is_nested(field.type) and 2 * pc.count_distinct(column).as_py() <= sample.num_rows
    ]
    return names or False


def _footer_statistics_columns(schema: pa.Schema) -> list[str] | bool:
    """Return the columns with row group statistics in the footer.

    Floating-point columns get none: Arrow leaves NaN out of the bounds, so readers that sort NaN after all
    numbers would skip it.
    """
    names = [field.name for field in schema if not (pat.is_floating(field.type) or pat.is_nested(field.type))]
    return names or False


def read_file(location: DeltaLocation, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a file that a task has written, in the order and types of a schema."""
    with location.files().open_input_file(path) as file:
        for batch in pq.ParquetFile(file).iter_batches(BATCH_ROWS, columns=schema.names):
            yield batch.select(schema.names).cast(schema)
