"""Writer for the applied-events branch, which compacts small files so that there are never many.

A micro-batch adds a file. Once there are several, the new file also replaces those that are small compared to
it and to the files merged so far. So each event is written only a few times, and at most about half of the
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
from penstock.tables.iceberg.applied_events import AppliedEvents, AppliedEventsChange, write_events
from penstock.tables.iceberg.data_files import FileTarget
from penstock.tables.iceberg.numbered_tasks import NumberedTask
from penstock.tables.iceberg.reading import StoredFile, file_identity
from penstock.tables.iceberg.reports import from_report, to_report

_MAX_FILES = 8
"""The number of files up to which none are merged, however small."""
_SMALL_ROWS = 65_536
"""The number of rows up to which the driver merges files itself."""
_MAX_ROWS = 1 << 24
"""The maximum number of rows of a merge, which a task holds in memory."""


@dataclass
class AppliedEventsWriter:
    """Writer for new files of the branch; attempts to commit with the same events reuse their file."""

    spark: SparkSession
    applied_events: AppliedEvents
    events: EventLayout
    tasks_retried: bool = False
    _written_files: list[tuple[pa.Table, list[object], DataFile]] = field(default_factory=list)

    def change(
        self, target: FileTarget, files: Sequence[FileScanTask], new_events: pa.Table
    ) -> AppliedEventsChange:
        """Return the change that adds events to the branch, given its current files."""
        if not new_events.num_rows:
            return AppliedEventsChange(self.applied_events)
        new_events = new_events.select(self.events.recorded_schema.names)
        merged_files = _files_to_merge(files, new_events.num_rows)
        sources: list[object] = [file_identity(merged_file) for merged_file in merged_files]
        for written_events, written_sources, written in self._written_files:
            if written_sources == sources and written_events.equals(new_events):
                file = written
                break
        else:
            file = self._write_file(target, merged_files, new_events)
            self._written_files.append((new_events, sources, file))
        return AppliedEventsChange(
            self.applied_events, [merged_file.file for merged_file in merged_files], [file]
        )

    @property
    def paths(self) -> list[str]:
        """All files that were written, including those of attempts that were not committed."""
        return [file.file_path for *_, file in self._written_files]

    def _write_file(
        self, target: FileTarget, files: Sequence[FileScanTask], new_events: pa.Table
    ) -> DataFile:
        task = MergeEventsTask(target, self.applied_events.schema, self.events, files, new_events)
        if new_events.num_rows + sum(source.file.record_count for source in files) <= _SMALL_ROWS:
            result = task.run_one(0)
        else:
            (report,) = task.reports(self.spark, 1)
            self.tasks_retried |= report.attempt > 0
            result = report.result
        (file,) = from_report(target, result)
        return file


@dataclass
class MergeEventsTask(NumberedTask):
    """Task that merges files and new events into one sorted file without outdated events."""

    target: FileTarget = field(repr=False)
    columns: Schema
    """The columns of the branch's data files."""
    events: EventLayout = field(repr=False)
    files: Sequence[FileScanTask] = field(repr=False)
    new_events: pa.Table = field(repr=False)
    failed_action = "the record of applied events cannot be written"

    def result(self, number: int) -> bytes:
        target, columns = self.target, self.columns
        schema = schema_to_pyarrow(columns, include_field_ids=False)
        stored = (
            batch
            for file in self.files
            for batch in StoredFile(target.io, target.metadata, file).live_rows(columns)
        )
        old = pa.Table.from_batches(stored, schema).rename_columns(self.new_events.column_names)
        combined = pa.concat_tables([self.new_events, old.cast(self.new_events.schema)])
        return to_report(target, [write_events(target, columns, distinct_events(self.events, combined))])


def _files_to_merge(files: Sequence[FileScanTask], rows: int) -> list[FileScanTask]:
    """Return the files to merge with ``rows`` new events."""
    selected: list[FileScanTask] = []
    if len(files) < _MAX_FILES:
        return selected
    for file in sorted(files, key=lambda task: task.file.record_count):
        count = file.file.record_count
        if count > max(2 * rows, _SMALL_ROWS) or rows + count > _MAX_ROWS:
            break
        selected.append(file)
        rows += count
    return selected
