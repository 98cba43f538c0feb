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
    batch: pa.RecordBatch, stored: NestedField | None, wanted: NestedField, constants: Mapping[int, object]
) -> pa.Array:
    """Return the values of a column, whose field in the file is ``stored``; None if the file lacks it.

    ``constants`` are the partition's values of columns that the file may lack, by field id; dates and times
    are numbers.

    Raises
    ------
    ValueError
        When the file lacks a column that takes no null and has no default.
    """
    if stored is not None:
        return projected(batch.column(stored.name), stored.field_type, wanted.field_type)
    value = constants.get(wanted.field_id)
    if value is None:
        return _missing(wanted, batch.num_rows)
    kind = _arrow(wanted.field_type)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    physical = pa.scalar(value, _integer(kind)) if is_number else pa.scalar(value)
    return pa.repeat(physical.cast(kind), batch.num_rows)


def _missing(field: NestedField, rows: int) -> pa.Array:
    """Return the values of a field in rows from before it was added."""
    kind = _arrow(field.field_type)
    if field.initial_default is not None:
        return pa.repeat(pa.scalar(field.initial_default, kind), rows)
    if field.required:
        raise ValueError(f"the file lacks the field {field.name!r}, which takes no null")
    return pa.nulls(rows, kind)


def _arrow(kind: IcebergType) -> pa.DataType:
    found: pa.DataType = schema_to_pyarrow(kind, include_field_ids=False)
    return found


def _integer(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if kind.bit_width == 32 else pa.int64()


def projected(array: pa.Array, stored: IcebergType, wanted: IcebergType) -> pa.Array:
    """Convert values to the current type of their column; nested fields are matched by their ids."""
    if isinstance(stored, StructType) and isinstance(wanted, StructType):
        return _struct(array, stored, wanted)
    if isinstance(stored, ListType) and isinstance(wanted, ListType):
        offsets, start, length = _offsets(array)
        values = projected(array.values.slice(start, length), stored.element_type, wanted.element_type)
        field = pa.field("element", values.type, not wanted.element_required)
        return pa.LargeListArray.from_arrays(
            offsets.cast(pa.int64()), values, type=pa.large_list(field), mask=array.is_null()
        )
    if isinstance(stored, MapType) and isinstance(wanted, MapType):
        offsets, start, length = _offsets(array)
        keys = projected(array.keys.slice(start, length), stored.key_type, wanted.key_type)
        items = projected(array.items.slice(start, length), stored.value_type, wanted.value_type)
        kind = pa.map_(
            pa.field("key", keys.type, nullable=False),
            pa.field("value", items.type, not wanted.value_required),
        )
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=array.is_null())
    kind = _arrow(wanted)
    # Another engine may have written nanoseconds; the table has microseconds.
    return array if array.type == kind else array.cast(kind, safe=not pa.types.is_timestamp(array.type))


def _struct(array: pa.StructArray, stored: StructType, wanted: StructType) -> pa.StructArray:
    children = {
        field.field_id: (array.field(place), field.field_type) for place, field in enumerate(stored.fields)
    }
    arrays, fields = [], []
    for field in wanted.fields:
        if field.field_id in children:
            values = projected(*children[field.field_id], field.field_type)
        else:
            values = _missing(field, len(array))
        arrays.append(values)
        fields.append(pa.field(field.name, values.type, not field.required))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())


def _offsets(array: pa.Array) -> tuple[pa.Array, int, int]:
    """Return the offsets of lists or maps from 0, and the start and number of their values."""
    offsets = array.offsets
    start = offsets[0].as_py()
    return pc.subtract(offsets, offsets[0]), start, offsets[-1].as_py() - start
