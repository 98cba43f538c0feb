"""Rows cut into segments of a size that both databases and a reader's memory take well."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from penstock.arrow.ipc_messages import MAX_UNPACKED
from penstock.arrow.segments import encode
from penstock.errors import InvalidInput

SEGMENT_ROWS = 65_536
SEGMENT_RAW_BYTES = 32 << 20
MAX_PAYLOAD = 900_000_000
"""Bytes of one segment that both databases still take; only a single huge row comes near it."""
_MAX_ROW = MAX_UNPACKED - (1 << 20)
"""Buffers are filled up to whole words."""


class Segment:
    """Consecutive rows of one partition, on their way into the store."""

    def __init__(self, partition: int, batch: pa.RecordBatch) -> None:
        self.partition = partition
        self.rows = int(batch.num_rows)
        self.width = int(batch.num_columns)
        """How many columns the rows have."""
        self._batch: pa.RecordBatch | None = batch
        self._payload: pa.Buffer | None = None

    def __repr__(self) -> str:
        return f"Segment(partition={self.partition}, rows={self.rows})"

    @property
    def payload(self) -> pa.Buffer:
        """The rows as they are stored.

        Raises
        ------
        InvalidInput
            When a row is too large for a database.
        """
        if self._batch is not None:
            self._payload = _payload(self._batch)
            # The compressed rows are all that is needed from here on.
            self._batch = None
        return self._payload

    @property
    def bytes(self) -> int:
        return int(self.payload.size)


def to_segments(
    table: pa.Table | pa.RecordBatch, partition: int, *, max_rows: int = SEGMENT_ROWS, lazy: bool = False
) -> list[Segment]:
    """Cut rows into segments of at most ``max_rows`` rows and about 32 MiB of Arrow data.

    Parameters
    ----------
    lazy
        Whether to leave the compression until a segment is sent, where that does not hold up others.

    Raises
    ------
    InvalidInput
        When a single row is too large for a database.
    """
    if isinstance(table, pa.RecordBatch):
        batches = [table.slice(start, max_rows) for start in range(0, table.num_rows, max_rows)]
    else:
        combined = table.combine_chunks() if table.num_rows > 0 else table
        batches = [batch for batch in combined.to_batches(max_chunksize=max_rows) if batch.num_rows]
    segments = [Segment(partition, piece) for batch in batches for piece in _halved(batch)]
    if not lazy:
        for segment in segments:
            _ = segment.payload
    return segments


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows < 2 or batch.nbytes <= SEGMENT_RAW_BYTES:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _halved(batch.slice(0, middle))
    yield from _halved(batch.slice(middle))


def _payload(batch: pa.RecordBatch) -> pa.Buffer:
    # Whole buffers are no less than what a slice has of them, and quicker to ask.
    if batch.get_total_buffer_size() > _MAX_ROW:
        _require_at_most(batch.nbytes, _MAX_ROW, "a reader unpacks")
    payload = encode(batch)
    _require_at_most(payload.size, MAX_PAYLOAD, "a database holds in one value")
    return payload


def _require_at_most(size: int, limit: int, who: str) -> None:
    if size > limit:
        raise InvalidInput(
            f"a row takes {size} bytes, more than {who}: keep large objects in files and append their paths",
            size=size,
            limit=limit,
        )
