"""Arrow batches as binary values for a shuffle, so that Spark moves bytes instead of rows.

Converting rows to Arrow and back takes Spark longer than most transformations. Here it happens once before
and once after the shuffle, which only has two columns: a key, and a binary value with many rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SHUFFLE_KEY, ROWS = "__penstock_place", "__penstock_rows"
SCHEMA = pa.schema(
    [pa.field(SHUFFLE_KEY, pa.int32(), nullable=False), pa.field(ROWS, pa.binary(), nullable=False)]
)
_CHUNK_ROWS, _CHUNK_BYTES = 65_536, 16 << 20
_BATCH_BYTES = 256 << 20
"""The size of a batch; a binary column can have at most 2 GiB."""


def pack(
    table: pa.Table, target: NDArray[np.unsignedinteger], keys: tuple[int, ...]
) -> Iterator[pa.RecordBatch]:
    """Serialize rows into binary values, each with the shuffle key of its partition.

    ``target`` has the index into ``keys`` (of :func:`shuffle_keys`) for each row; there is at least one row.
    """
    ordered = table.take(pa.array(np.argsort(target, kind="stable"))).combine_chunks()
    ends = np.cumsum(np.bincount(target, minlength=len(keys))).tolist()
    chunk_rows = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES * len(ordered) // max(1, ordered.nbytes)))
    chunk_keys, chunks = [], []
    for key, start, end in zip(keys, [0, *ends[:-1]], ends, strict=True):
        for first in range(start, end, chunk_rows):
            chunk_keys.append(key)
            chunks.append(ordered.slice(first, min(chunk_rows, end - first)))
    yield from _serialize(chunk_keys, chunks)


def unpack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the rows in the binary values."""
    for batch in batches:
        for value in batch.column(1):
            yield from pa.ipc.open_stream(value.as_buffer())


@cache
def shuffle_keys(partitions: int) -> tuple[int, ...]:
    """Return a key for each partition of a shuffle: an integer that Spark's hash partitioning sends there.

    Spark sends a row to partition ``pmod(murmur3(value, seed 42), partitions)`` (Spark 4.2, 4.3). If the
    shuffle has another number of partitions, for example after coalescing, rows with equal keys still end up
    together.
    """
    keys: dict[int, int] = {}
    first, count = 0, 16 * partitions
    while len(keys) < partitions:
        numbers = np.arange(first, first + count, dtype=np.uint32)
        for number, partition in zip(
            numbers.tolist(), _partition_of(numbers, partitions).tolist(), strict=True
        ):
            keys.setdefault(partition, number)
        first += count
    return tuple(keys[partition] for partition in range(partitions))


def _partition_of(numbers: NDArray[np.uint32], partitions: int) -> NDArray[np.int64]:
    """Hash four bytes with murmur3 (32 bits, x86 variant; Austin Appleby) and Spark's seed."""
    with np.errstate(over="ignore"):
        key = numbers * np.uint32(0xCC9E2D51)
        key = (key << np.uint32(15)) | (key >> np.uint32(17))
        state = np.uint32(42) ^ (key * np.uint32(0x1B873593))
        state = (state << np.uint32(13)) | (state >> np.uint32(19))
        state = state * np.uint32(5) + np.uint32(0xE6546B64)
        state = state ^ np.uint32(4)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
        state = state ^ (state >> np.uint32(16))
    return np.mod(state.view(np.int32).astype(np.int64), partitions)


def _serialize(keys: list[int], chunks: list[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Serialize each chunk as a binary value; many values share a buffer of exactly the required size."""
    ends = np.cumsum([_write([chunk], pa.MockOutputStream()) for chunk in chunks])
    groups = ends // _BATCH_BYTES
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]).tolist()
    for start, end in zip(starts, [*starts[1:], len(chunks)], strict=True):
        offsets = np.r_[0, ends[start:end] - (ends[start - 1] if start else 0)]
        buffer = pa.allocate_buffer(offsets[-1])
        _write(chunks[start:end], pa.FixedSizeBufferWriter(buffer))
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), buffer]
        values = pa.Array.from_buffers(pa.binary(), end - start, buffers)
        yield pa.RecordBatch.from_arrays([pa.array(keys[start:end], pa.int32()), values], schema=SCHEMA)


def _write(chunks: list[pa.Table], sink: pa.NativeFile) -> int:
    """Write each chunk as a separate IPC stream, and return the end position."""
    for chunk in chunks:
        with pa.ipc.new_stream(sink, chunk.schema) as writer:
            writer.write_table(chunk)
    return int(sink.tell())
