"""Lookups of a micro-batch's keys in an Iceberg table's data files and in its applied events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyspark.sql import SparkSession

from penstock.tables.changes.lookup_keys import LookupKeys, from_arrow_stream, to_arrow_stream
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.numbered_tasks import NumberedTask
from penstock.tables.iceberg.reading import WHOLE_FILE, FileSplit, StoredFile, file_identity

_DRIVER_ROWS = 65_536
"""The number of rows up to which the driver searches files itself."""
_PART_ROWS = 1 << 21
"""The number of rows above which a file is divided among several tasks."""


@dataclass
class Lookup:
    """Lookup of the stored rows of some keys, cached by file over all attempts, since files never change."""

    spark: SparkSession
    keys: pa.Table = field(repr=False)
    """The keys of the micro-batch."""
    schema: pa.Schema
    """The columns of the rows, with the names and types of the events."""
    _cached: dict[object, pa.Table] = field(default_factory=dict)

    def rows(self, target: FileTarget, files: Sequence[FileScanTask], columns: Schema) -> list[pa.Table]:
        """Return the rows of each file; ``columns`` are the stored columns, with the keys first."""
        uncached = [file for file in files if file_identity(file) not in self._cached]
        parts = [part for file in uncached for part in _parts_of(file)]
        task = LookupTask(target, self.keys, columns, parts)
        if sum(file.file.record_count for file in uncached) <= _DRIVER_ROWS:
            results = [task.run_one(number) for number in range(len(parts))]
        else:
            results = [report.result for report in task.reports(self.spark, len(parts))]
        by_file: dict[object, list[pa.Table]] = {}
        for part, stream in zip(parts, results, strict=True):
            stored = from_arrow_stream(stream)
            in_part = stored.rename_columns(self.schema.names).cast(self.schema)
            by_file.setdefault(file_identity(part.file), []).append(in_part)
        self._cached |= {file: pa.concat_tables(tables) for file, tables in by_file.items()}
        return [self._cached[file_identity(file)] for file in files]


@dataclass(frozen=True)
class FilePart:
    """A split of a data file in which keys are looked up."""

    file: FileScanTask
    part: FileSplit = WHOLE_FILE


def _parts_of(file: FileScanTask) -> list[FilePart]:
    count = max(1, file.file.record_count // _PART_ROWS)
    return [FilePart(file, FileSplit(number, count)) for number in range(count)]


@dataclass
class LookupTask(NumberedTask):
    """Task that returns the rows of numbered parts that have one of the keys, as an Arrow stream."""

    target: FileTarget = field(repr=False)
    keys: pa.Table = field(repr=False)
    columns: Schema = field(repr=False)
    """The columns of the rows, with the keys first."""
    parts: Sequence[FilePart] = field(repr=False)
    failed_action = "stored keys cannot be read"

    @cached_property
    def _lookup_keys(self) -> LookupKeys:
        return LookupKeys(self.keys)

    def result(self, number: int) -> bytes:
        return to_arrow_stream(self.find_rows(number))

    def find_rows(self, number: int) -> pa.Table:
        """Return the rows of a part that have one of the keys."""
        rows = self._stored_file(number).live_rows(self.columns, self.parts[number].part)
        matches = (batch for _, batch in self._lookup_keys.rows_in(rows))
        return pa.Table.from_batches(matches, schema_to_pyarrow(self.columns, include_field_ids=False))

    def _stored_file(self, number: int) -> StoredFile:
        return StoredFile(self.target.io, self.target.metadata, self.parts[number].file)


@dataclass
class ValuesTask(LookupTask):
    """Task that writes the rows of each numbered file that have one of the keys to a new file.

    It returns the new file's path, or an empty result without such rows. Values may be long, so they are read
    only from files that have one of the keys.
    """

    names: Sequence[str] = ()
    """The names of the columns in the new file."""
    failed_action = "stored values cannot be read"

    def find_rows(self, number: int) -> pa.Table:
        file = self._stored_file(number)
        key_columns = Schema(*self.columns.fields[: self.keys.num_columns])
        schema = schema_to_pyarrow(key_columns, include_field_ids=False)
        stored = pa.Table.from_batches(file.live_rows(key_columns), schema)
        positions = self._lookup_keys.positions_in(stored)
        batches, start = [], 0
        for batch in file.live_rows(self.columns) if len(positions) else ():
            in_batch = positions[(positions >= start) & (positions < start + batch.num_rows)] - start
            start += batch.num_rows
            batches.append(batch.take(pa.array(in_batch)))
        return pa.Table.from_batches(batches, schema_to_pyarrow(self.columns, include_field_ids=False))

    def result(self, number: int) -> bytes:
        rows = self.find_rows(number)
        if not rows.num_rows:
            return b""
        target = self.target
        path = target.new_path()
        with target.io.new_output(path).create(overwrite=True) as out:
            pq.write_table(rows.rename_columns(list(self.names)), out, compression="zstd")
        return path.encode()
