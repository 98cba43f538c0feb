"""Conversion of a copy's values to the source's types, which may not be able to represent them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_quotes
from penstock.errors import TableRefusedError
from penstock.reconciliation.rows import INVALID


def convert_columns(
    columns: Mapping[str, pa.Array],
    schema: pa.Schema,
    convert: Callable[[pa.Array, pa.DataType], pa.Array],
    key: Sequence[str],
    label: str,
) -> pa.Table:
    """Convert columns to the types of a schema, and add INVALID, which names columns with invalid values."""
    arrays: list[pa.Array] = []
    invalid_names: pa.Array | None = None
    for field in schema:
        values = columns[field.name]
        try:
            arrays.append(convert(values, field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError):
            converted = _convert_valid(values, field.type, convert)
            is_invalid = pc.and_(pc.is_valid(values), pc.is_null(converted))
            names = pc.if_else(is_invalid, pa.scalar(f"{field.name}\0"), pa.scalar(""))
            invalid_names = (
                names if invalid_names is None else pc.binary_join_element_wise(invalid_names, names, "")
            )
            arrays.append(converted)
    rows = len(arrays[0]) if arrays else 0
    if invalid_names is None:
        invalid_column = pa.nulls(rows, pa.string())
    else:
        invalid_column = pc.if_else(pc.equal(invalid_names, ""), pa.scalar(None, pa.string()), invalid_names)
    table = pa.table([*arrays, invalid_column], names=[*schema.names, INVALID])
    _require_keys(table, key, label)
    return table


def _convert_valid(
    values: pa.Array, kind: pa.DataType, convert: Callable[[pa.Array, pa.DataType], pa.Array]
) -> pa.Array:
    """Convert values; those that the type cannot represent become null."""
    if len(values) > 1:
        half = len(values) // 2
        converted = []
        for part in (values.slice(0, half), values.slice(half)):
            try:
                converted.append(convert(part, kind))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OverflowError):
                converted.append(_convert_valid(part, kind, convert))
        return pa.concat_arrays(converted)
    return pa.nulls(len(values), kind)


def _require_keys(table: pa.Table, key: Sequence[str], label: str) -> None:
    for name in key:
        if table[name].null_count:
            raise TableRefusedError(
                f"{label} has a row whose {in_quotes(name)} is NULL, or not a value of the source's type. "
                "The column is part of the key, so the row cannot be compared: delete the row",
                condition="TABLE_REFUSED.KEY_NOT_COMPARABLE",
                column=name,
            )


def single_array(column: pa.ChunkedArray) -> pa.Array:
    """Combine the chunks of a column into one array."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
