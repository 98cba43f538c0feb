"""Data files with the rows that change events insert or update, written by tasks from the staged events."""

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
from penstock.tables.delta.data_files import REPORT, DataFile, files_in, reported
from penstock.tables.delta.file_tasks import FileTask
from penstock.tables.delta.small_files import grouped_files
from penstock.tables.delta.stage import DeltaStage
from penstock.tables.row_encoding import chunked


@dataclass(frozen=True)
class Part:
    """A staged file, and the position of its first event among all events of the micro-batch."""

    file: DataFile
    start: int


def written_rows(
    spark: SparkSession, target: DeltaStage, events: EventLayout, staged: Sequence[DataFile], plan: MergePlan
) -> list[DataFile]:
    """Have tasks write the rows that a plan takes from the staged events."""
    if not pc.any(plan.taken).as_py():
        return []
    starts = dict(zip(staged, accumulate((file.rows for file in staged), initial=0), strict=False))
    parts = [[Part(file, starts[file]) for file in group] for group in grouped_files(staged)]
    task = EventRowsTask(target, events, parts, plan.taken, _ends(plan))
    return files_in(task.job(spark, len(parts), REPORT).collect())


def _ends(plan: MergePlan) -> pa.Array | None:
    """Return for each event the end of validity of its row; null for events that are not taken."""
    if plan.ends is None:
        return None
    taken = plan.taken.to_numpy(zero_copy_only=False)
    return plan.ends.take(pa.array(taken.cumsum() - 1, mask=~taken))


@dataclass
class EventRowsTask(FileTask):
    """Task that takes the numbers of groups of staged files, and writes and reports a data file for each."""

    stage: DeltaStage = field(repr=False)
    events: EventLayout = field(repr=False)
    parts: Sequence[Sequence[Part]] = field(repr=False)
    taken: pa.BooleanArray = field(repr=False)
    """For each event of the micro-batch, whether its row is written."""
    ends: pa.Array | None = field(repr=False)
    """With history: for each event, the end of validity of its row."""

    def results(self, number: int) -> Iterator[pa.RecordBatch]:
        rows = (batch for part in self.parts[number] for batch in self._rows(part))
        yield reported(self.stage.write(chunked(rows)), None)

    def _rows(self, part: Part) -> Iterator[pa.RecordBatch]:
        at = part.start
        for batch in self.stage.batches([part.file], self.events.staged):
            taken = self.taken.slice(at, batch.num_rows)
            rows = pa.Table.from_batches([batch.filter(taken)])
            if self.ends is None:
                # A delete sets no row.
                rows = rows.filter(pc.equal(rows[PRESENT], 1))
            else:
                ends = self.ends.slice(at, batch.num_rows).filter(taken)
                rows = rows.append_column(VALID_FROM, rows[SEQUENCE]).append_column(VALID_TO, ends)
            at += batch.num_rows
            if rows.num_rows:
                yield from rows.select(self.events.table.names).cast(self.events.table).to_batches()
