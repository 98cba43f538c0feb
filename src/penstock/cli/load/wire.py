"""Conversion of rows to JSON values and back: ``put`` reads what ``peek --json`` writes.

JSON has fewer types than a queue. Dates, times and timestamps are texts in ISO 8601, decimals are texts
(numbers are read too), binaries are base64, day-time intervals are whole microseconds, maps are objects,
and NaN and the infinities are the texts that Spark writes. To read them, an Arrow reader first parses the
*wire* types, which leave nothing to guess; ``decode`` then casts them strictly.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arrow.arrays import map_entries
from penstock.json_text import Json, JsonValue

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_MOST_DIGITS = 38
_AS_TEXT = (pat.is_date, pat.is_timestamp, pat.is_time, pat.is_binary)


def wire_type(kind: pa.DataType) -> pa.DataType:
    """Return the type as which an Arrow reader reads the JSON values of a canonical type."""
    if any(test(kind) for test in _AS_TEXT):
        return pa.string()
    if pat.is_float32(kind):
        return pa.float64()
    if pat.is_duration(kind):
        return pa.int64()
    if pat.is_null(kind):
        # Arrow's JSON reader makes an invalid array of a list of nulls.
        return pa.bool_()
    if pat.is_decimal(kind):
        # Arrow's readers check the digits of a text before they add those of the scale, and may then
        # overflow: 256 bits hold 38 digits and 38 more.
        return pa.decimal256(_MOST_DIGITS, kind.scale)
    if pat.is_map(kind):
        entry = [("key", wire_type(kind.key_type)), ("value", wire_type(kind.item_type))]
        return pa.list_(pa.struct(entry))
    if pat.is_list(kind):
        return pa.list_(wire_type(kind.value_type))
    if pat.is_struct(kind):
        return pa.struct([(field.name, wire_type(field.type)) for field in kind])
    return kind


def decode(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast an array of the wire type to its canonical type."""
    if array.type.equals(kind, check_metadata=True):
        return array
    if pat.is_map(kind):
        offsets, entries = _list_parts(array, array.values)
        keys, values = decode(entries.field(0), kind.key_type), decode(entries.field(1), kind.item_type)
        return pa.MapArray.from_arrays(offsets, keys, values, type=kind, mask=_mask(array))
    if pat.is_list(kind):
        offsets, values = _list_parts(array, array.values)
        return pa.ListArray.from_arrays(
            offsets, decode(values, kind.value_type), type=kind, mask=_mask(array)
        )
    if pat.is_struct(kind):
        children = [decode(child, field.type) for child, field in zip(array.flatten(), kind, strict=True)]
        # Without children only the mask has the length.
        mask = array.is_null() if array.null_count or not children else None
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    return _decoded_leaf(array, kind)


def _list_parts(array: pa.Array, child: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the offsets of a list or map, starting at 0, and the part of its child that they refer to."""
    first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    # Arrow accepts no mask with sliced offsets, and offsets that start at 0 can be sliced too.
    offsets = pc.subtract(array.offsets, first) if first or array.offset else array.offsets
    return offsets, child.slice(first, end - first)


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _decoded_leaf(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pat.is_binary(kind):
        # Arrow has no base64, so this is the one type whose values pass through Python.
        texts = array.to_pylist()
        return pa.array(
            [None if text is None else base64.b64decode(text, validate=True) for text in texts], kind
        )
    if pat.is_time(kind):
        dated = pc.binary_join_element_wise("1970-01-01T", array, "")
        return dated.cast(pa.timestamp("ns")).cast(kind)
    if pat.is_null(kind):
        if array.null_count < len(array):
            raise ValueError("a column without a type holds only nulls")
        return pa.nulls(len(array))
    if pat.is_float32(kind):
        narrow = array.cast(kind, safe=False)
        if pc.any(pc.and_not(pc.is_inf(narrow), pc.is_inf(array))).as_py():
            raise ValueError("a number is too large for 32 bits")
        return narrow
    return array.cast(kind)


def plain_rows(table: pa.Table) -> list[Json]:
    """Return rows that ``json.dumps`` accepts, with the columns in the schema's order."""
    columns = [_plain_values(column) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _plain_values(column: pa.ChunkedArray) -> list[object]:
    values = [value for chunk in column.chunks for value in _encoded(chunk, column.type).to_pylist()]
    finish = _finisher(column.type)
    return values if finish is None else [_optional(finish, value) for value in values]


def _encoded(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert times and decimals to text by Arrow; Python knows only the years 1 to 9999."""
    if pat.is_map(kind):
        entries = map_entries(array)
        return _encoded(entries, entries.type)
    if pat.is_list(kind):
        offsets, values = _list_parts(array, array.values)
        return pa.ListArray.from_arrays(offsets, _encoded(values, kind.value_type), mask=_mask(array))
    if pat.is_struct(kind):
        children = [_encoded(child, field.type) for child, field in zip(array.flatten(), kind, strict=True)]
        fields = [pa.field(field.name, child.type) for field, child in zip(kind, children, strict=True)]
        mask = array.is_null() if array.null_count or not children else None
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    return _encoded_leaf(array, kind)


def _encoded_leaf(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pat.is_timestamp(kind):
        texts = array.cast(pa.timestamp("us")).cast(pa.string())
        # Arrow writes a time that is out of its range as "<value out of range: …>", which is kept unchanged.
        return pc.replace_substring_regex(texts, "^([^<].*) (.*)$", rf"\1T\2{'Z' if kind.tz else ''}")
    if pat.is_time(kind):
        return pc.utf8_slice_codeunits(array.cast(pa.string()), 0, len("00:00:00.000000"))
    if pat.is_date(kind) or pat.is_decimal(kind):
        return array.cast(pa.string())
    if pat.is_string(kind):
        return _valid_text(array)
    return array.cast(pa.int64()) if pat.is_duration(kind) else array


def _valid_text(array: pa.Array) -> pa.Array:
    """Replace what is not UTF-8, as Spark does when it shows text: a queue keeps text as it was written."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        texts = array.cast(pa.binary()).to_pylist()
        return pa.array([None if text is None else text.decode(errors="replace") for text in texts])
    return array


Finish = Callable[[Any], JsonValue]
"""Makes a JSON value of a Python value, other than None, that an array holds."""


def _finisher(kind: pa.DataType) -> Finish | None:
    """Return the conversion that a type's values still need; None when they need none."""
    if pat.is_floating(kind):
        return lambda value: value if math.isfinite(value) else _not_finite(value)
    if pat.is_binary(kind):
        return lambda value: base64.b64encode(value).decode()
    if pat.is_map(kind):
        key, item = _finisher(kind.key_type), _finisher(kind.item_type)
        return lambda entries: {
            _key_text(_optional(key, entry["key"])): _optional(item, entry["value"]) for entry in entries
        }
    if pat.is_list(kind):
        inner = _finisher(kind.value_type)
        return None if inner is None else lambda values: [_optional(inner, value) for value in values]
    if pat.is_struct(kind):
        below = {field.name: _finisher(field.type) for field in kind}
        if any(below.values()):
            return lambda fields: {name: _optional(below[name], value) for name, value in fields.items()}
    return None


def _optional(finish: Finish | None, value: Any) -> JsonValue:
    return value if value is None or finish is None else finish(value)


def _key_text(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
