"""Stored rows of the keys of a micro-batch: of an Iceberg table's data files, and of its record of events."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyspark.sql import SparkSession

from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.numbered_tasks import NumberedTask
from penstock.tables.iceberg.reading import live_rows
from penstock.tables.iceberg.rewriting import identity, rows_with_keys

_FEW_ROWS = 65_536
"""Rows that the driver looks through itself."""


@dataclass
class Lookup:
    """The lines of some keys, over all tries to commit: what a file had stays true while the table has it."""

    spark: SparkSession
    keys: pa.Table = field(repr=False)
    """The keys of the micro-batch."""
    schema: pa.Schema
    """The columns of lines, with the names and types of events."""
    _known: dict[object, pa.Table] = field(default_factory=dict)

    def lines(self, target: FileTarget, files: Sequence[FileScanTask], columns: Schema) -> list[pa.Table]:
        """Return the lines in each of some files; ``columns`` has the stored columns, with the keys first."""
        unknown = [file for file in files if identity(file) not in self._known]
        task = LookupTask(target, self.keys, columns, unknown)
        if sum(file.file.record_count for file in unknown) <= _FEW_ROWS:
            found = [task.translated(number) for number in range(len(unknown))]
        else:
            found = [report.result for report in task.reports(self.spark, len(unknown))]
        for file, lines in zip(unknown, found, strict=True):
            stored = pa.ipc.open_stream(lines).read_all()
            self._known[identity(file)] = stored.rename_columns(self.schema.names).cast(self.schema)
        return [self._known[identity(file)] for file in files]


@dataclass
class LookupTask(NumberedTask):
    """Takes numbers of files, and returns the lines in them as an Arrow stream."""

    target: FileTarget = field(repr=False)
    keys: pa.Table = field(repr=False)
    columns: Schema = field(repr=False)
    """The columns of the lines, with the keys first."""
    files: Sequence[FileScanTask] = field(repr=False)
    what = "stored keys cannot be read"

    def result(self, number: int) -> bytes:
        lines = self.found(number)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, lines.schema) as stream:
            stream.write_table(lines)
        return bytes(sink.getvalue())

    def found(self, number: int) -> pa.Table:
        """Return the rows of a file that have one of the keys."""
        target, count = self.target, self.keys.num_columns
        keys = Schema(*self.columns.fields[:count])
        stored = self._read(number, keys)
        places = rows_with_keys(stored, self.keys)
        if not len(places):
            return schema_to_pyarrow(self.columns, include_field_ids=False).empty_table()
        if len(self.columns.fields) == count:
            return stored.take(places)
        parts, start = [], 0
        for batch in live_rows(target.io, target.metadata, self.files[number], self.columns):
            here = places[(places >= start) & (places < start + batch.num_rows)] - start
            start += batch.num_rows
            parts.append(batch.take(pa.array(here)))
        return pa.Table.from_batches(parts)

    def _read(self, number: int, columns: Schema) -> pa.Table:
        rows = live_rows(self.target.io, self.target.metadata, self.files[number], columns)
        return pa.Table.from_batches(rows, schema_to_pyarrow(columns, include_field_ids=False))


@dataclass
class ValuesTask(LookupTask):
    """Takes numbers of files, and writes the rows in them to a file each; returns its path, empty if none."""

    names: Sequence[str] = ()
    """The columns' names in the file."""
    what = "stored values cannot be read"

    def result(self, number: int) -> bytes:
        rows = self.found(number)
        if not rows.num_rows:
            return b""
        target = self.target
        path = target.locations.new_data_location(f"{target.token}-{uuid.uuid4().hex}.parquet")
        with target.io.new_output(path).create(overwrite=True) as out:
            pq.write_table(rows.rename_columns(list(self.names)), out, compression="zstd")
        return path.encode()
