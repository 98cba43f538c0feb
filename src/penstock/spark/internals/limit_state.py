"""Reader for the row count that Spark's limit keeps in its state store.

A limit keeps one number, in ``state/<operator>/0``: ``N.delta`` has the changes of micro-batch N - 1, and
``N.snapshot`` the whole state. Both hold records of a key and a value, each prefixed with its length, then
-1, in the LZ4 blocks of Spark's codec (``HDFSBackedStateStoreProvider``, Spark 4.2 and 4.3).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa
from pyarrow import fs

from penstock.json_text import parse_json

_LIMIT_OPERATOR = "globalLimit"
_BLOCK = b"LZ4Block"
_HEADER = struct.Struct("<8sBIII")
_RAW, _LZ4 = 0x10, 0x20
_MAX_BYTES = 1 << 26
"""The maximum size of an uncompressed file; a limit stores one number."""
_NUMBER = re.compile(r"\d+")
# An UnsafeRow of one number: the null bits, then the number.
_VALUE = struct.Struct("<qq")


class Checkpoint(Protocol):
    """The files of a checkpoint."""

    @property
    def files(self) -> fs.FileSystem: ...

    @property
    def root(self) -> str: ...

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file; None if it does not exist."""


class UnreadableState(Exception):
    """Raised if the state has another format, which only Spark can read, or files are missing."""


def rows_passed(checkpoint: Checkpoint, batch_id: int) -> int:
    """Return how many rows the limit had let through at the end of a micro-batch."""
    try:
        return _rows_passed(checkpoint, f"state/{limit_operator(checkpoint)}/0", batch_id + 1)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise UnreadableState(f"{type(error).__name__}: {error}") from error


def _rows_passed(checkpoint: Checkpoint, folder: str, newest_version: int) -> int:
    # A micro-batch of which no row passes writes a delta without a number.
    for version in range(newest_version, 0, -1):
        delta = checkpoint.read(f"{folder}/{version}.delta")
        count = None if delta is None else _count(delta)
        if count is not None:
            return count
        snapshot = checkpoint.read(f"{folder}/{version}.snapshot")
        if snapshot is not None:
            return _count(snapshot) or 0
        if delta is None:
            raise UnreadableState(f"there is no file {folder}/{version}.delta")
    return 0


def limit_operator(checkpoint: Checkpoint) -> int:
    """Return the id of the only limit among the stateful operators."""
    operators = _numbered_entries(checkpoint, "state")
    limits = [number for number in operators if _operator_name(checkpoint, number) == _LIMIT_OPERATOR]
    if len(limits) != 1:
        raise UnreadableState(f"the state has {len(limits)} limits, not one")
    return limits[0]


def _operator_name(checkpoint: Checkpoint, operator: int) -> str | None:
    """Return Spark's name of an operator, from the metadata of its state."""
    folder = f"state/{operator}/_metadata"
    text = checkpoint.read(f"{folder}/metadata")
    if not text:
        numbers = _numbered_entries(checkpoint, f"{folder}/v2")
        text = checkpoint.read(f"{folder}/v2/{max(numbers)}") if numbers else None
    if text is None:
        return None
    name = parse_json(text.partition(b"\n")[2])["operatorInfo"]["operatorName"]
    return str(name)


def _numbered_entries(checkpoint: Checkpoint, folder: str) -> list[int]:
    selector = fs.FileSelector(f"{checkpoint.root}/{folder}", allow_not_found=True)
    names = [info.base_name for info in checkpoint.files.get_file_info(selector)]
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


def _count(file: bytes) -> int | None:
    count = None
    for value in _values(b"".join(_blocks(file))):
        if value is None or len(value) != _VALUE.size:
            raise ValueError("its records do not fit a limit")
        count = _VALUE.unpack(value)[1]
    return count


def _blocks(file: bytes) -> Iterator[bytes]:
    """Decompress the blocks of a file; the last block is empty."""
    codec, position, bytes_left = pa.Codec("lz4_raw"), 0, _MAX_BYTES
    while position < len(file):
        magic, token, packed_size, size, _ = _HEADER.unpack_from(file, position)
        if magic != _BLOCK or token & 0xF0 not in (_RAW, _LZ4):
            raise ValueError("it has an unknown compression")
        bytes_left -= size
        if bytes_left < 0:
            raise ValueError("it would decompress to more bytes than a limit needs")
        position += _HEADER.size
        block = file[position : position + packed_size]
        if size:
            yield block if token & 0xF0 == _RAW else codec.decompress(block, size, asbytes=True)
        position += packed_size


def _values(records: bytes) -> Iterator[bytes | None]:
    """Yield the value of each record; None for a removed key."""
    position = 0
    while True:
        (key_size,) = struct.unpack_from(">i", records, position)
        if key_size < 0:
            return
        (value_size,) = struct.unpack_from(">i", records, position + 4 + key_size)
        position += 8 + key_size
        yield None if value_size < 0 else records[position : position + value_size]
        position += max(value_size, 0)
