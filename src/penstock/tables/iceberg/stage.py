"""Staging of a micro-batch for an Iceberg table by tasks, which write data files for the driver to commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext

from penstock.arrow.coerce import conform
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.iceberg.data_files import (
    FileTarget,
    cast_to_file_schema,
    to_row_groups,
    write_data_files,
)
from penstock.tables.iceberg.reports import to_report
from penstock.tables.iceberg.schema import RowLayout, TableLayout
from penstock.tables.row_checks import require_key_value

REPORT_DDL = "files binary, attempt int, query string"
_REPORT_SCHEMA = pa.schema([("files", pa.binary()), ("attempt", pa.int32()), ("query", pa.string())])


@dataclass
class StageTask:
    """Function for ``mapInArrow``, which writes rows to data files and returns a report of them."""

    rows: pa.Schema = field(repr=False)
    layout: TableLayout = field(repr=False)
    target: FileTarget = field(repr=False)

    @classmethod
    def of(cls, rows: RowLayout, layout: TableLayout, target: FileTarget) -> StageTask:
        return cls(rows.schema, layout, target)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(iter(batches)))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        files = write_data_files(self.target, map(self._to_file_schema, to_row_groups(batches)))
        query = context.getLocalProperty("sql.streaming.queryId")
        report = {
            "files": [to_report(self.target, files)],
            "attempt": [context.attemptNumber()],
            "query": [query],
        }
        yield pa.RecordBatch.from_pydict(report, schema=_REPORT_SCHEMA)

    def _to_file_schema(self, part: pa.Table) -> pa.Table:
        # Rows arrive with the columns c0, c1 and so on.
        table = conform(part.rename_columns(self.rows.names), self.rows)
        columns = self.layout.values(table)
        ids = [column.field_id for column in self.layout.schema.fields]
        for key, name in zip(self.layout.keys, self.layout.key_names, strict=True):
            require_key_value(columns[ids.index(key)], name, f"the Iceberg table {self.target.table}")
        return cast_to_file_schema(self.target, columns)
