"""Rows with a key of a micro-batch leave the data files of a Delta table: tasks copy the files without them,
or list them in deletion vectors.

Stored files never change, so what a task found in one, with its vector, holds for each later try to commit.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from penstock.lake.deletion_vectors import DamagedVector, DeletionVector, Positions
from penstock.lake.new_files import can_create
from penstock.lake.parquet import Piece, completed, fitted, read_piece
from penstock.lake.storage import library
from penstock.tables.changes.merge_plan import numbered
from penstock.tables.delta.data_files import DataFile, UnreadableFile
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.log_files import LogFiles
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.delta.vectors import (
    add_with_vector,
    gets_vectors,
    is_worth_a_vector,
    may_have_vectors,
    remove_action,
    vector_of,
    written_vector,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

_NUMBER = "_penstock_number"
_OUTCOME = "number bigint, outcome string, file string, rows bigint, size bigint, statistics string"
_OUTCOME += ", vector string"
_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("outcome", pa.string()),
        ("file", pa.string()),
        ("rows", pa.int64()),
        ("size", pa.int64()),
        ("statistics", pa.string()),
        ("vector", pa.string()),
    ]
)
_UNTOUCHED, _REWRITTEN, _MARKED, _UNREADABLE = "untouched", "rewritten", "marked", "unreadable"
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_.=-]+")


Identity = tuple[str, DeletionVector | None]


@dataclass(frozen=True)
class Stored:
    """A data file of the table."""

    path: str
    size: int
    add: dict[str, Any] | None = None
    """Its add action, of a table whose files may have deletion vectors."""

    @property
    def vector(self) -> DeletionVector | None:
        return None if self.add is None else vector_of(self.add)

    @property
    def identity(self) -> Identity:
        """What its live rows depend on."""
        return self.path, self.vector

    def remove_action(self) -> Any:
        """Return deltalake's ``RemoveAction``."""
        return library("deltalake.transaction").RemoveAction(
            path=self.path,
            data_change=True,
            deletion_timestamp=time.time_ns() // 1_000_000,
            size=self.size,
            partition_values={},
        )


@dataclass(frozen=True)
class Change:
    """What takes the place of a stored file; nothing if none of its rows stays."""

    copy: DataFile | None = None
    vector: DeletionVector | None = None


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
    """The stored files that change with a micro-batch, over all tries to commit it."""

    spark: SparkSession
    stage: DeltaStage
    files: Sequence[DataFile]
    """The files with the micro-batch's rows."""
    known: dict[tuple[Identity, bool], Change | None] = field(default_factory=dict)
    """What becomes of a file, which may get a vector or not; None if it has no key of the micro-batch."""
    log: LogFiles = field(init=False)

    def __post_init__(self) -> None:
        self.log = LogFiles(self.stage.place)

    def replacement(self, table: DeltaTable) -> Replacement:
        """Return the stored files with a key of the micro-batch, and what takes their place."""
        with self.stage.place.translating_errors(beside=(UnreadableFile, _conflict())):
            stored = may_share_keys(table, self.files, self.stage)
            if may_have_vectors(table):
                adds = self.log.adds(table.version(), [file.path for file in stored])
                stored = [Stored(file.path, file.size, adds[file.path]) for file in stored]
            marks = gets_vectors(table, self.stage.place)
        if any(file.vector for file in stored) and not can_create(self.stage.place):
            raise UnreadableFile
        new = [file for file in stored if (file.identity, marks) not in self.known]
        if not all(_PLAIN_PATH.fullmatch(file.path) for file in new):
            # Of others it is not certain that the log has them in the same form.
            raise UnreadableFile
        self._rewrite(new, marks)
        changes = ((file, self.known[file.identity, marks]) for file in stored)
        return Replacement([(file, change) for file, change in changes if change is not None])

    def _rewrite(self, stored: Sequence[Stored], marks: bool) -> None:
        if not stored:
            return
        task = RewriteTask(self.stage, tuple(stored), tuple(self.files), marks)
        for report in task.job(self.spark, len(stored), _OUTCOME).collect():
            if report.outcome == _UNREADABLE:
                raise UnreadableFile
            self.known[stored[report.number].identity, marks] = _change(report)


def _change(report: Any) -> Change | None:
    if report.outcome == _UNTOUCHED:
        return None
    if report.outcome == _MARKED:
        return Change(vector=DeletionVector.of(json.loads(report.vector)))
    file = report.file and DataFile(report.file, report.rows, report.size, report.statistics)
    return Change(file)


def _conflict() -> type[Exception]:
    conflict: type[Exception] = library("deltalake.exceptions").CommitFailedError
    return conflict


def may_share_keys(table: DeltaTable, files: Sequence[DataFile], stage: DeltaStage) -> list[Stored]:
    """Return the data files of a table whose statistics do not exclude the keys in some files."""
    actions = pa.table(table.get_add_actions(flatten=True))
    near = pa.repeat(False, actions.num_rows)
    for file in files:
        apart = pa.repeat(False, actions.num_rows)
        bounds = json.loads(file.statistics, parse_int=str)
        for key in stage.layout.keys:
            kind = stage.layout.schema.field(key).type
            low, high = (bounds.get(part, {}).get(key) for part in ("minValues", "maxValues"))
            least, most = (_column(actions, f"{part}.{key}", kind) for part in ("min", "max"))
            if _is_ordered(kind) and low is not None and high is not None:
                # Upper bounds that writers cut off, after milliseconds or 32 characters, are compared with
                # lower ones that are cut off there too.
                below = pc.less(most, pa.scalar(low).cast(kind))
                above = pc.greater(least, pa.scalar(high).cast(kind))
                apart = pc.or_(apart, pc.fill_null(pc.or_kleene(below, above), False))
        near = pc.or_(near, pc.invert(apart))
    chosen = actions.filter(near)
    sizes = zip(chosen["path"].to_pylist(), chosen["size_bytes"].to_pylist(), strict=True)
    return [Stored(path, size) for path, size in sizes]


def _is_ordered(kind: pa.DataType) -> bool:
    """Whether all writers give bounds of a type of key that can be compared."""
    return any(test(kind) for test in (pat.is_integer, pat.is_date, pat.is_string, pat.is_timestamp))


def _column(actions: pa.Table, name: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return bounds of stored files, null where they have none."""
    if name not in actions.column_names:
        return pa.chunked_array([pa.nulls(actions.num_rows, kind)])
    return actions[name].cast(kind)


@dataclass
class RewriteTask(FileTask):
    """Takes numbers of stored files, and reports what became of each."""

    stage: DeltaStage = field(repr=False)
    stored: tuple[Stored, ...] = field(repr=False)
    files: tuple[DataFile, ...]
    """The files with the micro-batch's rows."""
    marks: bool
    """Whether files may get deletion vectors."""
    _keys: pa.Table | None = field(default=None, init=False, repr=False)

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        if self._keys is None:
            self._keys = self.stage.columns(self.files, self.stage.layout.keys)
        row: dict[str, object] = {"number": number}
        try:
            change = self._changed(self.stored[number], self._keys)
        except (UnreadableFile, DamagedVector):
            row |= {"outcome": _UNREADABLE}
        else:
            row |= _report(change)
        yield pa.RecordBatch.from_pylist([row], schema=_SCHEMA)

    def _changed(self, file: Stored, keys: pa.Table) -> Change | None:
        stored = pa.Table.from_batches(self._read(file.path, keys.schema), keys.schema)
        leaves = np.array(_have_key(stored, keys), np.bool_)
        gone = self._deleted(file, len(leaves))
        leaves[gone] = False
        if not leaves.any():
            return None
        del stored
        deleted = np.union1d(np.flatnonzero(leaves), gone)
        if self.marks and is_worth_a_vector(file.add, len(leaves), len(deleted)):
            return Change(vector=written_vector(self.stage.place, deleted))
        kept = np.ones(len(leaves), np.bool_)
        kept[deleted] = False
        return Change(self.stage.write(_filtered(self._read(file.path, self.stage.layout.schema), kept)))

    def _deleted(self, file: Stored, rows: int) -> Positions:
        """Return the positions of the rows that are deleted already, of a file with so many rows."""
        if file.vector is None:
            return np.empty(0, np.int64)
        found = file.vector.positions(self.stage.place.files())
        if len(found) and found[-1] >= rows:
            raise UnreadableFile
        return found

    def _read(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield some columns of a stored file, null where it does not have them."""
        with self.stage.place.files().open_input_file(path) as source:
            for batch in read_piece(source, Piece(), schema.names):
                yield completed(fitted(batch, schema, UnreadableFile), schema)


def _report(change: Change | None) -> dict[str, object]:
    if change is None:
        return {"outcome": _UNTOUCHED}
    if change.vector is not None:
        return {"outcome": _MARKED, "vector": json.dumps(change.vector.action)}
    file = change.copy
    if file is None:
        return {"outcome": _REWRITTEN}
    return {
        "outcome": _REWRITTEN,
        "file": file.path,
        "rows": file.rows,
        "size": file.size,
        "statistics": file.statistics,
    }


def _filtered(batches: Iterable[pa.RecordBatch], kept: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    at = 0
    for batch in batches:
        rows = batch.filter(pa.array(kept[at : at + batch.num_rows]))
        at += batch.num_rows
        if rows.num_rows:
            yield rows


def _have_key(stored: pa.Table, keys: pa.Table) -> pa.ChunkedArray:
    """Return for each stored row whether its key is among the keys; a null is no key."""
    if keys.num_columns > 1:
        rows = numbered(stored, _NUMBER)
        matched = rows.join(keys, keys=keys.column_names, join_type="left semi")[_NUMBER]
        return pc.is_in(rows[_NUMBER], value_set=matched)
    column, values = stored.column(0), keys.column(0)
    if len(values) > len(column):
        # The smaller side makes the hash table.
        values = values.filter(pc.is_in(values, value_set=column))
    return pc.is_in(column, value_set=values)
