"""Deleted rows of a data file: position delete files and deletion vectors.

A deletion vector is a blob "deletion-vector-v1" of a Puffin file (https://iceberg.apache.org/puffin-spec):
its length, a magic number, a 64-bit roaring bitmap in the portable serialization, and a checksum of the
latter two.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.io import FileIO
from pyroaring import BitMap64

Positions = npt.NDArray[np.int64]

NONE: Positions = np.empty(0, np.int64)
_MAGIC = bytes.fromhex("d1d33964")
_FRAME = 4


@dataclass(frozen=True)
class DeleteFile:
    """A position delete file, or a deletion vector in a Puffin file."""

    path: str
    offset: int | None = None
    """The offset of the deletion vector in the file; None for a position delete file."""
    size: int = 0


def positions(io: FileIO, deletes: DeleteFile, data_file: str) -> Positions:
    """Read the deleted positions of a data file."""
    if deletes.offset is None:
        return _listed(io, deletes.path, data_file)
    with io.new_input(deletes.path).open() as stream:
        stream.seek(deletes.offset)
        blob = stream.read(deletes.size)
    return _vector(blob, deletes.path)


def _listed(io: FileIO, path: str, data_file: str) -> Positions:
    with io.new_input(path).open() as stream:
        fragment = ds.ParquetFileFormat().make_fragment(stream)
        rows = ds.Scanner.from_fragment(fragment, columns=["pos"], filter=pc.field("file_path") == data_file)
        positions: Positions = rows.to_table()["pos"].to_numpy().astype(np.int64)
    return positions


def _vector(blob: bytes, path: str) -> Positions:
    length = int.from_bytes(blob[:_FRAME], "big")
    content, checksum = blob[_FRAME : _FRAME + length], blob[_FRAME + length : 2 * _FRAME + length]
    whole = content[: len(_MAGIC)] == _MAGIC and zlib.crc32(content) == int.from_bytes(checksum, "big")
    if not whole:
        raise OSError(f"the deletion vector in {path} is damaged: its magic number or its checksum is wrong")
    deleted = BitMap64.deserialize(content[len(_MAGIC) :]).to_array()
    return np.frombuffer(deleted, np.uint64).astype(np.int64)
