"""Copies of data files without the rows that a micro-batch replaces: output mode update, copy on write.

The driver picks the files that may have keys of the micro-batch. A task reads the key columns of such a file,
and if one of its keys is in the micro-batch, all its columns, and writes the other rows to a new file. The
commit takes the old file out of the table and puts the new one in, in the same snapshot as the new rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyspark import TaskContext
from pyspark.sql import SparkSession

from penstock.errors import PenstockError
from penstock.spark.error_boundary import iterate_in_worker
from penstock.tables.iceberg.data_files import FileTarget, in_schema, written
from penstock.tables.iceberg.keys import all_keys
from penstock.tables.iceberg.place import translated
from penstock.tables.iceberg.reading import live_rows
from penstock.tables.iceberg.reports import from_report, to_report

_COLUMNS = "number bigint, touched boolean, files binary, attempt int"
_REPORT = pa.schema(
    [("number", pa.int64()), ("touched", pa.bool_()), ("files", pa.binary()), ("attempt", pa.int32())]
)
_ROW = "_penstock_row"


@dataclass(frozen=True)
class Rewritten:
    """A data file that has keys of a micro-batch, and the files that replace it: none if it has no others."""

    old: DataFile
    new: tuple[DataFile, ...]


@dataclass
class Rewriter:
    """The rewritten files of a micro-batch: those of an earlier plan are kept if the table still has them."""

    spark: SparkSession
    staged: Sequence[str]
    """The data files with the rows of the micro-batch."""
    keys: Schema
    repeated: bool = False
    """Whether a task was repeated."""
    _known: dict[tuple[str, frozenset[str]], Rewritten | None] = field(default_factory=dict)
    """What became of each file with its delete files; None if it has no key of the micro-batch."""

    def rewrite(self, target: FileTarget, files: Sequence[FileScanTask]) -> list[Rewritten]:
        """Rewrite the files of a plan that have keys of the micro-batch."""
        unknown = [file for file in files if _identity(file) not in self._known]
        if unknown:
            task = RewriteTask(target, self.keys, list(self.staged), unknown)
            numbers = self.spark.range(0, len(unknown), 1, len(unknown))
            for report in numbers.mapInArrow(task, _COLUMNS).collect():
                self.repeated |= report.attempt > 0
                file = unknown[report.number]
                new = tuple(from_report(target, report.files))
                self._known[_identity(file)] = Rewritten(file.file, new) if report.touched else None
        return [known for file in files if (known := self._known[_identity(file)]) is not None]

    @property
    def paths(self) -> list[str]:
        """All files that were written, also for plans that were not committed."""
        return [file.file_path for known in self._known.values() if known for file in known.new]


def _identity(file: FileScanTask) -> tuple[str, frozenset[str]]:
    return file.file.file_path, frozenset(delete.file_path for delete in file.delete_files)


@dataclass
class RewriteTask:
    """The function of ``mapInArrow`` that takes numbers of files and returns what became of them."""

    target: FileTarget = field(repr=False)
    keys: Schema = field(repr=False)
    staged: Sequence[str] = field(repr=False)
    files: Sequence[FileScanTask] = field(repr=False)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return iterate_in_worker(self._run(batches))

    def _run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            try:
                files = self._rewritten(self.files[number])
            except PenstockError:
                raise
            except Exception as error:
                what = f"the file {self.files[number].file.file_path} cannot be rewritten"
                raise translated(error, self.target.table, what, self.target.io.properties) from None
            report = {
                "number": [number],
                "touched": [files is not None],
                "files": [to_report(self.target, files or [])],
                "attempt": [context.attemptNumber()],
            }
            yield pa.RecordBatch.from_pydict(report, schema=_REPORT)

    def _rewritten(self, file: FileScanTask) -> list[DataFile] | None:
        """Write the file again without the rows that are replaced; None if it has none of them."""
        target = self.target
        stored = pa.Table.from_batches(
            live_rows(target.io, target.metadata, file, self.keys),
            schema_to_pyarrow(self.keys, include_field_ids=False),
        )
        staged = all_keys(target.io, self.staged, self.keys)
        replaced = _rows_with_keys(stored, staged)
        if not len(replaced):
            return None
        kept = np.ones(stored.num_rows, np.bool_)
        kept[replaced] = False
        if not kept.any():
            return []
        return written(target, self._kept_rows(file, kept))

    def _kept_rows(self, file: FileScanTask, kept: NDArray[np.bool_]) -> Iterator[pa.Table]:
        target, start = self.target, 0
        for batch in live_rows(target.io, target.metadata, file, target.metadata.schema()):
            mask = pa.array(kept[start : start + batch.num_rows])
            start += batch.num_rows
            yield in_schema(target, batch.filter(mask).columns)
        if start != len(kept):
            raise RuntimeError(f"it had {len(kept)} rows, and {start} when it was read again")


def _rows_with_keys(stored: pa.Table, keys: pa.Table) -> NDArray[np.int64]:
    """Return the places of the rows that have one of the keys."""
    names = [f"k{number}" for number in range(stored.num_columns)]
    numbered = stored.rename_columns(names).append_column(_ROW, pa.array(np.arange(stored.num_rows)))
    matched = numbered.join(keys.rename_columns(names), keys=names, join_type="left semi")
    places: NDArray[np.int64] = matched[_ROW].to_numpy()
    return places
