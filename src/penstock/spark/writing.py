"""What a write task does: rows into compressed segments, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from penstock.arrow.rows import conform_batch
from penstock.queue.placement import Placement
from penstock.store.catalog import QueueRecord
from penstock.store.log import Segment, to_segments

FLUSH_SEGMENTS = 8


@dataclass(frozen=True)
class Wrote(WriterCommitMessage):
    """What one task tells the driver."""

    app_id: str
    batch_id: int
    task: int
    attempt: str
    segments: int
    rows: int
    query_id: str | None = None
    checkpoint_root: str | None = None
    """The session's own checkpoint location, for a query that was given none."""
    partitions: int = 0
    """How many partitions the queue had when the task placed its rows."""


@dataclass
class Pieces:
    """The rows of a task, cut into groups of segments that are stored in one transaction each."""

    queue: QueueRecord
    placement: Placement
    fallback: int
    max_rows: int
    _waiting: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0

    def groups(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Segment]]:
        """Segments of the batches, a bounded number at a time, in the order of the rows."""
        held = 0
        for batch in batches:
            if batch.num_rows == 0:
                continue
            self._waiting.append(conform_batch(batch, self.queue.schema))
            self.rows += batch.num_rows
            held += batch.num_rows
            if held >= self.max_rows * FLUSH_SEGMENTS:
                yield self._segments()
                held = 0
        if self._waiting:
            yield self._segments()

    def _segments(self) -> list[Segment]:
        table = pa.Table.from_batches(self._waiting, schema=self.queue.schema)
        self._waiting = []
        return [
            segment
            for partition, rows in self.placement.split(table, self.fallback)
            for segment in to_segments(rows, partition, max_rows=self.max_rows)
        ]
