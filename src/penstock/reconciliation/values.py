"""Conversion of a copy's values to the source's types, which may not be able to hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_quotes
from penstock.errors import TableRefusedError
from penstock.reconciliation.rows import INVALID


def in_types(
    columns: Mapping[str, pa.Array],
    schema: pa.Schema,
    convert: Callable[[pa.Array, pa.DataType], pa.Array],
    key: Sequence[str],
    shown: str,
) -> pa.Table:
    """Return columns in the types of a schema, and INVALID, which names those with values of another type."""
    arrays: list[pa.Array] = []
    invalid: pa.Array | None = None
    for field in schema:
        values = columns[field.name]
        try:
            arrays.append(convert(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError):
            converted = _one_by_one(values, field.type, convert)
            mark = pc.and_(pc.is_valid(values), pc.is_null(converted))
            names = pc.if_else(mark, pa.scalar(f"{field.name}\0"), pa.scalar(""))
            invalid = names if invalid is None else pc.binary_join_element_wise(invalid, names, "")
            arrays.append(converted)
    rows = len(arrays[0]) if arrays else 0
    if invalid is None:
        marks = pa.nulls(rows, pa.string())
    else:
        marks = pc.if_else(pc.equal(invalid, ""), pa.scalar(None, pa.string()), invalid)
    table = pa.table([*arrays, marks], names=[*schema.names, INVALID])
    _require_keys(table, key, shown)
    return table


def _one_by_one(
    values: pa.Array, kind: pa.DataType, convert: Callable[[pa.Array, pa.DataType], pa.Array]
) -> pa.Array:
    """Convert values; null for those that the type cannot hold."""
    if len(values) > 1:
        half = len(values) // 2
        halves = []
        for part in (values.slice(0, half), values.slice(half)):
            try:
                halves.append(convert(part, kind))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError):
                halves.append(_one_by_one(part, kind, convert))
        return pa.concat_arrays(halves)
    return pa.nulls(len(values), kind)


def _require_keys(table: pa.Table, key: Sequence[str], shown: str) -> None:
    for name in key:
        if table[name].null_count:
            raise TableRefusedError(
                f"{shown} has a row whose {in_quotes(name)} is NULL, or not a value of the source's type. It "
                "belongs to the key, so the row cannot be compared: delete it",
                condition="TABLE_REFUSED.KEY_NOT_COMPARABLE",
                column=name,
            )


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column of a table as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
