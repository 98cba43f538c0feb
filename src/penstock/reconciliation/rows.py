"""A common form for rows of source and copy: their keys, and a hash of each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from numpy.typing import NDArray

from penstock.arrow.key_hash import key_hash, row_hashes

Key: TypeAlias = tuple[Any, ...]
INVALID = "_penstock_invalid"
"""A column of rows of the copy: the names of columns whose values the source's types cannot hold."""
BUCKETS = 1 << 16
_BUCKET_BITS = 16
_MASK = (1 << 64) - 1
Hashes: TypeAlias = NDArray[np.uint64]


class Print(NamedTuple):
    """Stands for the row with a key, or for several."""

    rows: int
    sum: int


ABSENT = Print(0, 0)


@dataclass(frozen=True)
class HashedRows:
    """The keys of some rows, and a hash of each row."""

    keys: pa.Table
    hashes: Hashes

    @classmethod
    def of(cls, rows: pa.Table, key: Sequence[str]) -> HashedRows:
        keys = rows.select(list(key))
        nullable = pa.schema([field.with_nullable(True) for field in keys.schema])
        return cls(pa.table(keys.columns, schema=nullable), _hashes(rows))

    @classmethod
    def joined(cls, parts: Sequence[HashedRows]) -> HashedRows:
        keys = pa.concat_tables([part.keys for part in parts])
        return cls(keys, np.concatenate([part.hashes for part in parts]))

    @property
    def buckets(self) -> NDArray[np.uint32]:
        """The bucket of each row, which depends on its key alone."""
        hashes: NDArray[np.uint32] = np.asarray(key_hash(self.keys, self.keys.column_names))
        return hashes >> np.uint32(_BUCKET_BITS)

    def filtered(self, mask: NDArray[np.bool_]) -> HashedRows:
        return HashedRows(self.keys.filter(pa.array(mask)), self.hashes[mask])


def _hashes(rows: pa.Table) -> Hashes:
    """Return a hash of each row, in which the column INVALID counts only where it has a value."""
    place = rows.schema.get_field_index(INVALID)
    if place < 0:
        return np.asarray(row_hashes(rows))
    hashes: Hashes = np.array(row_hashes(rows.remove_column(place)))
    marked = rows.select([INVALID])
    if marked[INVALID].null_count < rows.num_rows:
        invalid = np.asarray(marked[INVALID].is_valid())
        hashes[invalid] ^= np.asarray(row_hashes(marked))[invalid]
    return hashes


def without_nan(rows: pa.Table) -> pa.Table:
    """Return rows with NULL instead of NaN."""
    for place, field in enumerate(rows.schema):
        if pat.is_floating(field.type):
            column = rows.column(place)
            numbers = pc.if_else(pc.is_nan(column), pa.scalar(None, field.type), column)
            rows = rows.set_column(place, field.with_nullable(True), numbers)
    return rows


def keys_of(rows: pa.Table) -> list[Key]:
    """Return the rows of a table with the columns of the key alone as keys."""
    return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def key_table(schema: pa.Schema, keys: Sequence[Key]) -> pa.Table:
    """Return keys as a table."""
    columns = zip(*keys, strict=True) if keys else ((),) * len(schema)
    return pa.table([pa.array(values, f.type) for f, values in zip(schema, columns, strict=True)], schema)


def unmatched(source: HashedRows, copy: HashedRows) -> list[Key]:
    """Return the keys of rows that are missing or different on the other side, or twice in the copy."""
    only_source = ~np.isin(source.hashes, copy.hashes)
    only_copy = ~np.isin(copy.hashes, source.hashes) | _repeated(copy.hashes)
    parts = [source.keys.filter(pa.array(only_source)), copy.keys.filter(pa.array(only_copy))]
    return list(dict.fromkeys(key for part in parts for key in keys_of(part)))


def _repeated(hashes: Hashes) -> NDArray[np.bool_]:
    values, counts = np.unique(hashes, return_counts=True)
    repeated: NDArray[np.bool_] = np.isin(hashes, values[counts > 1])
    return repeated


def prints(parts: Iterable[pa.Table], key: Sequence[str]) -> dict[Key, Print]:
    """Return what stands for the rows of each key."""
    found: dict[Key, Print] = {}
    for rows in parts:
        hashed = HashedRows.of(rows, key)
        for each, value in zip(keys_of(hashed.keys), hashed.hashes.tolist(), strict=True):
            before = found.get(each, ABSENT)
            found[each] = Print(before.rows + 1, (before.sum + value) & _MASK)
    return found


def stale_keys(source: pa.Table, copy: pa.Table, key: Sequence[str]) -> list[Key]:
    """Return the keys whose rows are not in the copy as they are in the source."""
    wanted, found = prints([source], key), prints([copy], key)
    return [each for each in {**wanted, **found} if wanted.get(each, ABSENT) != found.get(each, ABSENT)]
