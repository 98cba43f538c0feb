"""Stored rows of some keys: tasks look through the data files of a Delta table for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.tables.delta.data_files import UnreadableFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.leaving_rows import bounds_of
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import Identity, Stored, StoredFiles, all_rows, deleted_rows, have_key

_FOUND = "number bigint, lines binary"
_SCHEMA = pa.schema([("number", pa.int64()), ("lines", pa.binary())])
_FEW_BYTES = 1 << 20
"""Files that the driver looks through itself."""


@dataclass
class Lookup:
    """The rows of some keys, over all tries to commit: what a file had stays true while the table has it."""

    spark: SparkSession
    stage: DeltaStage
    keys: pa.Table = field(repr=False)
    schema: pa.Schema
    """The columns of the rows, with the keys first."""
    known: dict[Identity, pa.Table] = field(default_factory=dict)

    def rows(self, stored: StoredFiles) -> pa.Table:
        """Return the rows that a table has of the keys.

        Raises
        ------
        UnreadableFile
            When deltalake has to look for them.
        """
        files = stored.near(self.keys.schema, bounds_of(self.keys))
        self._look_up([file for file in files if file.identity not in self.known])
        found = (self.known[file.identity] for file in files)
        return pa.concat_tables([self.schema.empty_table(), *found])

    def _look_up(self, files: Sequence[Stored]) -> None:
        if not files:
            return
        task = LookupTask(self.stage, tuple(files), self.keys, self.schema)
        if sum(file.size for file in files) <= _FEW_BYTES:
            with self.stage.place.translating_errors(beside=(UnreadableFile,)):
                found = {number: task.lines(number) for number in range(len(files))}
        else:
            found = {}
            for report in task.job(self.spark, len(files), _FOUND).collect():
                if report.lines is None:
                    raise UnreadableFile
                found[report.number] = pa.ipc.open_stream(report.lines).read_all()
        self.known |= {files[number].identity: lines for number, lines in found.items()}


@dataclass
class LookupTask(FileTask):
    """Takes numbers of files, and returns the rows in them with one of the keys as an Arrow stream."""

    stage: DeltaStage = field(repr=False)
    files: tuple[Stored, ...] = field(repr=False)
    keys: pa.Table = field(repr=False)
    schema: pa.Schema

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        try:
            lines = self.lines(number)
        except UnreadableFile:
            yield pa.RecordBatch.from_pydict({"number": [number], "lines": [None]}, schema=_SCHEMA)
            return
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, lines.schema) as stream:
            stream.write_table(lines)
        found = {"number": [number], "lines": [sink.getvalue().to_pybytes()]}
        yield pa.RecordBatch.from_pydict(found, schema=_SCHEMA)

    def lines(self, number: int) -> pa.Table:
        """Return the live rows of a file that have one of the keys."""
        place, file = self.stage.place, self.files[number]
        deleted, names = deleted_rows(place, file), self.keys.column_names
        found, at = [], 0
        for batch in all_rows(place, file, self.schema):
            chosen = have_key(pa.Table.from_batches([batch]).select(names), self.keys)
            first, end = np.searchsorted(deleted, (at, at + batch.num_rows))
            chosen[deleted[first:end] - at] = False
            at += batch.num_rows
            if chosen.any():
                found.append(batch.filter(pa.array(chosen)))
        return pa.Table.from_batches(found, self.schema)
