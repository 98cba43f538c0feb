"""How many rows of each key have come, and which further ones are among the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.arrow.ipc_messages import kept_table
from penstock.errors import CheckpointMismatch
from penstock.spark.factorize import codes_of, ranks

_KEY = "key_"
_COUNT, _LAST = "count", "last"


@dataclass(frozen=True)
class Seen:
    """The keys of which rows have passed, with how many, and when the last row of each came: milliseconds since 1970."""

    table: pa.Table

    @classmethod
    def nothing(cls, keys: list[pa.Array]) -> Seen:
        """Before the first row of keys with these types."""
        kinds = [(f"{_KEY}{place}", column.type) for place, column in enumerate(keys)]
        return cls(pa.schema([*kinds, (_COUNT, pa.int32()), (_LAST, pa.int64())]).empty_table())

    @classmethod
    def from_bytes(cls, kept: bytes) -> Seen:
        try:
            return cls(kept_table(kept))
        except ValueError as error:
            raise CheckpointMismatch(
                f"the state of the limit is not as a limit writes it ({error}): bring the checkpoint back from a copy, or start with a new one"
            ) from error

    def to_bytes(self) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.table.schema) as writer:
            writer.write_table(self.table)
        return bytes(sink.getvalue())

    def since(self, moment: int, now: int) -> Seen:
        """Without the keys of which no row has come from a moment on.

        Parameters
        ----------
        now
            Stands for the last row of a key that was counted while none was ever forgotten: when it came is not known.
        """
        last = self.table[_LAST].to_numpy()
        last = np.where(last == 0, now, last)
        place = self.table.schema.get_field_index(_LAST)
        dated = self.table.set_column(place, self.table.schema.field(place), pa.array(last, pa.int64()))
        return Seen(dated.filter(pa.array(last >= moment)))

    def take(self, keys: list[pa.Array], rows: int, now: int) -> tuple[Any, Seen]:
        """Which of further rows are among the first of their keys, and what has been seen with them.

        Parameters
        ----------
        keys
            The key columns of the rows, in their order; one row at the least.
        rows
            How many rows of each key pass.
        now
            When they came.
        """
        known = self.table.num_rows
        together = [self._with(place, column) for place, column in enumerate(keys)]
        codes = codes_of(together).dense()
        before, last = np.zeros(codes.size, np.int64), np.zeros(codes.size, np.int64)
        old, new = codes.values[:known], codes.values[known:]
        before[old], last[old] = self.table[_COUNT].to_numpy(), self.table[_LAST].to_numpy()
        passes = before[new] + ranks(new) < rows
        after = np.minimum(before + np.bincount(new, minlength=codes.size), np.maximum(before, rows))
        last[new] = now
        where = np.zeros(codes.size, np.int64)
        where[codes.values[::-1]] = np.arange(len(codes.values))[::-1]
        columns = [column.take(pa.array(where)) for column in together]
        columns += [pa.array(after, pa.int32()), pa.array(last, pa.int64())]
        return passes, Seen(pa.table(columns, schema=self.table.schema))

    def _with(self, place: int, column: pa.Array) -> pa.Array:
        kept = self.table.column(place)
        return pa.concat_arrays([*kept.chunks, column.cast(kept.type)])
