"""How many rows Spark's limit has let through, from the files of its state store.

A limit keeps one number, in ``state/<operator>/0``: ``N.delta`` has what micro-batch N - 1 changed, and ``N.snapshot`` all that there
is. Both are records of a key and a value, each with its length before it, and -1 at the end, in the LZ4 blocks of Spark's codec
(``HDFSBackedStateStoreProvider``, Spark 4.2 and 4.3).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa
from pyarrow import fs

from penstock.json_text import parse_json

_LIMIT = "globalLimit"
_BLOCK = b"LZ4Block"
_HEADER = struct.Struct("<8sBIII")
_RAW, _LZ4 = 0x10, 0x20
_MOST_BYTES = 1 << 26
"""Of a file when it is unpacked: a limit's is one number."""
_NUMBER = re.compile(r"\d+")
# An UnsafeRow of one number: the bits that mark nulls, then the number.
_VALUE = struct.Struct("<qq")


class Checkpoint(Protocol):
    """Where a checkpoint is."""

    @property
    def files(self) -> fs.FileSystem: ...

    @property
    def root(self) -> str: ...

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None when there is none."""


class UnreadableState(Exception):
    """The files are of another kind; Spark can read them."""


def rows_passed(checkpoint: Checkpoint, batch_id: int) -> int:
    """How many rows had passed at the end of a micro-batch.

    Raises
    ------
    UnreadableState
        With why: another state store, or files that are gone.
    """
    try:
        return _rows_passed(checkpoint, f"state/{limit_operator(checkpoint)}/0", batch_id + 1)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise UnreadableState(f"{type(error).__name__}: {error}") from error


def _rows_passed(checkpoint: Checkpoint, folder: str, newest: int) -> int:
    # A micro-batch of which no row passes leaves the number as it is, and writes none.
    for version in range(newest, 0, -1):
        delta = checkpoint.read(f"{folder}/{version}.delta")
        number = None if delta is None else _count(delta)
        if number is not None:
            return number
        snapshot = checkpoint.read(f"{folder}/{version}.snapshot")
        if snapshot is not None:
            return _count(snapshot) or 0
        if delta is None:
            raise UnreadableState(f"there is no file {folder}/{version}.delta")
    return 0


def limit_operator(checkpoint: Checkpoint) -> int:
    """The number of the limit among the operators that keep state.

    Raises
    ------
    UnreadableState
        When there is none, or several.
    """
    selector = fs.FileSelector(f"{checkpoint.root}/state", allow_not_found=True)
    there = [info.base_name for info in checkpoint.files.get_file_info(selector)]
    found = [name for name in there if _NUMBER.fullmatch(name) and _name(checkpoint, name) == _LIMIT]
    if len(found) != 1:
        raise UnreadableState(f"{len(found)} operators in it are limits")
    return int(found[0])


def _name(checkpoint: Checkpoint, operator: str) -> str | None:
    """What Spark calls an operator."""
    folder = f"state/{operator}/_metadata"
    text = checkpoint.read(f"{folder}/metadata") or _newest(checkpoint, f"{folder}/v2")
    if text is None:
        return None
    name = parse_json(text.partition(b"\n")[2])["operatorInfo"]["operatorName"]
    return str(name)


def _newest(checkpoint: Checkpoint, folder: str) -> bytes | None:
    selector = fs.FileSelector(f"{checkpoint.root}/{folder}", allow_not_found=True)
    names = [info.base_name for info in checkpoint.files.get_file_info(selector)]
    numbers = [int(name) for name in names if _NUMBER.fullmatch(name)]
    return checkpoint.read(f"{folder}/{max(numbers)}") if numbers else None


def _count(file: bytes) -> int | None:
    """The number in a file; None when it has none."""
    number = None
    for value in _values(b"".join(_blocks(file))):
        if value is None or len(value) != _VALUE.size:
            raise ValueError("its records are not those of a limit")
        number = _VALUE.unpack(value)[1]
    return number


def _blocks(file: bytes) -> Iterator[bytes]:
    """The contents of the blocks; an empty one is the end."""
    codec, position, left = pa.Codec("lz4_raw"), 0, _MOST_BYTES
    while position < len(file):
        magic, token, packed, size, _ = _HEADER.unpack_from(file, position)
        if magic != _BLOCK or token & 0xF0 not in (_RAW, _LZ4):
            raise ValueError("it is compressed in another way")
        left -= size
        if left < 0:
            raise ValueError("it would have more bytes when it is unpacked than a limit needs")
        position += _HEADER.size
        block = file[position : position + packed]
        if size:
            yield block if token & 0xF0 == _RAW else codec.decompress(block, size, asbytes=True)
        position += packed


def _values(records: bytes) -> Iterator[bytes | None]:
    """The value of each record; None for a key that was removed."""
    position = 0
    while True:
        (key,) = struct.unpack_from(">i", records, position)
        if key < 0:
            return
        (value,) = struct.unpack_from(">i", records, position + 4 + key)
        position += 8 + key
        yield None if value < 0 else records[position : position + value]
        position += max(value, 0)
