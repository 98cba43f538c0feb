"""Gathering of small record batches into chunks that are worth a transaction, a file or a join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

CHUNK_ROWS = 131_072
CHUNK_BYTES = 32 << 20
"""How much a task gathers before it writes."""


def chunked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Concatenate batches to chunks of at least `CHUNK_ROWS` or `CHUNK_BYTES`, but for the last one."""
    return (pa.concat_batches(group) for group in grouped(batches, CHUNK_ROWS, CHUNK_BYTES))


def grouped(batches: Iterable[pa.RecordBatch], rows: int, size: int) -> Iterator[list[pa.RecordBatch]]:
    """Group batches that are not empty until they have so many rows or bytes."""
    group: list[pa.RecordBatch] = []
    group_rows = group_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        group.append(batch)
        group_rows, group_bytes = group_rows + batch.num_rows, group_bytes + batch.nbytes
        if group_rows >= rows or group_bytes >= size:
            yield group
            group, group_rows, group_bytes = [], 0, 0
    if group:
        yield group
