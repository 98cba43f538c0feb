"""Conversion of values in Iceberg data files to the current types of their columns.

Columns and nested fields are matched by their ids, since they may have been renamed, added, dropped or
widened after a file was written. pyiceberg's own conversion turns null lists and maps of structs into empty
ones, and loses deeply nested fields that have other names in the file (up to 0.12).
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType


def current_column(
    batch: pa.RecordBatch, stored: NestedField | None, current: NestedField, constants: Mapping[int, object]
) -> pa.Array:
    """Return the values of a column in its current type.

    ``stored`` is the column's field in the file, or None if the file lacks the column. ``constants`` has
    partition values by field id, for columns that the file may lack; dates and times are integers.

    Raises
    ------
    ValueError
        When the file lacks a required column without a default.
    """
    if stored is not None:
        return convert(batch.column(stored.name), stored.field_type, current.field_type)
    value = constants.get(current.field_id)
    if value is None:
        return _default_values(current, batch.num_rows)
    kind = _arrow_type(current.field_type)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    stored_value = pa.scalar(value, _integer_type(kind)) if is_number else pa.scalar(value)
    return pa.repeat(stored_value.cast(kind), batch.num_rows)


def _default_values(field: NestedField, rows: int) -> pa.Array:
    """Return the values of a field for rows that were written before it was added."""
    kind = _arrow_type(field.field_type)
    if field.initial_default is not None:
        return pa.repeat(pa.scalar(field.initial_default, kind), rows)
    if field.required:
        raise ValueError(f"the file lacks the required field {field.name!r}")
    return pa.nulls(rows, kind)


def _arrow_type(kind: IcebergType) -> pa.DataType:
    arrow_type: pa.DataType = schema_to_pyarrow(kind, include_field_ids=False)
    return arrow_type


def _integer_type(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if kind.bit_width == 32 else pa.int64()


def convert(array: pa.Array, stored: IcebergType, current: IcebergType) -> pa.Array:
    """Convert values to the current type of their column, matching nested fields by id."""
    if isinstance(stored, StructType) and isinstance(current, StructType):
        return _convert_struct(array, stored, current)
    if isinstance(stored, ListType) and isinstance(current, ListType):
        offsets, start, length = _offsets(array)
        values = convert(array.values.slice(start, length), stored.element_type, current.element_type)
        field = pa.field("element", values.type, not current.element_required)
        return pa.LargeListArray.from_arrays(
            offsets.cast(pa.int64()), values, type=pa.large_list(field), mask=array.is_null()
        )
    if isinstance(stored, MapType) and isinstance(current, MapType):
        offsets, start, length = _offsets(array)
        keys = convert(array.keys.slice(start, length), stored.key_type, current.key_type)
        items = convert(array.items.slice(start, length), stored.value_type, current.value_type)
        kind = pa.map_(
            pa.field("key", keys.type, nullable=False),
            pa.field("value", items.type, not current.value_required),
        )
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=array.is_null())
    kind = _arrow_type(current)
    # Other engines may write nanoseconds, and the table has microseconds.
    return array if array.type == kind else array.cast(kind, safe=not pa.types.is_timestamp(array.type))


def _convert_struct(array: pa.StructArray, stored: StructType, current: StructType) -> pa.StructArray:
    children = {
        field.field_id: (array.field(index), field.field_type) for index, field in enumerate(stored.fields)
    }
    arrays, fields = [], []
    for field in current.fields:
        if field.field_id in children:
            values = convert(*children[field.field_id], field.field_type)
        else:
            values = _default_values(field, len(array))
        arrays.append(values)
        fields.append(pa.field(field.name, values.type, not field.required))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())


def _offsets(array: pa.Array) -> tuple[pa.Array, int, int]:
    """Return the offsets of lists or maps shifted to 0, and the start and length of their values."""
    offsets = array.offsets
    start = offsets[0].as_py()
    return pc.subtract(offsets, offsets[0]), start, offsets[-1].as_py() - start
