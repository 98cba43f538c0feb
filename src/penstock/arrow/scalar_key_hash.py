"""The key hash of a few rows in plain Python: a single-row append must not pay for dozens of kernel calls.

``keys`` defines the hash; a test holds both ways equal.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

# Above these the vectorised way is faster.
MAX_ROWS = 64
_MAX_BYTES = 4096

_MASK = 0xFFFFFFFFFFFFFFFF
_SEED = 0x243F6A8885A308D3
_NULL = 0x452821E638D01377
_NAN = 0x7FF8000000000000
_LEFT_FACTOR = 0x9E3779B97F4A7C15
_DOUBLE = struct.Struct("<d")
_WORD = struct.Struct("<Q")


def hashes(table: pa.Table | pa.RecordBatch, key: Sequence[str]) -> list[int] | None:
    """Return the hash of each row, or None when this is not the way to work it out.

    Parameters
    ----------
    table
        A few rows.
    key
        The names of the key columns.
    """
    schema = table.schema
    accumulated = [_SEED] * table.num_rows
    for name in key:
        place = schema.get_field_index(name)
        word_of = _WORDS.get(schema.field(place).type.id) if place >= 0 else None
        if word_of is None:
            return None
        column = table.column(place)
        if word_of in _OF_ANY_LENGTH and column.nbytes > _MAX_BYTES:
            return None
        words = [_NULL if value is None else word_of(value) for value in column.to_pylist()]
        accumulated = [_mix(before ^ word) for before, word in zip(accumulated, words, strict=True)]
    return [each >> 32 for each in accumulated]


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _integer_word(value: int) -> int:
    return value & _MASK


def _float_word(value: float) -> int:
    if value != value:
        return _NAN
    bits: int = _WORD.unpack(_DOUBLE.pack(value + 0.0))[0]
    return bits


def _bytes_word(value: bytes) -> int:
    size = len(value)
    total = 0
    for start in range(0, size, 8):
        window = int.from_bytes(value[start : start + 8], "little")
        total += _mix(window ^ ((size - start) * _LEFT_FACTOR & _MASK))
    return total & _MASK


def _string_word(value: str) -> int:
    return _bytes_word(value.encode())


_OF_ANY_LENGTH = frozenset({_string_word, _bytes_word})
_WORDS: dict[int, Callable[[Any], int]] = {
    pa.bool_().id: _integer_word,
    pa.int8().id: _integer_word,
    pa.int16().id: _integer_word,
    pa.int32().id: _integer_word,
    pa.int64().id: _integer_word,
    pa.float32().id: _float_word,
    pa.float64().id: _float_word,
    pa.string().id: _string_word,
    pa.binary().id: _bytes_word,
}
