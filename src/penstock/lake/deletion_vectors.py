"""Deletion vectors of Delta tables, which list the positions of a data file's deleted rows.

In Delta's protocol (https://github.com/delta-io/delta/blob/master/PROTOCOL.md, "Deletion Vector Format"), a
vector is either stored inline in the log, as text, or in a file that the log names, with an offset.
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
"""Magic number of a 64-bit Roaring bitmap array in the portable format."""
_VERSION = b"\x01"
_SIZE, _CHECKSUM, _HEADER = struct.Struct(">i"), struct.Struct(">I"), struct.Struct("<iQ")
_BITMAP_KEY = struct.Struct("<I")
_ENCODED_UUID = 20
_INLINE, _IN_FILE = "i", "u"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_TO_Z85, _FROM_Z85 = bytes.maketrans(_B85, _Z85), bytes.maketrans(_Z85, _B85)


class CorruptDeletionVector(ValueError):
    """The bytes of a vector do not match the log, or have an unsupported format."""


@dataclass(frozen=True)
class DeletionVector:
    """Descriptor of a deletion vector: where it is stored, as an action of the log describes it."""

    storage: str
    """``i`` for an inline vector, ``u`` for a vector in a file of the table's folder."""
    path_or_inline: str
    size: int
    cardinality: int
    """The number of deleted rows."""
    offset: int | None = None

    @classmethod
    def of(cls, action: dict[str, Any]) -> DeletionVector:
        """Parse the field ``deletionVector`` of an action."""
        return cls(
            action["storageType"],
            action["pathOrInlineDv"],
            action["sizeInBytes"],
            action["cardinality"],
            action.get("offset"),
        )

    @classmethod
    def inline(cls, data: bytes, cardinality: int) -> DeletionVector:
        """Return the descriptor of an inline vector."""
        return cls(_INLINE, _z85_encode(data), len(data), cardinality)

    @classmethod
    def in_file(cls, folder: str, name: uuid.UUID, data: bytes, cardinality: int) -> DeletionVector:
        """Return the descriptor of a vector in its own file, with the content of :func:`vector_file_content`.

        ``folder`` is a subfolder of the table's folder.
        """
        return cls(_IN_FILE, folder + _z85_encode(name.bytes), len(data), cardinality, len(_VERSION))

    @property
    def action(self) -> dict[str, Any]:
        """The field ``deletionVector`` of an action."""
        offset = {} if self.offset is None else {"offset": self.offset}
        return {
            "storageType": self.storage,
            "pathOrInlineDv": self.path_or_inline,
            **offset,
            "sizeInBytes": self.size,
            "cardinality": self.cardinality,
        }

    @property
    def path(self) -> str | None:
        """The path of the vector's file in the table's folder; None for an inline vector."""
        if self.storage == _INLINE:
            return None
        if self.storage != _IN_FILE or len(self.path_or_inline) < _ENCODED_UUID:
            raise CorruptDeletionVector(
                f"deletion vectors of storage type {self.storage!r} are not supported"
            )
        folder, name = self.path_or_inline[:-_ENCODED_UUID], self.path_or_inline[-_ENCODED_UUID:]
        return vector_file_path(folder, uuid.UUID(bytes=_z85_decode(name, 16)))

    def positions(self, files: FileSystem) -> Positions:
        """Return the positions of the deleted rows, in ascending order.

        ``files`` is a file system with the table's folder as its root.
        """
        path = self.path
        deleted = decode(
            _z85_decode(self.path_or_inline, self.size) if path is None else self._read(files, path)
        )
        if len(deleted) != self.cardinality:
            raise CorruptDeletionVector(
                f"a deletion vector lists {len(deleted)} rows instead of {self.cardinality}"
            )
        return deleted

    def _read(self, files: FileSystem, path: str) -> bytes:
        with files.open_input_file(path) as file:
            data = file.read_at(_SIZE.size + self.size + _CHECKSUM.size, self.offset or 0)
        if len(data) != _SIZE.size + self.size + _CHECKSUM.size:
            raise CorruptDeletionVector(f"the deletion vector in {path} ends too early")
        vector = data[_SIZE.size : -_CHECKSUM.size]
        checksum_matches = _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0] == zlib.crc32(vector)
        if not checksum_matches or _SIZE.unpack_from(data)[0] != self.size:
            raise CorruptDeletionVector(f"the deletion vector in {path} is damaged")
        return bytes(vector)


def vector_file_path(folder: str, name: uuid.UUID) -> str:
    """Return the path of a vector file; an empty ``folder`` is the table's own folder."""
    return f"{folder}{'/' if folder else ''}deletion_vector_{name}.bin"


def vector_file_content(data: bytes) -> bytes:
    """Return the content of a file with a single vector."""
    return b"".join((_VERSION, _SIZE.pack(len(data)), data, _CHECKSUM.pack(zlib.crc32(data))))


def encode(positions: Positions) -> bytes:
    """Serialize a vector; positions must be below 2**32, which holds for every data file."""
    bitmap = _roaring_bitmap(positions.astype(np.uint32))
    bitmap.run_optimize()
    data: bytes = bitmap.serialize()
    return _HEADER.pack(_MAGIC, 1) + _BITMAP_KEY.pack(0) + data


def decode(data: bytes) -> Positions:
    """Deserialize a vector, and return its positions in ascending order."""
    if len(data) < _HEADER.size or _HEADER.unpack_from(data)[0] != _MAGIC:
        raise CorruptDeletionVector("the bytes of a deletion vector are not in the portable format")
    treemap = load("pyroaring", "BitMap64", "a Delta table with deletion vectors")
    try:
        bitmap = treemap.deserialize(data[_BITMAP_KEY.size :])
    except ValueError as error:
        raise CorruptDeletionVector(f"the bytes of a deletion vector are damaged ({error})") from None
    return np.frombuffer(bitmap.to_array(), np.uint64).astype(np.int64)


def _roaring_bitmap(positions: NDArray[np.uint32]) -> Any:
    return load("pyroaring", "BitMap", "a Delta table with deletion vectors")(positions)


def _z85_encode(data: bytes) -> str:
    padded = data + bytes(-len(data) % 4)
    return base64.b85encode(padded).translate(_TO_Z85).decode()


def _z85_decode(encoded: str, size: int) -> bytes:
    try:
        data = base64.b85decode(encoded.encode().translate(_FROM_Z85))
    except (ValueError, binascii.Error) as error:
        raise CorruptDeletionVector(f"the text of a deletion vector is damaged ({error})") from None
    if not size <= len(data) < size + 4:
        raise CorruptDeletionVector("the text of a deletion vector has another length than the log says")
    return data[:size]
