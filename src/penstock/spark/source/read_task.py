"""What a read task does: rows of one range as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.queue.open_stores import open_store
from penstock.spark.internals.gc_tuning import freeze_imports
from penstock.spark.schemas import to_output_batch
from penstock.spark.session_store import check_reach
from penstock.spark.source.positions import report_loss
from penstock.store.log import partition_log
from penstock.store.records.catalog import QueueRecord

SMALL_ROWS = 8192


class RangePartition(InputPartition):
    """Rows [start, end) of one partition of a queue."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        super().__init__(partition)
        self.partition, self.start, self.end = partition, start, end

    def __repr__(self) -> str:
        return f"RangePartition({self.partition}, {self.start}, {self.end})"


@dataclass(frozen=True)
class Scan:
    """What all tasks of a read share."""

    url: str = field(repr=False)
    queue: QueueRecord
    schema: pa.Schema
    fail_on_data_loss: bool = True
    predicate: pa.compute.Expression | None = None

    def read(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task, in batches that are worth sending."""
        if not isinstance(task, RangePartition):
            # Spark puts an empty partition in the place of none.
            return iter(())
        check_reach(self.url, None)
        freeze_imports()
        return self._filtered(_worthwhile(self._batches(task)))

    def _batches(self, task: RangePartition) -> Iterator[pa.RecordBatch]:
        position = task.start
        for chunk in self._chunks(task):
            self._note_loss(task.partition, position, chunk.start)
            position = chunk.end
            yield to_output_batch(chunk, self.queue, task.partition, self.schema)
        self._note_loss(task.partition, position, task.end)

    def _chunks(self, task: RangePartition) -> Iterator[partition_log.Chunk]:
        return partition_log.read(
            open_store(self.url).database,
            self.queue,
            task.partition,
            task.start,
            task.end,
            columns=self._columns(),
            on_lost="fail" if self.fail_on_data_loss else "skip",
            with_runs="_timestamp" in set(self.schema.names).difference(self.queue.schema.names),
        )

    def _note_loss(self, partition: int, start: int, end: int) -> None:
        if start < end:
            report_loss(self.queue.name, partition, start, end, fail=False)

    def _columns(self) -> list[str] | None:
        """The queue's columns to decode; None for all."""
        wanted = [name for name in self.queue.schema.names if name in set(self.schema.names)]
        return None if wanted == self.queue.schema.names else wanted or self.queue.schema.names[:1]

    def _filtered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.predicate is None:
            return batches
        return (kept for kept in (batch.filter(self.predicate) for batch in batches) if kept.num_rows)


def _worthwhile(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Small neighbours joined, so that a crowd of one-row appends does not become a crowd of Arrow batches."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows >= SMALL_ROWS and not pending:
            yield batch
            continue
        pending.append(batch)
        rows += batch.num_rows
        if rows >= SMALL_ROWS:
            yield _joined(pending)
            pending, rows = [], 0
    if pending:
        yield _joined(pending)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
