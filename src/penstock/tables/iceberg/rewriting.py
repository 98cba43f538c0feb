"""Edits of stored rows, by copy on write or by position deletes.

The driver picks the files that may have keys of the micro-batch. A task reads the key columns of such a file.
If the micro-batch changes a few rows of a large file, the task lists their positions in a delete file, which
the commit adds, and rows with a new value are written to other data files. Otherwise the task reads all
columns and writes the remaining rows, with their new values, to a new file, which replaces the old one. All
changes are in the same snapshot as the new rows.
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

from penstock.tables.changes.lookup_keys import LookupKeys
from penstock.tables.changes.merge_plan import with_row_numbers
from penstock.tables.iceberg.data_files import FileTarget, cast_to_file_schema, write_data_files
from penstock.tables.iceberg.keys import read_all_keys
from penstock.tables.iceberg.moved_rows import MoveRowsTask, StagedRowsFile, assign_rows, stage_rows
from penstock.tables.iceberg.numbered_tasks import NumberedTask
from penstock.tables.iceberg.position_deletes import (
    PositionDeletes,
    should_delete_by_position,
    superseded_deletes,
    write_position_deletes,
)
from penstock.tables.iceberg.reading import StoredFile, file_identity
from penstock.tables.iceberg.reports import from_report, to_report

_STORED_ROW, _UPDATE_ROW = "_penstock_row", "_penstock_other"


@dataclass(frozen=True)
class FileEdit:
    """The changes to the live rows of one data file."""

    is_kept: NDArray[np.bool_]
    """For each row, whether it is kept."""
    changed_positions: NDArray[np.int64]
    """The positions of the rows that are removed or get a new value."""
    field_id: int | None = None
    """The column with new values."""
    new_values: pa.Array | None = None
    """The values of that column for all rows."""


class Edit(ABC):
    """The edit that a micro-batch makes to stored rows."""

    columns: Schema
    """The columns that determine which rows change."""

    @abstractmethod
    def edit_of(self, io: FileIO, stored: pa.Table) -> FileEdit | None:
        """Return the changes to a file, from its ``stored`` columns; None if nothing changes."""


@dataclass
class RemovedRows(Edit):
    """Removal of the rows that have one of the given keys."""

    columns: Schema
    """The key columns."""
    keys: LookupKeys

    def edit_of(self, io: FileIO, stored: pa.Table) -> FileEdit | None:
        return _remove_keys(stored, self.keys)


@dataclass
class ReplacedRows(Edit):
    """Removal of the rows that have a key of the micro-batch; tasks read the keys from its data files."""

    columns: Schema
    """The key columns."""
    staged_paths: Sequence[str] = field(repr=False)
    """The data files with the rows of the micro-batch."""
    _keys: LookupKeys | None = None

    def edit_of(self, io: FileIO, stored: pa.Table) -> FileEdit | None:
        if self._keys is None:
            self._keys = LookupKeys(read_all_keys(io, self.staged_paths, self.columns))
        return _remove_keys(stored, self._keys)


@dataclass
class ChangedValues(Edit):
    """New values of the last column, for rows that the other columns identify."""

    columns: Schema
    rows: pa.Table = field(repr=False)
    """The same columns, with the new values."""

    def edit_of(self, io: FileIO, stored: pa.Table) -> FileEdit | None:
        *names, value_column = stored.column_names
        updates = self.rows.rename_columns([*names, value_column])
        stored_keys = with_row_numbers(stored.select(names), _STORED_ROW)
        updated_keys = with_row_numbers(updates.select(names), _UPDATE_ROW)
        matched = stored_keys.join(updated_keys, keys=names, join_type="inner")
        if not matched.num_rows:
            return None
        take_from, positions = np.arange(stored.num_rows), matched[_STORED_ROW].to_numpy()
        take_from[positions] = stored.num_rows + matched[_UPDATE_ROW].to_numpy()
        values = pa.chunked_array(
            [*stored[value_column].chunks, *updates[value_column].chunks], stored[value_column].type
        )
        field_id = self.columns.fields[-1].field_id
        is_kept, values = np.ones(stored.num_rows, np.bool_), values.take(take_from).combine_chunks()
        return FileEdit(is_kept, np.unique(positions), field_id, values)


def _remove_keys(stored: pa.Table, keys: LookupKeys) -> FileEdit | None:
    removed_positions = keys.positions_in(stored)
    if not len(removed_positions):
        return None
    is_kept = np.ones(stored.num_rows, np.bool_)
    is_kept[removed_positions] = False
    return FileEdit(is_kept, removed_positions)


@dataclass(frozen=True)
class RewrittenFile:
    """A data file in which a micro-batch changes rows."""

    old_file: DataFile
    new_files: tuple[DataFile, ...]
    """The files that replace it; empty if no rows are left."""
    delete_file: DataFile | None
    """The delete file with the positions of removed rows, if the data file is kept."""
    merged_deletes: tuple[DataFile, ...] = ()
    """Earlier delete files, whose positions are merged into the new one."""
    staged_rows: StagedRowsFile | None = None
    """The removed rows that are stored again with a new value."""

    @property
    def paths(self) -> list[str]:
        """The files that were written."""
        return [file.file_path for file in (*self.new_files, self.delete_file) if file is not None]


@dataclass
class Rewriter:
    """Rewriter of data files for a micro-batch; later attempts to commit reuse its results."""

    spark: SparkSession
    edit: Edit
    tasks_retried: bool = False
    """Whether a task was retried."""
    _outcomes: dict[object, RewrittenFile | None] = field(default_factory=dict)
    """The outcome for each file identity and schema; None if the micro-batch changes none of its rows."""
    _moved_files: dict[object, list[DataFile]] = field(default_factory=dict)
    """The data files with the staged rows, by the set of staged files."""

    def rewrite(self, target: FileTarget, files: Sequence[FileScanTask]) -> list[RewrittenFile]:
        """Rewrite the files of a plan in which the micro-batch changes rows."""
        schema_id = target.metadata.current_schema_id
        unprocessed = [file for file in files if (schema_id, file_identity(file)) not in self._outcomes]
        task = RewriteTask(target, self.edit, unprocessed)
        for file, report in zip(unprocessed, task.reports(self.spark, len(unprocessed)), strict=True):
            self.tasks_retried |= report.attempt > 0
            self._outcomes[schema_id, file_identity(file)] = _outcome_from_report(
                target, file, json.loads(report.result)
            )
        outcomes = (self._outcomes[schema_id, file_identity(file)] for file in files)
        return [rewritten for rewritten in outcomes if rewritten is not None]

    def move_rows(self, target: FileTarget, rewritten: Sequence[RewrittenFile]) -> list[DataFile]:
        """Write the rows that are stored again with a new value to data files; return the files."""
        staged_files = [rewrite.staged_rows for rewrite in rewritten if rewrite.staged_rows is not None]
        key = frozenset(rewrite.path for rewrite in staged_files)
        if staged_files and key not in self._moved_files:
            parts, files = assign_rows(staged_files), []
            for report in MoveRowsTask(target, parts).reports(self.spark, len(parts)):
                self.tasks_retried |= report.attempt > 0
                files += from_report(target, report.result)
            self._moved_files[key] = files
        return self._moved_files.get(key, [])

    @property
    def paths(self) -> list[str]:
        """All files that were written, including those of plans that were not committed."""
        moved = [file.file_path for files in self._moved_files.values() for file in files]
        return [*moved, *(path for outcome in self._outcomes.values() if outcome for path in outcome.paths)]

    @property
    def staged_paths(self) -> list[str]:
        """All files with staged rows."""
        return [
            outcome.staged_rows.path for outcome in self._outcomes.values() if outcome and outcome.staged_rows
        ]


def _outcome_from_report(
    target: FileTarget, file: FileScanTask, report: dict[str, Any]
) -> RewrittenFile | None:
    """Return the outcome that a task reports for a file; None if the file is unchanged."""
    if "files" in report:
        return RewrittenFile(file.file, tuple(from_report(target, report["files"].encode())), None)
    if "deletes" not in report:
        return None
    deletes = PositionDeletes(**report["deletes"]).as_delete_file(file.file)
    moved = StagedRowsFile(**report["moved"]) if "moved" in report else None
    return RewrittenFile(file.file, (), deletes, tuple(superseded_deletes(file)), moved)


@dataclass
class RewriteTask(NumberedTask):
    """Task that rewrites numbered files and reports the outcome of each, which is empty if unchanged."""

    target: FileTarget = field(repr=False)
    edit: Edit = field(repr=False)
    files: Sequence[FileScanTask] = field(repr=False)

    def failure_of(self, number: int) -> str:
        return f"the file {self.files[number].file.file_path} cannot be rewritten"

    def result(self, number: int) -> bytes:
        target, columns = self.target, self.edit.columns
        file = StoredFile(target.io, target.metadata, self.files[number])
        schema = schema_to_pyarrow(columns, include_field_ids=False)
        edit = self.edit.edit_of(target.io, pa.Table.from_batches(file.live_rows(columns), schema))
        return json.dumps({} if edit is None else self._report(file, edit)).encode()

    def _report(self, file: StoredFile, edit: FileEdit) -> dict[str, Any]:
        """Write an edited copy of the file, or a delete file and staged rows with a new value."""
        target = self.target
        if not should_delete_by_position(target, file.task, len(edit.is_kept), len(edit.changed_positions)):
            rows = self._edited_rows(file, edit, edit.is_kept)
            return {
                "files": to_report(
                    target, write_data_files(target, rows) if edit.is_kept.any() else []
                ).decode()
            }
        positions, report = file.live_positions(), {}
        _require_rows(len(edit.is_kept), len(positions))
        if edit.new_values is not None:
            is_changed = np.zeros(len(edit.is_kept), np.bool_)
            is_changed[edit.changed_positions] = True
            report["moved"] = asdict(stage_rows(target, self._edited_rows(file, edit, is_changed)))
        deleted = np.union1d(
            file.deleted_positions(superseded_deletes(file.task)), positions[edit.changed_positions]
        )
        return {**report, "deletes": asdict(write_position_deletes(target, file.task.file, deleted))}

    def _edited_rows(
        self, file: StoredFile, edit: FileEdit, is_selected: NDArray[np.bool_]
    ) -> Iterator[pa.Table]:
        """Yield the selected rows of a file, with their new values."""
        target, start = self.target, 0
        schema = target.metadata.schema()
        ids = [column.field_id for column in schema.fields]
        for batch in file.live_rows(schema):
            mask = pa.array(is_selected[start : start + batch.num_rows])
            columns = list(batch.columns)
            if edit.new_values is not None and edit.field_id is not None:
                columns[ids.index(edit.field_id)] = edit.new_values.slice(start, batch.num_rows)
            start += batch.num_rows
            yield cast_to_file_schema(target, [column.filter(mask) for column in columns])
        _require_rows(len(edit.is_kept), start)


def _require_rows(expected: int, actual: int) -> None:
    if actual != expected:
        raise RuntimeError(f"it had {expected} rows, and {actual} when it was read again")
