"""Rows on their way through a shuffle: many of them in one binary value, so that Spark moves bytes and not rows.

Turning rows into Arrow and back costs Spark more than most of what is done with them; here it is done once on the way in and
once on the way out, and the shuffle in between knows two columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

PLACE, ROWS = "__penstock_place", "__penstock_rows"
SCHEMA = pa.schema([pa.field(PLACE, pa.int32(), nullable=False), pa.field(ROWS, pa.binary(), nullable=False)])
_PARCEL_ROWS, _PARCEL_BYTES = 65_536, 16 << 20
_BATCH_BYTES = 256 << 20
"""A binary column ends at 2 GiB."""


def pack(table: pa.Table, target: Any, places: tuple[int, ...]) -> Iterator[pa.RecordBatch]:
    """The rows in parcels.

    Parameters
    ----------
    table
        One row at the least.
    target
        For each row which of the places it goes to, by its position among them; unsigned whole numbers.
    places
        Their numbers.
    """
    ordered = table.take(pa.array(np.argsort(target, kind="stable"))).combine_chunks()
    ends = np.cumsum(np.bincount(target, minlength=len(places))).tolist()
    rows = max(1, min(_PARCEL_ROWS, _PARCEL_BYTES * len(ordered) // max(1, ordered.nbytes)))
    numbers, parcels = [], []
    for place, start, end in zip(places, [0, *ends[:-1]], ends, strict=True):
        for first in range(start, end, rows):
            numbers.append(place)
            parcels.append(ordered.slice(first, min(rows, end - first)))
    yield from _packed(numbers, parcels)


def unpack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows in parcels."""
    for batch in batches:
        for parcel in batch.column(1):
            yield from pa.ipc.open_stream(parcel.as_buffer())


@cache
def places(partitions: int) -> tuple[int, ...]:
    """A number for each partition of a shuffle that Spark's hash sends there.

    Spark gives a row to partition ``pmod(murmur3(value, seed 42), partitions)`` (Spark 4.2, 4.3); where it has another number of
    partitions, such as after coalescing, rows with equal numbers are together all the same.
    """
    found: dict[int, int] = {}
    first, count = 0, 16 * partitions
    while len(found) < partitions:
        numbers = np.arange(first, first + count, dtype=np.uint32)
        for number, partition in zip(
            numbers.tolist(), _partition_of(numbers, partitions).tolist(), strict=True
        ):
            found.setdefault(partition, number)
        first += count
    return tuple(found[partition] for partition in range(partitions))


def _partition_of(numbers: Any, partitions: int) -> Any:
    """The murmur3 hash (32 bits, x86 variant; Austin Appleby) of four bytes, with Spark's seed."""
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


def _packed(places: list[int], parcels: list[pa.Table]) -> Iterator[pa.RecordBatch]:
    """Each of the tables as one binary value; many of them are written into one buffer, of the size that they need."""
    ends = np.cumsum([_written([parcel], pa.MockOutputStream()) for parcel in parcels])
    groups = ends // _BATCH_BYTES
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]).tolist()
    for start, end in zip(starts, [*starts[1:], len(parcels)], strict=True):
        offsets = np.r_[0, ends[start:end] - (ends[start - 1] if start else 0)]
        buffer = pa.allocate_buffer(offsets[-1])
        _written(parcels[start:end], pa.FixedSizeBufferWriter(buffer))
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), buffer]
        values = pa.Array.from_buffers(pa.binary(), end - start, buffers)
        yield pa.RecordBatch.from_arrays([pa.array(places[start:end], pa.int32()), values], schema=SCHEMA)


def _written(parcels: list[pa.Table], sink: Any) -> int:
    """Write tables one behind the other; where the last one ends."""
    for parcel in parcels:
        with pa.ipc.new_stream(sink, parcel.schema) as writer:
            writer.write_table(parcel)
    return int(sink.tell())
