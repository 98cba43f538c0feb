"""The format of an object: the payloads of segments of several partitions, then an index of them.

The layout is ``payloads, index, length of the index, CRC-32 of the index, magic``, the last three as
little-endian unsigned 4, 4 and 8 bytes. The index is an Arrow stream with a row for each payload. Readers get
a payload's place and checksum from the database; the index shows what an object holds without the database.
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
_INDEX = pa.schema(
    [(name, pa.int64()) for name in ("partition", "rows", "columns_id", "offset", "length", "checksum")]
)


@dataclass(frozen=True)
class Packed:
    """A payload to write into an object."""

    partition: int
    rows: int
    columns_id: int
    """Which of the queue's columns the rows have (`QueueColumns`)."""
    payload: Buffer


@dataclass(frozen=True)
class Place:
    """The place of a payload in an object."""

    offset: int
    length: int
    checksum: int
    """The CRC-32 of the payload."""

    def holds(self, data: Buffer) -> bool:
        """Return whether ``data`` has the length and checksum of the bytes that were written."""
        return len(data) == self.length and zlib.crc32(data) == self.checksum


def pack(payloads: Sequence[Packed]) -> tuple[list[Buffer], list[Place]]:
    """Return the parts of an object that holds the payloads, and the place of each payload."""
    places: list[Place] = []
    offset = 0
    for each in payloads:
        length = memoryview(each.payload).nbytes
        places.append(Place(offset, length, zlib.crc32(each.payload)))
        offset += length
    columns = zip(
        *(
            (each.partition, each.rows, each.columns_id, place.offset, place.length, place.checksum)
            for each, place in zip(payloads, places, strict=True)
        ),
        strict=True,
    )
    batch = pa.RecordBatch.from_arrays([pa.array(column, pa.int64()) for column in columns], schema=_INDEX)
    index = encode(batch).to_pybytes()
    trailer = _TRAILER.pack(len(index), zlib.crc32(index), _MAGIC)
    return [*(each.payload for each in payloads), index, trailer], places


def index_of(data: bytes) -> pa.RecordBatch:
    """Return the index of a whole object.

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
            return decode(index, _INDEX)
    raise StoreError(
        "these are not the bytes of an object that Penstock has written whole",
        condition="STORE_ERROR.OBJECT_DAMAGED",
    )
