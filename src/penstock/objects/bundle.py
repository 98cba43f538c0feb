"""The format of an object: the payloads of segments of several partitions, followed by an index.

The layout is ``payloads, index, length of the index, CRC-32 of the index, magic``. The last three are
little-endian and unsigned, with 4, 4 and 8 bytes. The index is an Arrow stream with a row for each payload.
Readers get the range and checksum of a payload from the database; the index describes an object without the
database.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.arrow.segments import decode, encode
from penstock.errors import StoreError
from penstock.objects.storage import Buffer

_TRAILER = struct.Struct("<II8s")
_MAGIC = b"PENSTOCK"
_INDEX_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in ("partition", "rows", "columns_id", "offset", "length", "checksum")]
)


@dataclass(frozen=True)
class PackedPayload:
    """A payload to write to an object."""

    partition: int
    rows: int
    columns_id: int
    """The id of the queue's columns when the rows were written (`QueueColumns`)."""
    payload: Buffer


@dataclass(frozen=True)
class PayloadRange:
    """The byte range and checksum of a payload in an object."""

    offset: int
    length: int
    checksum: int
    """The CRC-32 of the payload."""

    def matches(self, data: Buffer) -> bool:
        """Return whether ``data`` has the length and checksum of the bytes that were written."""
        return len(data) == self.length and zlib.crc32(data) == self.checksum


def pack(payloads: Sequence[PackedPayload]) -> tuple[list[Buffer], list[PayloadRange]]:
    """Return the parts of an object with the payloads, and the range of each payload."""
    ranges: list[PayloadRange] = []
    offset = 0
    for packed in payloads:
        length = memoryview(packed.payload).nbytes
        ranges.append(PayloadRange(offset, length, zlib.crc32(packed.payload)))
        offset += length
    columns = zip(
        *(
            (
                packed.partition,
                packed.rows,
                packed.columns_id,
                payload_range.offset,
                payload_range.length,
                payload_range.checksum,
            )
            for packed, payload_range in zip(payloads, ranges, strict=True)
        ),
        strict=True,
    )
    batch = pa.RecordBatch.from_arrays(
        [pa.array(column, pa.int64()) for column in columns], schema=_INDEX_SCHEMA
    )
    index = encode(batch).to_pybytes()
    trailer = _TRAILER.pack(len(index), zlib.crc32(index), _MAGIC)
    return [*(packed.payload for packed in payloads), index, trailer], ranges


def read_index(data: bytes) -> pa.RecordBatch:
    """Return the index of an object.

    Raises
    ------
    StoreError
        When ``data`` is not a complete object written by Penstock.
    """
    end = len(data) - _TRAILER.size
    if end >= 0:
        length, checksum, magic = _TRAILER.unpack_from(data, end)
        index = data[end - length : end] if length <= end else b""
        if magic == _MAGIC and zlib.crc32(index) == checksum:
            return decode(index, _INDEX_SCHEMA)
    raise StoreError(
        "these are not the bytes of a complete object that Penstock has written",
        condition="STORE_ERROR.OBJECT_DAMAGED",
    )
