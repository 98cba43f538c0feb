"""Binary arrays of integers as parameters of PostgreSQL statements."""

from __future__ import annotations

import struct
import sys
from array import array

from psycopg.adapt import Dumper
from psycopg.pq import Format

_INT8, _INT8_ARRAY = 20, 1016


class Int8ArrayDumper(Dumper):
    """Sends 64-bit integers as ``bigint[]`` in PostgreSQL's binary format (that of ``array_send``).

    In the text format, ten thousand numbers take a millisecond longer, both here and in the server.
    """

    format = Format.BINARY
    oid = _INT8_ARRAY

    def dump(self, obj: array[int]) -> bytes:
        numbers = array("q", obj)
        if sys.byteorder == "little":
            numbers.byteswap()
        data, count = numbers.tobytes(), len(numbers)
        # Each number follows its size, which is 8, as a 32-bit number.
        items = bytearray(12 * count)
        items[3::12] = b"\x08" * count
        for position in range(8):
            items[4 + position :: 12] = data[position::8]
        # One dimension, no nulls, the type of the items, their count, and the index of the first one.
        return struct.pack(">5i", 1, 0, _INT8, count, 1) + items
