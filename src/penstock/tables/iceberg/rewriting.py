"""Changes of stored rows, either by copying data files without the replaced rows or with new values, or by
position deletes.

The driver picks the files that may have keys of the micro-batch. A task reads the key columns of such a file.
If the micro-batch changes a few rows of a large file, the task lists their positions in a delete file, which
the commit adds, and rows with a new value are written to other data files. Otherwise it reads all columns,
and writes the rows to a new file, with which the commit replaces the old one. All changes are in the same
snapshot as the new rows.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyspark.sql import SparkSession

from penstock.tables.changes.merge_plan import numbered
from penstock.tables.changes.wanted_keys import WantedKeys
from penstock.tables.iceberg.data_files import FileTarget, in_schema, written
from penstock.tables.iceberg.keys import all_keys
from penstock.tables.iceberg.moved_rows import MoveTask, StagedRows, divided_rows, staged
from penstock.tables.iceberg.numbered_tasks import NumberedTask
from penstock.tables.iceberg.position_deletes import (
    PositionDeletes,
    delete_by_position,
    merged_deletes,
    written_deletes,
)
from penstock.tables.iceberg.reading import StoredFile, identity
from penstock.tables.iceberg.reports import from_report, to_report

_ROW, _OTHER = "_penstock_row", "_penstock_other"


@dataclass(frozen=True)
class Edited:
    """The changes in one file."""

    kept: NDArray[np.bool_]
    """For each row, whether it is kept."""
    changed: NDArray[np.int64]
    """The positions of the rows that are removed or get a new value."""
    field_id: int | None = None
    """The column with new values."""
    values: pa.Array | None = None
    """The values of all rows in that column."""


class Edit(ABC):
    """The changes that a micro-batch makes to stored rows."""

    columns: Schema
    """The columns that determine which rows change."""

    @abstractmethod
    def of(self, io: FileIO, stored: pa.Table) -> Edited | None:
        """Return the changes in a file with the ``stored`` columns; None if nothing changes."""


@dataclass
class RemovedRows(Edit):
    """Removal of the rows that have one of the given keys."""

    columns: Schema
    """The key columns."""
    keys: WantedKeys

    def of(self, io: FileIO, stored: pa.Table) -> Edited | None:
        return _without(stored, self.keys)


@dataclass
class ReplacedRows(Edit):
    """Removal of the rows that have a key of the micro-batch; tasks read the keys from its data files."""

    columns: Schema
    """The key columns."""
    staged: Sequence[str] = field(repr=False)
    """The data files with the rows of the micro-batch."""
    _keys: WantedKeys | None = None

    def of(self, io: FileIO, stored: pa.Table) -> Edited | None:
        if self._keys is None:
            self._keys = WantedKeys(all_keys(io, self.staged, self.columns))
        return _without(stored, self._keys)


@dataclass
class ChangedValues(Edit):
    """New values in the last column, for the rows that the columns before it identify."""

    columns: Schema
    rows: pa.Table = field(repr=False)
    """The same columns, with the new values."""

    def of(self, io: FileIO, stored: pa.Table) -> Edited | None:
        *names, value = stored.column_names
        changed = self.rows.rename_columns([*names, value])
        left = numbered(stored.select(names), _ROW)
        right = numbered(changed.select(names), _OTHER)
        both = left.join(right, keys=names, join_type="inner")
        if not both.num_rows:
            return None
        source, places = np.arange(stored.num_rows), both[_ROW].to_numpy()
        source[places] = stored.num_rows + both[_OTHER].to_numpy()
        values = pa.chunked_array([*stored[value].chunks, *changed[value].chunks], stored[value].type)
        field_id = self.columns.fields[-1].field_id
        kept, values = np.ones(stored.num_rows, np.bool_), values.take(source).combine_chunks()
        return Edited(kept, np.unique(places), field_id, values)


def _without(stored: pa.Table, keys: WantedKeys) -> Edited | None:
    removed = keys.places_in(stored)
    if not len(removed):
        return None
    kept = np.ones(stored.num_rows, np.bool_)
    kept[removed] = False
    return Edited(kept, removed)


@dataclass(frozen=True)
class Rewritten:
    """A data file in which a micro-batch changes rows."""

    old: DataFile
    new: tuple[DataFile, ...]
    """The files that replace it; empty if no rows are left."""
    deletes: DataFile | None
    """The delete file with the positions of removed rows, if the data file is kept."""
    merged: tuple[DataFile, ...] = ()
    """Earlier delete files whose positions are also in the new one."""
    moved: StagedRows | None = None
    """The removed rows that are stored again with a new value."""

    @property
    def paths(self) -> list[str]:
        """The files that were written."""
        return [file.file_path for file in (*self.new, self.deletes) if file is not None]


@dataclass
class Rewriter:
    """The rewritten files of a micro-batch, reused by later plans while the table has the original files."""

    spark: SparkSession
    edit: Edit
    repeated: bool = False
    """Whether a task was repeated."""
    _known: dict[object, Rewritten | None] = field(default_factory=dict)
    """The outcome for each file with its delete files; None if the micro-batch changes none of its rows."""
    _moved: dict[object, list[DataFile]] = field(default_factory=dict)
    """The data files with the rows of each set of staged files."""

    def rewrite(self, target: FileTarget, files: Sequence[FileScanTask]) -> list[Rewritten]:
        """Rewrite the files of a plan in which the micro-batch changes rows."""
        schema_id = target.metadata.current_schema_id
        unknown = [file for file in files if (schema_id, identity(file)) not in self._known]
        task = RewriteTask(target, self.edit, unknown)
        for file, report in zip(unknown, task.reports(self.spark, len(unknown)), strict=True):
            self.repeated |= report.attempt > 0
            self._known[schema_id, identity(file)] = _reported(target, file, json.loads(report.result))
        found = (self._known[schema_id, identity(file)] for file in files)
        return [rewritten for rewritten in found if rewritten is not None]

    def moved(self, target: FileTarget, rewritten: Sequence[Rewritten]) -> list[DataFile]:
        """Return new data files with the rows that are stored again with a new value."""
        leaving = [each.moved for each in rewritten if each.moved is not None]
        key = frozenset(each.path for each in leaving)
        if leaving and key not in self._moved:
            parts, files = divided_rows(leaving), []
            for report in MoveTask(target, parts).reports(self.spark, len(parts)):
                self.repeated |= report.attempt > 0
                files += from_report(target, report.result)
            self._moved[key] = files
        return self._moved.get(key, [])

    @property
    def paths(self) -> list[str]:
        """All files that were written, including those of plans that were not committed."""
        moved = [file.file_path for files in self._moved.values() for file in files]
        return [*moved, *(path for known in self._known.values() if known for path in known.paths)]

    @property
    def staged_paths(self) -> list[str]:
        """All files with staged rows."""
        return [known.moved.path for known in self._known.values() if known and known.moved]


def _reported(target: FileTarget, file: FileScanTask, report: dict[str, Any]) -> Rewritten | None:
    """Return the outcome that a task reports for a file; None if the file is unchanged."""
    if "files" in report:
        return Rewritten(file.file, tuple(from_report(target, report["files"].encode())), None)
    if "deletes" not in report:
        return None
    deletes = PositionDeletes(**report["deletes"]).of(file.file)
    moved = StagedRows(**report["moved"]) if "moved" in report else None
    return Rewritten(file.file, (), deletes, tuple(merged_deletes(file)), moved)


@dataclass
class RewriteTask(NumberedTask):
    """Task that takes file numbers and reports the outcome of each file; empty for unchanged files."""

    target: FileTarget = field(repr=False)
    edit: Edit = field(repr=False)
    files: Sequence[FileScanTask] = field(repr=False)

    def failure(self, number: int) -> str:
        return f"the file {self.files[number].file.file_path} cannot be rewritten"

    def result(self, number: int) -> bytes:
        target, columns = self.target, self.edit.columns
        file = StoredFile(target.io, target.metadata, self.files[number])
        schema = schema_to_pyarrow(columns, include_field_ids=False)
        edited = self.edit.of(target.io, pa.Table.from_batches(file.live_rows(columns), schema))
        return json.dumps({} if edited is None else self._report(file, edited)).encode()

    def _report(self, file: StoredFile, edited: Edited) -> dict[str, Any]:
        """Write an edited copy of the file, or a delete file and staged rows with a new value."""
        target = self.target
        if not delete_by_position(target, file.task, len(edited.kept), len(edited.changed)):
            rows = self._rows(file, edited, edited.kept)
            return {"files": to_report(target, written(target, rows) if edited.kept.any() else []).decode()}
        positions, report = file.live_positions(), {}
        _require_rows(len(edited.kept), len(positions))
        if edited.values is not None:
            changed = np.zeros(len(edited.kept), np.bool_)
            changed[edited.changed] = True
            report["moved"] = asdict(staged(target, self._rows(file, edited, changed)))
        listed = np.union1d(file.listed(merged_deletes(file.task)), positions[edited.changed])
        return {**report, "deletes": asdict(written_deletes(target, file.task.file, listed))}

    def _rows(self, file: StoredFile, edited: Edited, chosen: NDArray[np.bool_]) -> Iterator[pa.Table]:
        """Yield the chosen rows of a file, with their new values."""
        target, start = self.target, 0
        schema = target.metadata.schema()
        ids = [column.field_id for column in schema.fields]
        for batch in file.live_rows(schema):
            mask = pa.array(chosen[start : start + batch.num_rows])
            columns = list(batch.columns)
            if edited.values is not None and edited.field_id is not None:
                columns[ids.index(edited.field_id)] = edited.values.slice(start, batch.num_rows)
            start += batch.num_rows
            yield in_schema(target, [column.filter(mask) for column in columns])
        _require_rows(len(edited.kept), start)


def _require_rows(expected: int, found: int) -> None:
    if found != expected:
        raise RuntimeError(f"it had {expected} rows, and {found} when it was read again")
