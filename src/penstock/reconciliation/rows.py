"""Keys and hashes of rows, by which the source and the copy are compared."""

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
"""A column in rows of the copy: the names of columns with values that the source's types cannot represent."""
BUCKETS = 1 << 16
_BUCKET_BITS = 16
_MASK = (1 << 64) - 1
Hashes: TypeAlias = NDArray[np.uint64]


class RowDigest(NamedTuple):
    """Digest of the rows with one key: the number of rows, and the sum of their hashes."""

    rows: int
    sum: int


ABSENT = RowDigest(0, 0)


@dataclass(frozen=True)
class HashedRows:
    """The keys of rows, and a hash of each row."""

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
        """The bucket of each row, which depends only on its key."""
        hashes: NDArray[np.uint32] = np.asarray(key_hash(self.keys, self.keys.column_names))
        return hashes >> np.uint32(_BUCKET_BITS)

    def filtered(self, mask: NDArray[np.bool_]) -> HashedRows:
        return HashedRows(self.keys.filter(pa.array(mask)), self.hashes[mask])


def _hashes(rows: pa.Table) -> Hashes:
    """Return a hash of each row; the column INVALID affects it only if it is not null."""
    index = rows.schema.get_field_index(INVALID)
    if index < 0:
        return np.asarray(row_hashes(rows))
    hashes: Hashes = np.array(row_hashes(rows.remove_column(index)))
    marks = rows.select([INVALID])
    if marks[INVALID].null_count < rows.num_rows:
        invalid = np.asarray(marks[INVALID].is_valid())
        hashes[invalid] ^= np.asarray(row_hashes(marks))[invalid]
    return hashes


def without_nan(rows: pa.Table) -> pa.Table:
    """Return rows with NULL instead of NaN."""
    for index, field in enumerate(rows.schema):
        if pat.is_floating(field.type):
            column = rows.column(index)
            numbers = pc.if_else(pc.is_nan(column), pa.scalar(None, field.type), column)
            rows = rows.set_column(index, field.with_nullable(True), numbers)
    return rows


def keys_of(rows: pa.Table) -> list[Key]:
    """Return the rows of a table that has only the key columns as tuples."""
    return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def key_table(schema: pa.Schema, keys: Sequence[Key]) -> pa.Table:
    """Convert keys to a table."""
    columns = zip(*keys, strict=True) if keys else ((),) * len(schema)
    return pa.table([pa.array(values, f.type) for f, values in zip(schema, columns, strict=True)], schema)


def unmatched_keys(source: HashedRows, copy: HashedRows) -> list[Key]:
    """Return the keys of rows that are missing or different on the other side, or repeated in the copy."""
    unmatched_in_source = ~np.isin(source.hashes, copy.hashes)
    unmatched_in_copy = ~np.isin(copy.hashes, source.hashes) | _repeated(copy.hashes)
    parts = [source.keys.filter(pa.array(unmatched_in_source)), copy.keys.filter(pa.array(unmatched_in_copy))]
    return list(dict.fromkeys(key for part in parts for key in keys_of(part)))


def _repeated(hashes: Hashes) -> NDArray[np.bool_]:
    values, counts = np.unique(hashes, return_counts=True)
    repeated: NDArray[np.bool_] = np.isin(hashes, values[counts > 1])
    return repeated


def digests_by_key(parts: Iterable[pa.Table], key: Sequence[str]) -> dict[Key, RowDigest]:
    """Return a digest of the rows of each key."""
    digests: dict[Key, RowDigest] = {}
    for rows in parts:
        hashed = HashedRows.of(rows, key)
        for key_values, value in zip(keys_of(hashed.keys), hashed.hashes.tolist(), strict=True):
            before = digests.get(key_values, ABSENT)
            digests[key_values] = RowDigest(before.rows + 1, (before.sum + value) & _MASK)
    return digests


def stale_keys(source: pa.Table, copy: pa.Table, key: Sequence[str]) -> list[Key]:
    """Return the keys whose rows differ between the source and the copy."""
    source_digests, copy_digests = digests_by_key([source], key), digests_by_key([copy], key)
    return [
        key_values
        for key_values in {**source_digests, **copy_digests}
        if source_digests.get(key_values, ABSENT) != copy_digests.get(key_values, ABSENT)
    ]
