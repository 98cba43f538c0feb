"""Writer for the record of applied events, which merges small files so that there are never many.

A micro-batch adds a file. Once there are several, the new file also replaces those that are small compared to
it and to the files merged so far. So each event is written a few times, and at most about half of the
recorded events are outdated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask
from pyspark.sql import SparkSession

from penstock.tables.changes.events import EventLayout
from penstock.tables.changes.merge_plan import distinct_events
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.numbered_tasks import NumberedTask
from penstock.tables.iceberg.reading import StoredFile, identity
from penstock.tables.iceberg.record import Record, RecordChange, written_lines
from penstock.tables.iceberg.reports import from_report, to_report

_MOST_FILES = 8
"""The number of files up to which none are merged, however small they are."""
_SMALL_ROWS = 65_536
"""The number of rows up to which the driver merges files itself."""
_LARGEST_ROWS = 1 << 24
"""The maximum number of rows of a merge, which a task holds in memory."""


@dataclass
class RecordWriter:
    """Writer for the record's new files, for all attempts to commit; unchanged files are written once."""

    spark: SparkSession
    record: Record
    events: EventLayout
    repeated: bool = False
    _known: list[tuple[pa.Table, list[object], DataFile]] = field(default_factory=list)

    def change(self, target: FileTarget, files: Sequence[FileScanTask], lines: pa.Table) -> RecordChange:
        """Return the change that adds lines to the record, given its present files."""
        if not lines.num_rows:
            return RecordChange(self.record)
        lines = lines.select(self.events.recorded.names)
        merged = _merged(files, lines.num_rows)
        sources: list[object] = [identity(each) for each in merged]
        for known_lines, known_sources, known in self._known:
            if known_sources == sources and known_lines.equals(lines):
                file = known
                break
        else:
            file = self._written(target, merged, lines)
            self._known.append((lines, sources, file))
        return RecordChange(self.record, [each.file for each in merged], [file])

    @property
    def paths(self) -> list[str]:
        """All files that were written, including those of attempts that were not committed."""
        return [file.file_path for *_, file in self._known]

    def _written(self, target: FileTarget, files: Sequence[FileScanTask], lines: pa.Table) -> DataFile:
        task = MergeTask(target, self.record.schema, self.events, files, lines)
        if lines.num_rows + sum(each.file.record_count for each in files) <= _SMALL_ROWS:
            result = task.translated(0)
        else:
            (report,) = task.reports(self.spark, 1)
            self.repeated |= report.attempt > 0
            result = report.result
        (file,) = from_report(target, result)
        return file


@dataclass
class MergeTask(NumberedTask):
    """Task that merges files of the record and new lines into one sorted file without outdated lines."""

    target: FileTarget = field(repr=False)
    columns: Schema
    """The columns of the record."""
    events: EventLayout = field(repr=False)
    files: Sequence[FileScanTask] = field(repr=False)
    lines: pa.Table = field(repr=False)
    what = "the record of applied events cannot be written"

    def result(self, number: int) -> bytes:
        target, columns = self.target, self.columns
        schema = schema_to_pyarrow(columns, include_field_ids=False)
        stored = (
            batch
            for file in self.files
            for batch in StoredFile(target.io, target.metadata, file).live_rows(columns)
        )
        old = pa.Table.from_batches(stored, schema).rename_columns(self.lines.column_names)
        lines = pa.concat_tables([self.lines, old.cast(self.lines.schema)])
        return to_report(target, [written_lines(target, columns, distinct_events(self.events, lines))])


def _merged(files: Sequence[FileScanTask], rows: int) -> list[FileScanTask]:
    """Return the files to merge with ``rows`` new rows."""
    chosen: list[FileScanTask] = []
    if len(files) < _MOST_FILES:
        return chosen
    for file in sorted(files, key=lambda each: each.file.record_count):
        count = file.file.record_count
        if count > max(2 * rows, _SMALL_ROWS) or rows + count > _LARGEST_ROWS:
            break
        chosen.append(file)
        rows += count
    return chosen
