"""Data files with the rows that change events upsert, written by tasks from the staged events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from penstock.tables.changes.events import PRESENT, SEQUENCE, EventLayout
from penstock.tables.changes.merge_plan import MergePlan
from penstock.tables.columns import VALID_FROM, VALID_TO
from penstock.tables.delta.data_files import REPORT_DDL, DataFile, file_report, files_from_reports
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.small_files import group_files
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.row_encoding import in_chunks


@dataclass(frozen=True)
class StagedFile:
    """A staged file, and the position of its first event among all events of the micro-batch."""

    file: DataFile
    first_event: int


def write_event_rows(
    spark: SparkSession, target: DeltaStage, events: EventLayout, staged: Sequence[DataFile], plan: MergePlan
) -> list[DataFile]:
    """Have tasks write the rows of the events that a plan merges."""
    if not pc.any(plan.merged).as_py():
        return []
    first_events = dict(zip(staged, accumulate((file.rows for file in staged), initial=0), strict=False))
    groups = [[StagedFile(file, first_events[file]) for file in group] for group in group_files(staged)]
    task = EventRowsTask(target, events, groups, plan.merged, _valid_to_by_event(plan))
    return files_from_reports(task.job(spark, len(groups), REPORT_DDL).collect())


def _valid_to_by_event(plan: MergePlan) -> pa.Array | None:
    """Return the ``VALID_TO`` of each event's row; null for events that are not merged."""
    if plan.valid_to is None:
        return None
    merged = plan.merged.to_numpy(zero_copy_only=False)
    return plan.valid_to.take(pa.array(merged.cumsum() - 1, mask=~merged))


@dataclass
class EventRowsTask(FileTask):
    """Task that writes and reports a data file for each numbered group of staged files."""

    stage: DeltaStage = field(repr=False)
    events: EventLayout = field(repr=False)
    groups: Sequence[Sequence[StagedFile]] = field(repr=False)
    merged: pa.BooleanArray = field(repr=False)
    """For each event of the micro-batch, whether its row is written."""
    valid_to: pa.Array | None = field(repr=False)
    """With history: for each event, the ``VALID_TO`` of its row."""

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        rows = (batch for staged in self.groups[number] for batch in self._rows(staged))
        yield file_report(self.stage.write(in_chunks(rows)), None)

    def _rows(self, staged: StagedFile) -> Iterator[pa.RecordBatch]:
        offset = staged.first_event
        for batch in self.stage.batches([staged.file], self.events.staged_schema):
            merged = self.merged.slice(offset, batch.num_rows)
            rows = pa.Table.from_batches([batch.filter(merged)])
            if self.valid_to is None:
                # A delete writes no row.
                rows = rows.filter(pc.equal(rows[PRESENT], 1))
            else:
                valid_to = self.valid_to.slice(offset, batch.num_rows).filter(merged)
                rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(VALID_TO, valid_to)
            offset += batch.num_rows
            if rows.num_rows:
                yield from (
                    rows.select(self.events.table_schema.names).cast(self.events.table_schema).to_batches()
                )
