"""A word of warning, once, about micro-batches whose size hurts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.spark.options import SourceOptions
from penstock.store.records.catalog import PartitionRecord

log = logging.getLogger("penstock.spark")

LARGE_BYTES = 1 << 30
LARGE_ROWS = 20_000_000
SMALL_ROWS = 1_000
SMALL_BATCHES = 20
SMALL_BACKLOG = 100


class BatchSizeWatch:
    """Looks at each micro-batch of one source."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._small = 0
        self._warned: set[str] = set()

    def observe(self, start: Sequence[int], end: Sequence[int], there: Sequence[PartitionRecord]) -> None:
        """Take note of a planned micro-batch."""
        rows = sum(end) - sum(start)
        if rows == 0:
            return
        held = sum(part.rows for part in there) or 1
        size = rows * sum(part.bytes for part in there) // held
        backlog = sum(part.next_index for part in there) - sum(end)
        queue = self._options.queue
        if (rows >= LARGE_ROWS or size >= LARGE_BYTES) and self._first("large"):
            log.warning(
                "large micro-batch of queue %r: %d rows, about %d MiB compressed; executors may run out of memory: set "
                "maxRowsPerTrigger or maxBytesPerTrigger",
                queue,
                rows,
                size >> 20,
                extra={"action": "large_batch", "queue": queue, "rows": rows, "bytes": size},
            )
        self._small = self._small + 1 if rows < SMALL_ROWS and backlog > SMALL_BACKLOG * rows else 0
        if self._small >= SMALL_BATCHES and self._first("small"):
            log.warning(
                "small micro-batch of queue %r: %d rows, with %d rows waiting; most of the time goes into starting "
                "micro-batches: raise maxRowsPerTrigger, maxRowsPerPartition or maxBytesPerTrigger",
                queue,
                rows,
                backlog,
                extra={"action": "small_batch", "queue": queue, "rows": rows, "backlog": backlog},
            )

    def _first(self, kind: str) -> bool:
        """Whether it has not been said before."""
        new = kind not in self._warned
        self._warned.add(kind)
        return new
