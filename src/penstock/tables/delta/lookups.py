"""Lookups of stored rows by key: tasks search the data files of a Delta table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.lake.parquet import FileSplit, split_file
from penstock.tables.changes.wanted_keys import WantedKeys, as_stream, from_stream
from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.leaving_rows import bounds_of
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import Identity, Stored, StoredFiles
from penstock.tables.delta.stored_rows import StoredRows

_FOUND = "number bigint, lines binary"
_SCHEMA = pa.schema([("number", pa.int64()), ("lines", pa.binary())])
_FEW_BYTES = 1 << 20
"""The size up to which the driver searches files itself."""
_PIECE_BYTES = 32 << 20
POSITION = "_penstock_position"
Found = tuple[Stored, pa.Table]
"""A file, and the rows found in it, with their positions in the column ``POSITION``."""


@dataclass
class Lookup:
    """The stored rows of some keys, cached per file over all attempts to commit, since files never change."""

    spark: SparkSession
    stage: DeltaStage
    keys: pa.Table = field(repr=False)
    schema: pa.Schema
    """The columns of the rows, with the keys first."""
    known: dict[Identity, pa.Table] = field(default_factory=dict)

    def found(self, stored: StoredFiles) -> list[Found]:
        """Return the rows with the keys, for each file that may have such rows.

        Raises
        ------
        UnreadableFile
            When only deltalake can read one of the files.
        """
        files = stored.near(self.keys.schema, bounds_of(self.keys))
        self._look_up([file for file in files if file.identity not in self.known])
        return [(file, self.known[file.identity]) for file in files]

    def rows(self, stored: StoredFiles) -> pa.Table:
        """Return the rows with the keys, from all files."""
        found = (rows.select(self.schema.names) for _, rows in self.found(stored))
        return pa.concat_tables([self.schema.empty_table(), *found])

    def _look_up(self, files: Sequence[Stored]) -> None:
        if not files:
            return
        # Large pieces first, so that all tasks end at about the same time.
        parts = [
            (file, split)
            for file in sorted(files, key=lambda file: -file.size)
            for split in split_file(file.size, _PIECE_BYTES)
        ]
        task = LookupTask(self.stage, parts, self.keys, self.schema)
        if sum(file.size for file in files) <= _FEW_BYTES:
            with self.stage.place.translating_errors(beside=(UnreadableFile,)):
                found = [(number, task.lines(number)) for number in range(len(parts))]
        else:
            reports = task.job(self.spark, len(parts), _FOUND).collect()
            if any(report.lines is None for report in reports):
                raise UnreadableFile
            found = [(report.number, from_stream(report.lines)) for report in reports]
        by_file: dict[Identity, list[pa.Table]] = {}
        for number, lines in sorted(found, key=lambda each: each[0]):
            by_file.setdefault(parts[number][0].identity, []).append(lines)
        self.known |= {file: pa.concat_tables(lines) for file, lines in by_file.items()}


@dataclass
class LookupTask(FileTask):
    """Task that takes the numbers of parts of files, and returns their rows with one of the keys."""

    stage: DeltaStage = field(repr=False)
    parts: Sequence[tuple[Stored, FileSplit]] = field(repr=False)
    keys: pa.Table = field(repr=False)
    schema: pa.Schema

    @cached_property
    def _wanted(self) -> WantedKeys:
        return WantedKeys(self.keys)

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        try:
            lines = as_stream(self.lines(number))
        except UnreadableFile:
            lines = None
        yield pa.RecordBatch.from_pydict({"number": [number], "lines": [lines]}, schema=_SCHEMA)

    def lines(self, number: int) -> pa.Table:
        """Return the live rows of a part that have one of the keys, with their positions."""
        file, split = self.parts[number]
        found = StoredRows(self.stage.place, file).with_keys(self._wanted, self.schema, split)
        lines = [rows.append_column(POSITION, pa.array(positions)) for positions, rows in found]
        return pa.Table.from_batches(lines, self.schema.append(pa.field(POSITION, pa.int64())))
