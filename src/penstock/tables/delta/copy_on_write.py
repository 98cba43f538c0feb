"""Removal of rows from the data files of a Delta table: tasks copy the files without the rows, or list the
rows in deletion vectors.

Data files never change, so later attempts to commit reuse the result for a file and its vector.
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
from penstock.tables.delta.removed_rows import FileRemovals, RemovedRows
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import FileIdentity, StoredFile, StoredFiles
from penstock.tables.delta.stored_rows import StoredRows
from penstock.tables.delta.vectors import (
    add_with_vector,
    remove_action,
    should_use_vector,
    vectors_enabled,
    write_vector,
)
from penstock.tables.row_encoding import in_chunks

_REPORT_DDL = "number bigint, outcome string, copy string, vector string, moved string"
_REPORT_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("outcome", pa.string()),
        ("copy", pa.string()),
        ("vector", pa.string()),
        ("moved", pa.string()),
    ]
)
_UNCHANGED, _CHANGED, _UNREADABLE = "untouched", "changed", "unreadable"


@dataclass(frozen=True)
class FileChange:
    """The replacement of a data file; empty if none of its rows are left."""

    copy: DataFile | None = None
    vector: DeletionVector | None = None
    moved: DataFile | None = None
    """A file with the removed rows that are stored again with other values."""


@dataclass(frozen=True)
class Replacement:
    """Data files that a commit removes, and their replacements."""

    changes: Sequence[tuple[StoredFile, FileChange]] = ()

    @property
    def removed(self) -> list[StoredFile]:
        return [file for file, _ in self.changes]

    @property
    def added(self) -> list[DataFile]:
        """The copies, without the removed rows."""
        return [change.copy for _, change in self.changes if change.copy is not None]

    @property
    def moved(self) -> list[DataFile]:
        """The files with removed rows that are stored again with other values."""
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
        """Return the remove and add actions for the replaced files."""
        actions = []
        for file, change in self.changes:
            assert file.add is not None
            actions.append(remove_action(file.add))
            if change.vector is not None:
                actions.append(add_with_vector(file.add, change.vector))
        return actions


@dataclass
class CopyOnWrite:
    """Rewrites of the data files that lose rows, cached over all attempts to commit."""

    spark: SparkSession
    stage: DeltaStage
    cached: dict[tuple[FileIdentity, bool], FileChange | None] = field(default_factory=dict)
    """The change of each file, with and without vectors enabled; None if the file loses no row."""

    def replacement(self, stored: StoredFiles, removed: RemovedRows) -> Replacement:
        """Return the data files that lose rows, and their replacements."""
        location = self.stage.location
        files = removed.files(stored)
        with location.translating_errors():
            use_vectors = vectors_enabled(stored.table, location)
        if any(file.vector for file in files) and not supports_conditional_put(location):
            raise UnreadableFile
        self._rewrite(
            [file for file in files if (file.identity, use_vectors) not in self.cached], removed, use_vectors
        )
        changes = ((file, self.cached[file.identity, use_vectors]) for file in files)
        return Replacement([(file, change) for file, change in changes if change is not None])

    def _rewrite(self, files: Sequence[StoredFile], removed: RemovedRows, use_vectors: bool) -> None:
        if not files:
            return
        largest_first = sorted(files, key=lambda file: -file.size)
        task = RewriteTask(self.stage, largest_first, removed, use_vectors)
        for report in task.job(self.spark, len(files), _REPORT_DDL).collect():
            if report.outcome == _UNREADABLE:
                raise UnreadableFile
            self.cached[largest_first[report.number].identity, use_vectors] = _change_from_report(report)


@dataclass
class RewriteTask(FileTask):
    """Task that rewrites numbered data files, and reports the change of each."""

    stage: DeltaStage = field(repr=False)
    files: Sequence[StoredFile] = field(repr=False)
    removed: RemovedRows = field(repr=False)
    use_vectors: bool
    """Whether files may get deletion vectors."""

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        row: dict[str, object] = {"number": number}
        try:
            change = self._rewrite(StoredRows(self.stage.location, self.files[number]))
        except UnreadableFile:
            row |= {"outcome": _UNREADABLE}
        else:
            row |= _change_report(change)
        yield pa.RecordBatch.from_pylist([row], schema=_REPORT_SCHEMA)

    def _rewrite(self, rows: StoredRows) -> FileChange | None:
        removals, schema = self.removed.in_file(rows), self.stage.layout.schema
        if not len(removals.positions):
            return None
        moved = (
            None
            if removals.new_values is None
            else self.stage.write(in_chunks(self._moved_rows(rows, removals)))
        )
        deleted = np.union1d(removals.positions, rows.deleted)
        if self.use_vectors and should_use_vector(rows.file.add, rows.row_count, len(deleted)):
            return FileChange(vector=write_vector(self.stage.location, deleted), moved=moved)
        kept_positions = np.delete(np.arange(rows.row_count), deleted)
        return FileChange(self.stage.write(rows.at_positions(kept_positions, schema)), moved=moved)

    def _moved_rows(self, rows: StoredRows, removals: FileRemovals) -> Iterator[pa.RecordBatch]:
        """Yield the removed rows with their new values, and the file's values of the other columns."""
        assert removals.new_values is not None
        schema = self.stage.layout.schema
        new_values = removals.new_values.cast(
            pa.schema([schema.field(name) for name in removals.new_values.column_names])
        )
        other_columns = pa.schema([column for column in schema if column.name not in new_values.column_names])
        if not other_columns.names:
            yield from new_values.select(schema.names).to_batches()
            return
        offset = 0
        for batch in rows.at_positions(removals.positions, other_columns):
            table = new_values.slice(offset, batch.num_rows)
            offset += batch.num_rows
            for column in other_columns:
                table = table.append_column(column, batch.column(column.name))
            yield from table.select(schema.names).to_batches()


def _change_report(change: FileChange | None) -> dict[str, object]:
    if change is None:
        return {"outcome": _UNCHANGED}
    copy, moved = (file and json.dumps(asdict(file)) for file in (change.copy, change.moved))
    vector = change.vector and json.dumps(change.vector.action)
    return {"outcome": _CHANGED, "copy": copy, "vector": vector, "moved": moved}


def _change_from_report(report: Any) -> FileChange | None:
    if report.outcome == _UNCHANGED:
        return None
    copy, moved = (text and DataFile(**json.loads(text)) for text in (report.copy, report.moved))
    return FileChange(copy, report.vector and DeletionVector.of(json.loads(report.vector)), moved)
