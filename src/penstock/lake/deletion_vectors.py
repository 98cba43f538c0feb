"""Deletion vectors of Delta tables, which list the positions of a data file's deleted rows.

By Delta's protocol (https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Deletion Vector Format"), a
vector is either in the log, as text, or in a file whose name and offset are in the log.
"""

from __future__ import annotations

import base64
import binascii
import struct
import uuid
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyarrow.fs import FileSystem

from penstock.extras import load

Positions = NDArray[np.int64]

_MAGIC = 1681511377
"""The magic number of an array of bitmaps in the portable format of 64-bit Roaring bitmaps."""
_VERSION = b"\x01"
_SIZE, _CHECKSUM, _HEAD = struct.Struct(">i"), struct.Struct(">I"), struct.Struct("<iQ")
_KEY = struct.Struct("<I")
_ENCODED_UUID = 20
_INLINE, _RELATIVE = "i", "u"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85, _FROM_Z85 = bytes.maketrans(_B85, _Z85), bytes.maketrans(_Z85, _B85)


class DamagedVector(ValueError):
    """The bytes of a vector do not match the log, or have a form that is not supported here."""


@dataclass(frozen=True)
class DeletionVector:
    """The location of a vector, as in an action of the log."""

    storage: str
    """``i`` for a vector in the log, ``u`` for one in a file of the table's folder."""
    place: str
    size: int
    rows: int
    """The number of deleted rows."""
    offset: int | None = None

    @classmethod
    def of(cls, action: dict[str, Any]) -> DeletionVector:
        """Return the vector in an action's field ``deletionVector``."""
        return cls(
            action["storageType"],
            action["pathOrInlineDv"],
            action["sizeInBytes"],
            action["cardinality"],
            action.get("offset"),
        )

    @classmethod
    def inline(cls, data: bytes, rows: int) -> DeletionVector:
        """Return a vector that is stored in the log."""
        return cls(_INLINE, _encoded(data), len(data), rows)

    @classmethod
    def in_file(cls, folder: str, name: uuid.UUID, data: bytes, rows: int) -> DeletionVector:
        """Return the only vector of a file in a subfolder of the table, with the content :func:`file_of`."""
        return cls(_RELATIVE, folder + _encoded(name.bytes), len(data), rows, len(_VERSION))

    @property
    def action(self) -> dict[str, Any]:
        """The field ``deletionVector`` of an action."""
        offset = {} if self.offset is None else {"offset": self.offset}
        return {
            "storageType": self.storage,
            "pathOrInlineDv": self.place,
            **offset,
            "sizeInBytes": self.size,
            "cardinality": self.rows,
        }

    @property
    def path(self) -> str | None:
        """The path of the vector's file in the table's folder; None for a vector in the log."""
        if self.storage == _INLINE:
            return None
        if self.storage != _RELATIVE or len(self.place) < _ENCODED_UUID:
            raise DamagedVector(f"a deletion vector of the storage type {self.storage!r} is not read")
        folder, name = self.place[:-_ENCODED_UUID], self.place[-_ENCODED_UUID:]
        return path_of(folder, uuid.UUID(bytes=_decoded(name, 16)))

    def positions(self, files: FileSystem) -> Positions:
        """Return the positions of the deleted rows, in ascending order; ``files`` has the table's folder."""
        path = self.path
        found = decode(_decoded(self.place, self.size) if path is None else self._read(files, path))
        if len(found) != self.rows:
            raise DamagedVector(f"a deletion vector has {len(found)} rows instead of {self.rows}")
        return found

    def _read(self, files: FileSystem, path: str) -> bytes:
        with files.open_input_file(path) as file:
            data = file.read_at(_SIZE.size + self.size + _CHECKSUM.size, self.offset or 0)
        if len(data) != _SIZE.size + self.size + _CHECKSUM.size:
            raise DamagedVector(f"the deletion vector in {path} ends too early")
        vector = data[_SIZE.size : -_CHECKSUM.size]
        is_whole = _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] == zlib.crc32(vector)
        if not is_whole or _SIZE.unpack_from(data)[0] != self.size:
            raise DamagedVector(f"the deletion vector in {path} is damaged")
        return bytes(vector)


def path_of(folder: str, name: uuid.UUID) -> str:
    """Return the path of a vector file in a subfolder of the table's folder, or in the folder itself."""
    return f"{folder}{'/' if folder else ''}deletion_vector_{name}.bin"


def file_of(data: bytes) -> bytes:
    """Return the content of a file that has one vector."""
    return b"".join((_VERSION, _SIZE.pack(len(data)), data, _CHECKSUM.pack(zlib.crc32(data))))


def encode(positions: Positions) -> bytes:
    """Return the bytes of a vector; positions are below 2**32, as no data file is larger."""
    bitmap = _bitmap(positions.astype(np.uint32))
    bitmap.run_optimize()
    data: bytes = bitmap.serialize()
    return _HEAD.pack(_MAGIC, 1) + _KEY.pack(0) + data


def decode(data: bytes) -> Positions:
    """Return the positions in the bytes of a vector, in ascending order."""
    if len(data) < _HEAD.size or _HEAD.unpack_from(data)[0] != _MAGIC:
        raise DamagedVector("the bytes of a deletion vector are not in the portable format")
    treemap = load("pyroaring", "BitMap64", "a Delta table with deletion vectors")
    try:
        found = treemap.deserialize(data[_KEY.size :])
    except ValueError as error:
        raise DamagedVector(f"the bytes of a deletion vector are damaged ({error})") from None
    return np.frombuffer(found.to_array(), np.uint64).astype(np.int64)


def _bitmap(positions: NDArray[np.uint32]) -> Any:
    return load("pyroaring", "BitMap", "a Delta table with deletion vectors")(positions)


def _encoded(data: bytes) -> str:
    padded = data + bytes(-len(data) % 4)
    return base64.b85encode(padded).translate(_TO_Z85).decode()


def _decoded(text: str, size: int) -> bytes:
    try:
        data = base64.b85decode(text.encode().translate(_FROM_Z85))
    except (ValueError, binascii.Error) as error:
        raise DamagedVector(f"the text of a deletion vector is damaged ({error})") from None
    if not size <= len(data) < size + 4:
        raise DamagedVector("the text of a deletion vector has another length than the log says")
    return data[:size]
