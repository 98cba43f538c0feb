"""Removal of rows from the data files of a Delta table: tasks copy the files without the rows, or list the
rows in deletion vectors.

Stored files never change, so results for a file and its vector are reused by later attempts to commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.lake.deletion_vectors import DeletionVector
from penstock.lake.new_files import supports_conditional_put
from penstock.tables.delta.data_files import DataFile, UnreadableFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.leaving_rows import Leaving, LeavingRows
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import Identity, Stored, StoredFiles
from penstock.tables.delta.stored_rows import StoredRows
from penstock.tables.delta.vectors import (
    add_with_vector,
    gets_vectors,
    is_worth_a_vector,
    remove_action,
    written_vector,
)
from penstock.tables.row_encoding import chunked

_OUTCOME = "number bigint, outcome string, copy string, vector string, moved string"
_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("outcome", pa.string()),
        ("copy", pa.string()),
        ("vector", pa.string()),
        ("moved", pa.string()),
    ]
)
_UNTOUCHED, _CHANGED, _UNREADABLE = "untouched", "changed", "unreadable"


@dataclass(frozen=True)
class Change:
    """The replacement of a stored file; empty if none of its rows are left."""

    copy: DataFile | None = None
    vector: DeletionVector | None = None
    moved: DataFile | None = None
    """A file with the removed rows that are stored again with other values."""


@dataclass(frozen=True)
class Replacement:
    """Stored files that a commit removes, and their replacements."""

    changes: Sequence[tuple[Stored, Change]] = ()

    @property
    def removed(self) -> list[Stored]:
        return [file for file, _ in self.changes]

    @property
    def added(self) -> list[DataFile]:
        """The copies, without the removed rows."""
        return [change.copy for _, change in self.changes if change.copy is not None]

    @property
    def moved(self) -> list[DataFile]:
        """The files with rows that are stored again with other values."""
        return [change.moved for _, change in self.changes if change.moved is not None]

    @property
    def vectors(self) -> list[DeletionVector]:
        """The new vectors of files."""
        return [change.vector for _, change in self.changes if change.vector is not None]

    @property
    def has_vectors(self) -> bool:
        """Whether old or new vectors are involved, so that deltalake cannot commit the replacement."""
        return bool(self.vectors) or any(file.vector is not None for file in self.removed)

    def actions(self) -> list[dict[str, Any]]:
        """Return the log actions for the stored files."""
        found = []
        for file, change in self.changes:
            assert file.add is not None
            found.append(remove_action(file.add))
            if change.vector is not None:
                found.append(add_with_vector(file.add, change.vector))
        return found


@dataclass
class CopyOnWrite:
    """The stored files that lose rows, for the same removed rows in all attempts to commit."""

    spark: SparkSession
    stage: DeltaStage
    known: dict[tuple[Identity, bool], Change | None] = field(default_factory=dict)
    """The change of each file, with or without vectors allowed; None if the file loses no row."""

    def replacement(self, stored: StoredFiles, leaving: LeavingRows) -> Replacement:
        """Return the stored files that lose rows, and their replacements."""
        place = self.stage.place
        files = leaving.files(stored)
        with place.translating_errors():
            marks = gets_vectors(stored.table, place)
        if any(file.vector for file in files) and not supports_conditional_put(place):
            raise UnreadableFile
        self._rewrite([file for file in files if (file.identity, marks) not in self.known], leaving, marks)
        changes = ((file, self.known[file.identity, marks]) for file in files)
        return Replacement([(file, change) for file, change in changes if change is not None])

    def _rewrite(self, files: Sequence[Stored], leaving: LeavingRows, marks: bool) -> None:
        if not files:
            return
        largest_first = sorted(files, key=lambda file: -file.size)
        task = RewriteTask(self.stage, largest_first, leaving, marks)
        for report in task.job(self.spark, len(files), _OUTCOME).collect():
            if report.outcome == _UNREADABLE:
                raise UnreadableFile
            self.known[largest_first[report.number].identity, marks] = _change(report)


@dataclass
class RewriteTask(FileTask):
    """Task that takes the numbers of stored files, and reports the change of each."""

    stage: DeltaStage = field(repr=False)
    files: Sequence[Stored] = field(repr=False)
    leaving: LeavingRows = field(repr=False)
    marks: bool
    """Whether files may get deletion vectors."""

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        row: dict[str, object] = {"number": number}
        try:
            change = self._changed(StoredRows(self.stage.place, self.files[number]))
        except UnreadableFile:
            row |= {"outcome": _UNREADABLE}
        else:
            row |= _report(change)
        yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)

    def _changed(self, rows: StoredRows) -> Change | None:
        leaving, schema = self.leaving.of(rows), self.stage.layout.schema
        if not len(leaving.positions):
            return None
        moved = None if leaving.values is None else self.stage.write(chunked(self._moved(rows, leaving)))
        deleted = np.union1d(leaving.positions, rows.deleted)
        if self.marks and is_worth_a_vector(rows.file.add, rows.count, len(deleted)):
            return Change(vector=written_vector(self.stage.place, deleted), moved=moved)
        kept = np.delete(np.arange(rows.count), deleted)
        return Change(self.stage.write(rows.at(kept, schema)), moved=moved)

    def _moved(self, rows: StoredRows, leaving: Leaving) -> Iterator[pa.RecordBatch]:
        """Yield the removed rows with their new values, and the file's values of the other columns."""
        assert leaving.values is not None
        schema = self.stage.layout.schema
        given = leaving.values.cast(pa.schema([schema.field(name) for name in leaving.values.column_names]))
        others = pa.schema([column for column in schema if column.name not in given.column_names])
        if not others.names:
            yield from given.select(schema.names).to_batches()
            return
        at = 0
        for batch in rows.at(leaving.positions, others):
            table = given.slice(at, batch.num_rows)
            at += batch.num_rows
            for column in others:
                table = table.append_column(column, batch.column(column.name))
            yield from table.select(schema.names).to_batches()


def _report(change: Change | None) -> dict[str, object]:
    if change is None:
        return {"outcome": _UNTOUCHED}
    copy, moved = (file and json.dumps(asdict(file)) for file in (change.copy, change.moved))
    vector = change.vector and json.dumps(change.vector.action)
    return {"outcome": _CHANGED, "copy": copy, "vector": vector, "moved": moved}


def _change(report: Any) -> Change | None:
    if report.outcome == _UNTOUCHED:
        return None
    copy, moved = (text and DataFile(**json.loads(text)) for text in (report.copy, report.moved))
    return Change(copy, report.vector and DeletionVector.of(json.loads(report.vector)), moved)
