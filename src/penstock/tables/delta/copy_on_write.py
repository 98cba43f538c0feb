"""Rows leave the data files of a Delta table: tasks copy the files without them, or list them in deletion
vectors.

Stored files never change, so what a task found in one, with its vector, holds for each later try to commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from penstock.lake.deletion_vectors import DeletionVector
from penstock.lake.new_files import can_create
from penstock.tables.delta.data_files import DataFile, UnreadableFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.leaving_rows import LeavingRows
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.stored_files import Identity, Stored, StoredFiles, all_rows, deleted_rows
from penstock.tables.delta.vectors import (
    add_with_vector,
    gets_vectors,
    is_worth_a_vector,
    remove_action,
    written_vector,
)

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
    """What takes the place of a stored file; nothing if none of its rows stays."""

    copy: DataFile | None = None
    vector: DeletionVector | None = None
    moved: DataFile | None = None
    """A file with the rows that leave since they get another value."""


@dataclass(frozen=True)
class Replacement:
    """Stored files that a commit removes, and what takes their place."""

    changes: Sequence[tuple[Stored, Change]] = ()

    @property
    def removed(self) -> list[Stored]:
        return [file for file, _ in self.changes]

    @property
    def added(self) -> list[DataFile]:
        """The copies, without the rows that leave."""
        return [change.copy for _, change in self.changes if change.copy is not None]

    @property
    def moved(self) -> list[DataFile]:
        """The files with rows that get another value."""
        return [change.moved for _, change in self.changes if change.moved is not None]

    @property
    def vectors(self) -> list[DeletionVector]:
        """The new vectors of files."""
        return [change.vector for _, change in self.changes if change.vector is not None]

    @property
    def has_vectors(self) -> bool:
        """Whether deltalake cannot commit it."""
        return bool(self.vectors) or any(file.vector is not None for file in self.removed)

    def actions(self) -> list[dict[str, Any]]:
        """Return the actions of the log on the stored files."""
        found = []
        for file, change in self.changes:
            assert file.add is not None
            found.append(remove_action(file.add))
            if change.vector is not None:
                found.append(add_with_vector(file.add, change.vector))
        return found


@dataclass
class CopyOnWrite:
    """The stored files that lose rows, over all tries to commit."""

    spark: SparkSession
    stage: DeltaStage
    leaving: LeavingRows
    known: dict[tuple[Identity, bool], Change | None] = field(default_factory=dict)
    """What becomes of a file, which may get a vector or not; None if it loses no row."""

    def replacement(self, files: StoredFiles) -> Replacement:
        """Return the stored files that lose rows, and what takes their place."""
        place = self.stage.place
        stored = files.near(self.leaving.keys, self.leaving.bounds)
        with place.translating_errors():
            marks = gets_vectors(files.table, place)
        if any(file.vector for file in stored) and not can_create(place):
            raise UnreadableFile
        self._rewrite([file for file in stored if (file.identity, marks) not in self.known], marks)
        changes = ((file, self.known[file.identity, marks]) for file in stored)
        return Replacement([(file, change) for file, change in changes if change is not None])

    def _rewrite(self, stored: Sequence[Stored], marks: bool) -> None:
        if not stored:
            return
        task = RewriteTask(self.stage, tuple(stored), self.leaving, marks)
        for report in task.job(self.spark, len(stored), _OUTCOME).collect():
            if report.outcome == _UNREADABLE:
                raise UnreadableFile
            self.known[stored[report.number].identity, marks] = _change(report)


@dataclass
class RewriteTask(FileTask):
    """Takes numbers of stored files, and reports what became of each."""

    stage: DeltaStage = field(repr=False)
    stored: tuple[Stored, ...] = field(repr=False)
    leaving: LeavingRows = field(repr=False)
    marks: bool
    """Whether files may get deletion vectors."""

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        row: dict[str, object] = {"number": number}
        try:
            change = self._changed(self.stored[number])
        except UnreadableFile:
            row |= {"outcome": _UNREADABLE}
        else:
            row |= _report(change)
        yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)

    def _changed(self, file: Stored) -> Change | None:
        place, schema = self.stage.place, self.leaving.schema
        stored = pa.Table.from_batches(all_rows(place, file, schema), schema)
        leaves = self.leaving.chosen(stored)
        gone = deleted_rows(place, file)
        if len(gone) and gone[-1] >= len(leaves):
            raise UnreadableFile
        leaves[gone] = False
        if not leaves.any():
            return None
        values = self.leaving.new_values(stored.filter(pa.array(leaves)))
        moved = None if values is None else self.stage.write(self._moved(file, leaves, values))
        deleted = np.union1d(np.flatnonzero(leaves), gone)
        if self.marks and is_worth_a_vector(file.add, len(leaves), len(deleted)):
            return Change(vector=written_vector(place, deleted), moved=moved)
        kept = np.ones(len(leaves), np.bool_)
        kept[deleted] = False
        return Change(self.stage.write(self._rows(file, kept)), moved=moved)

    def _moved(self, file: Stored, leaves: NDArray[np.bool_], values: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file that leave it, with new values of some columns."""
        at = 0
        for batch in self._rows(file, leaves):
            rows = pa.Table.from_batches([batch])
            new = values.slice(at, batch.num_rows)
            at += batch.num_rows
            for column in values.schema:
                number = rows.schema.get_field_index(column.name)
                rows = rows.set_column(number, rows.schema.field(number), new[column.name])
            yield from rows.to_batches()

    def _rows(self, file: Stored, chosen: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        """Yield the chosen rows of a file, with all columns."""
        at = 0
        for batch in all_rows(self.stage.place, file, self.stage.layout.schema):
            rows = batch.filter(pa.array(chosen[at : at + batch.num_rows]))
            at += batch.num_rows
            if rows.num_rows:
                yield rows


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
