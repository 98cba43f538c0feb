"""PostgreSQL types in Arrow, and conversion of values from their text form."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arrow.arrays import bytes_from_hex
from penstock.feeds.protocol import INSTANT

_SIMPLE = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: INSTANT,
}
NUMERIC = 1700
_DIGITS = 38
"""Maximum number of digits of a decimal in Spark."""
AS_TYPES = {"text": pa.string(), "double": pa.float64()}
"""Types that every column can be read as."""
_NOT_NUMBERS = pa.array(["NaN", "Infinity", "-Infinity"])
_DATE = r"^\d{4}-\d\d-\d\d(?: [0-9:.+-]*)?$"
_ENDS = {
    "date": {"infinity": "9999-12-31", "-infinity": "0001-01-01"},
    "timestamp": {"infinity": "9999-12-31 23:59:59.999999", "-infinity": "0001-01-01 00:00:00"},
}


def arrow_type(oid: int, modifier: int = -1) -> pa.DataType:
    """Return the Arrow type of a PostgreSQL type; string if no other type can represent its values.

    A numeric without a precision, or with more than 38 digits, becomes a string, which keeps all digits.
    """
    if oid == NUMERIC and modifier >= 4:
        precision, scale = digits(modifier)
        precision = precision - scale if scale < 0 else max(precision, scale)
        return pa.decimal128(precision, max(scale, 0)) if precision <= _DIGITS else pa.string()
    return _SIMPLE.get(oid, pa.string())


def digits(modifier: int) -> tuple[int, int]:
    """Return the precision and scale from the modifier of a numeric; the scale may be negative."""
    precision, scale = (modifier - 4) >> 16, (modifier - 4) & 0x7FF
    return precision, scale - 0x800 if scale >= 0x400 else scale


def from_text(text: pa.StringArray, target: pa.DataType) -> pa.Array:
    """Convert values from their text form.

    Infinite dates and times become the first and the last ones in Spark.
    """
    if target.equals(text.type):
        return text
    if pat.is_boolean(target):
        return _booleans(text)
    if pat.is_binary(target):
        if not pc.all(pc.starts_with(text, "\\x"), min_count=0).as_py():
            raise pa.ArrowInvalid("bytes do not begin with \\x")
        return bytes_from_hex(pc.utf8_slice_codeunits(text, 2))
    try:
        return text.cast(target)
    except pa.ArrowInvalid:
        if not pat.is_temporal(target):
            raise
    return _finite(text, target).cast(target)


def fits_type(text: pa.StringArray, target: pa.DataType) -> pa.BooleanArray:
    """Return the mask of the values that a type can represent; null for null.

    PostgreSQL's numeric has NaN and, from 14 on, infinity; its dates go beyond the years 1 and 9999.
    """
    if pat.is_decimal(target):
        return pc.if_else(pc.is_valid(text), pc.invert(pc.is_in(text, value_set=_NOT_NUMBERS)), None)
    if pat.is_temporal(target):
        return pc.match_substring_regex(_finite(text, target), _DATE)
    return pc.if_else(pc.is_valid(text), True, None)


def _booleans(text: pa.StringArray) -> pa.BooleanArray:
    is_true = pc.equal(text, "t")
    valid = pc.or_(is_true, pc.equal(text, "f"))
    if pc.all(valid, min_count=0).as_py() is False:
        invalid = text.filter(pc.invert(valid))[0].as_py()
        raise pa.ArrowInvalid(f"{invalid!r} is not a boolean")
    return is_true


def _finite(text: pa.StringArray, target: pa.DataType) -> pa.StringArray:
    """Replace infinite dates and times with the first and the last ones in Spark."""
    zone = "+00" if pat.is_timestamp(target) and target.tz is not None else ""
    for name, end in _ENDS["date" if pat.is_date(target) else "timestamp"].items():
        text = pc.if_else(pc.equal(text, name), pa.scalar(end + zone), text)
    return text
