"""Stored rows that get another value, and so leave their data file by position.

The task that finds such rows in a data file stages them with the new value. Others write what was staged to
data files, so that few files come of changes in many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.tables.iceberg.data_files import FileTarget, gathered, written
from penstock.tables.iceberg.numbered_tasks import NumberedTask, divided
from penstock.tables.iceberg.reports import to_report

_TASK_ROWS = 1 << 20
"""How many rows are the work of a task."""


@dataclass(frozen=True)
class StagedRows:
    """A file of rows that no snapshot will have."""

    path: str
    rows: int


def staged(target: FileTarget, parts: Iterable[pa.Table]) -> StagedRows:
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
    return StagedRows(path, rows)


def divided_rows(files: Sequence[StagedRows]) -> list[list[StagedRows]]:
    """Divide staged files into the work of tasks: each writes a data file at least."""
    return divided(files, lambda file: file.rows, _TASK_ROWS)


@dataclass
class MoveTask(NumberedTask):
    """Takes numbers of tasks, and reports the data files with the staged rows of each."""

    target: FileTarget = field(repr=False)
    parts: Sequence[Sequence[StagedRows]] = field(repr=False)
    what = "a data file cannot be written"

    def result(self, number: int) -> bytes:
        rows = gathered(self._batches(self.parts[number]))
        schema = self.target.arrow_schema
        return to_report(self.target, written(self.target, (each.cast(schema) for each in rows)))

    def _batches(self, files: Sequence[StagedRows]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with self.target.io.new_input(file.path).open() as stream:
                yield from pq.ParquetFile(stream).iter_batches()
