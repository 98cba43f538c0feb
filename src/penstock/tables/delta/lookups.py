"""Lookups of stored rows by key: tasks search the data files of a Delta table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.lake.parquet import FileSplit, split_file
from penstock.tables.changes.lookup_keys import LookupKeys, from_arrow_stream, to_arrow_stream
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.removed_rows import key_bounds
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import FileIdentity, StoredFile, StoredFiles
from penstock.tables.delta.stored_rows import StoredRows

_REPORT_DDL = "number bigint, lines binary"
_REPORT_SCHEMA = pa.schema([("number", pa.int64()), ("lines", pa.binary())])
_DRIVER_BYTES = 1 << 20
"""The total file size up to which the driver searches the files itself."""
_SPLIT_BYTES = 32 << 20
POSITION = "_penstock_position"
FoundRows = tuple[StoredFile, pa.Table]
"""A data file, and the rows found in it, with their positions in the column ``POSITION``."""


@dataclass
class Lookup:
    """Lookup of the stored rows of some keys, cached by file over all attempts, since files never change."""

    spark: SparkSession
    stage: DeltaStage
    keys: pa.Table = field(repr=False)
    schema: pa.Schema
    """The columns of the rows, with the keys first."""
    cached: dict[FileIdentity, pa.Table] = field(default_factory=dict)

    def rows_by_file(self, stored: StoredFiles) -> list[FoundRows]:
        """Return the rows with the keys, for each file that may have such rows.

        Raises
        ------
        UnreadableFile
            When only deltalake can read one of the files.
        """
        files = stored.overlapping(self.keys.schema, key_bounds(self.keys))
        self._look_up([file for file in files if file.identity not in self.cached])
        return [(file, self.cached[file.identity]) for file in files]

    def rows(self, stored: StoredFiles) -> pa.Table:
        """Return the rows with the keys, from all files."""
        tables = (rows.select(self.schema.names) for _, rows in self.rows_by_file(stored))
        return pa.concat_tables([self.schema.empty_table(), *tables])

    def _look_up(self, files: Sequence[StoredFile]) -> None:
        if not files:
            return
        # Large splits first, so that all tasks end at about the same time.
        splits = [
            (file, split)
            for file in sorted(files, key=lambda file: -file.size)
            for split in split_file(file.size, _SPLIT_BYTES)
        ]
        task = LookupTask(self.stage, splits, self.keys, self.schema)
        if sum(file.size for file in files) <= _DRIVER_BYTES:
            with self.stage.location.translating_errors(untranslated=(UnreadableFile,)):
                results = [(number, task.find_rows(number)) for number in range(len(splits))]
        else:
            reports = task.job(self.spark, len(splits), _REPORT_DDL).collect()
            if any(report.lines is None for report in reports):
                raise UnreadableFile
            results = [(report.number, from_arrow_stream(report.lines)) for report in reports]
        by_file: dict[FileIdentity, list[pa.Table]] = {}
        for number, rows in sorted(results, key=lambda result: result[0]):
            by_file.setdefault(splits[number][0].identity, []).append(rows)
        self.cached |= {file: pa.concat_tables(rows) for file, rows in by_file.items()}


@dataclass
class LookupTask(FileTask):
    """Task that returns the rows of numbered file splits that have one of the keys."""

    stage: DeltaStage = field(repr=False)
    splits: Sequence[tuple[StoredFile, FileSplit]] = field(repr=False)
    keys: pa.Table = field(repr=False)
    schema: pa.Schema

    @cached_property
    def _lookup_keys(self) -> LookupKeys:
        return LookupKeys(self.keys)

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        try:
            stream = to_arrow_stream(self.find_rows(number))
        except UnreadableFile:
            stream = None
        yield pa.RecordBatch.from_pydict({"number": [number], "lines": [stream]}, schema=_REPORT_SCHEMA)

    def find_rows(self, number: int) -> pa.Table:
        """Return the live rows of a split that have one of the keys, with their positions."""
        file, split = self.splits[number]
        matches = StoredRows(self.stage.location, file).with_keys(self._lookup_keys, self.schema, split)
        batches = [rows.append_column(POSITION, pa.array(positions)) for positions, rows in matches]
        return pa.Table.from_batches(batches, self.schema.append(pa.field(POSITION, pa.int64())))
