"""Conversion of rows to JSON values and back: ``put`` reads what ``peek --json`` writes.

JSON has fewer types than a queue. Dates, times and timestamps are ISO 8601 text, decimals are text (numbers
are also read), binary values are base64, day-time intervals are whole microseconds, maps are objects, and NaN
and infinities are the texts that Spark writes. To read them, an Arrow reader first parses the *wire* types,
which are unambiguous, and ``decode`` then casts them strictly.
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

_MAX_DIGITS = 38
_TEXT_TYPES = (pat.is_date, pat.is_timestamp, pat.is_time, pat.is_binary)


def wire_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with which an Arrow reader reads JSON values of a canonical type."""
    if any(test(kind) for test in _TEXT_TYPES):
        return pa.string()
    if pat.is_float32(kind):
        return pa.float64()
    if pat.is_duration(kind):
        return pa.int64()
    if pat.is_null(kind):
        # Arrow's JSON reader creates an invalid array from a list of nulls.
        return pa.bool_()
    if pat.is_decimal(kind):
        # Arrow's readers check the digits of text before they add those of the scale, and may then overflow:
        # 256 bits fit 38 digits and 38 more.
        return pa.decimal256(_MAX_DIGITS, kind.scale)
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
    return _decode_leaf(array, kind)


def _list_parts(array: pa.Array, child: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the offsets of a list or map, starting at 0, and the part of the child to which they refer."""
    first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    # Arrow does not accept a mask with sliced offsets, and offsets that start at 0 may also be sliced.
    offsets = pc.subtract(array.offsets, first) if first or array.offset else array.offsets
    return offsets, child.slice(first, end - first)


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _decode_leaf(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pat.is_binary(kind):
        # Arrow has no base64, so this is the only type whose values are converted in Python.
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
    values = [value for chunk in column.chunks for value in _encode(chunk, column.type).to_pylist()]
    encode_value = _value_encoder(column.type)
    return values if encode_value is None else [_encode_optional(encode_value, value) for value in values]


def _encode(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert times and decimals to text with Arrow, because Python supports only the years 1 to 9999."""
    if pat.is_map(kind):
        entries = map_entries(array)
        return _encode(entries, entries.type)
    if pat.is_list(kind):
        offsets, values = _list_parts(array, array.values)
        return pa.ListArray.from_arrays(offsets, _encode(values, kind.value_type), mask=_mask(array))
    if pat.is_struct(kind):
        children = [_encode(child, field.type) for child, field in zip(array.flatten(), kind, strict=True)]
        fields = [pa.field(field.name, child.type) for field, child in zip(kind, children, strict=True)]
        mask = array.is_null() if array.null_count or not children else None
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    return _encode_leaf(array, kind)


def _encode_leaf(array: pa.Array, kind: pa.DataType) -> pa.Array:
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


EncodeValue = Callable[[Any], JsonValue]
"""Makes a JSON value of a Python value, other than None, that an array holds."""


def _value_encoder(kind: pa.DataType) -> EncodeValue | None:
    """Return the conversion that values of a type still require; None if they do not require any."""
    if pat.is_floating(kind):
        return lambda value: value if math.isfinite(value) else _not_finite(value)
    if pat.is_binary(kind):
        return lambda value: base64.b64encode(value).decode()
    if pat.is_map(kind):
        key, item = _value_encoder(kind.key_type), _value_encoder(kind.item_type)
        return lambda entries: {
            _key_text(_encode_optional(key, entry["key"])): _encode_optional(item, entry["value"])
            for entry in entries
        }
    if pat.is_list(kind):
        element_encoder = _value_encoder(kind.value_type)
        return (
            None
            if element_encoder is None
            else lambda values: [_encode_optional(element_encoder, value) for value in values]
        )
    if pat.is_struct(kind):
        field_encoders = {field.name: _value_encoder(field.type) for field in kind}
        if any(field_encoders.values()):
            return lambda fields: {
                name: _encode_optional(field_encoders[name], value) for name, value in fields.items()
            }
    return None


def _encode_optional(encode_value: EncodeValue | None, value: Any) -> JsonValue:
    return value if value is None or encode_value is None else encode_value(value)


def _key_text(key: object) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
