"""Read tasks: the rows of one range as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from penstock.queue.store import open_store
from penstock.spark.internals.python_workers import check_reach, freeze_imports
from penstock.spark.schemas import to_output_batch
from penstock.spark.source.ranges import report_loss
from penstock.store.log import partition_log
from penstock.store.log.partition_log import Chunk
from penstock.store.records.catalog import QueueRecord

SMALL_ROWS = 8192


class RangePartition(InputPartition):
    """The rows [start, end) of one partition of a queue."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        super().__init__(partition)
        self.partition, self.start, self.end = partition, start, end

    def __repr__(self) -> str:
        return f"RangePartition({self.partition}, {self.start}, {self.end})"


@dataclass(frozen=True)
class Scan:
    """The parameters that all tasks of a read share."""

    url: str = field(repr=False)
    queue: QueueRecord
    schema: pa.Schema
    fail_on_data_loss: bool = True
    predicate: pa.compute.Expression | None = None

    def read(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a task, in batches of a reasonable size."""
        if not isinstance(task, RangePartition):
            # Spark passes an empty partition if there is none.
            return iter(())
        check_reach(self.url, None)
        freeze_imports()
        rows = (batch for _, batch in self.chunks(task.partition, task.start, task.end))
        return self._filtered(_coalesced(rows))

    def chunks(self, partition: int, start: int, end: int) -> Iterator[tuple[Chunk, pa.RecordBatch]]:
        """Yield the stored chunks of a range with their rows; lost rows are logged, or raise an error."""
        position = start
        chunks = partition_log.read(
            open_store(self.url).database,
            self.queue,
            partition,
            start,
            end,
            columns=self._columns(),
            on_lost="fail" if self.fail_on_data_loss else "skip",
            with_runs="_timestamp" in set(self.schema.names).difference(self.queue.schema.names),
        )
        for chunk in chunks:
            self._log_loss(partition, position, chunk.start)
            position = chunk.end
            yield chunk, to_output_batch(chunk, self.queue, partition, self.schema)
        self._log_loss(partition, position, end)

    def _log_loss(self, partition: int, start: int, end: int) -> None:
        if start < end:
            report_loss(self.queue.name, partition, start, end, fail=False)

    def _columns(self) -> list[str] | None:
        """Return the queue's columns to decode; None for all."""
        wanted = [name for name in self.queue.schema.names if name in set(self.schema.names)]
        return None if wanted == self.queue.schema.names else wanted or self.queue.schema.names[:1]

    def _filtered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.predicate is None:
            return batches
        filtered = (batch.filter(self.predicate) for batch in batches)
        return (batch for batch in filtered if batch.num_rows)


def _coalesced(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small neighbouring batches, so that many one-row appends do not become many Arrow batches."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows >= SMALL_ROWS and not pending:
            yield batch
            continue
        pending.append(batch)
        rows += batch.num_rows
        if rows >= SMALL_ROWS:
            yield _concatenated(pending)
            pending, rows = [], 0
    if pending:
        yield _concatenated(pending)


def _concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
