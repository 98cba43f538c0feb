"""Stored rows that get a new value: they are deleted by position from their data file and stored again.

The task that finds such rows in a data file stages them with the new value. Other tasks write the staged rows
to data files, so that changes in many files result in few new files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.tables.iceberg.data_files import FileTarget, to_row_groups, write_data_files
from penstock.tables.iceberg.numbered_tasks import NumberedTask, assign_to_tasks
from penstock.tables.iceberg.reports import to_report

_TASK_ROWS = 1 << 20
"""The number of rows that a task writes."""


@dataclass(frozen=True)
class StagedRowsFile:
    """A file of staged rows, which no snapshot will refer to."""

    path: str
    rows: int


def stage_rows(target: FileTarget, parts: Iterable[pa.Table]) -> StagedRowsFile:
    """Stage rows in the target's Arrow schema."""
    path = target.new_path()
    rows = 0
    with (
        target.io.new_output(path).create(overwrite=True) as out,
        pq.ParquetWriter(out, target.arrow_schema, compression="zstd") as writer,
    ):
        for part in parts:
            if part.num_rows:
                writer.write_table(part)
                rows += part.num_rows
    return StagedRowsFile(path, rows)


def assign_rows(files: Sequence[StagedRowsFile]) -> list[list[StagedRowsFile]]:
    """Divide staged files among tasks; each task writes at least one data file."""
    return assign_to_tasks(files, lambda file: file.rows, _TASK_ROWS)


@dataclass
class MoveRowsTask(NumberedTask):
    """Task that writes the staged rows of numbered parts to data files, and reports the files."""

    target: FileTarget = field(repr=False)
    parts: Sequence[Sequence[StagedRowsFile]] = field(repr=False)
    failed_action = "a data file cannot be written"

    def result(self, number: int) -> bytes:
        rows = to_row_groups(self._batches(self.parts[number]))
        schema = self.target.arrow_schema
        return to_report(
            self.target, write_data_files(self.target, (row_group.cast(schema) for row_group in rows))
        )

    def _batches(self, files: Sequence[StagedRowsFile]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with self.target.io.new_input(file.path).open() as stream:
                yield from pq.ParquetFile(stream).iter_batches()
