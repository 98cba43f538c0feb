"""Vectorized, exact decoding of the JSON texts of values; a text that is not exactly a value becomes null."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.changes.debezium.binary_text import binary_reader, decimals_from_base64, from_base64
from penstock.changes.debezium.declared import Declared

Decoder: TypeAlias = Callable[[pa.Array], pa.Array]
"""Decodes a column of texts. A text that is not of the type becomes null; one that Arrow refuses raises
``pa.ArrowInvalid``."""
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""The years 1 to 9999, the range of Spark and Python."""
_DAY_MICROS = 86_400_000_000
_BOOLEAN = r"^(true|false|0|1)$"
_INTEGER = r"^-?(0|[1-9][0-9]*)$"
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$"
_FLOAT = r"^(NaN|-?Infinity|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?)$"
_NOT_ZERO = r"^[-0.]*[1-9]"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_TIMESTAMP = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6}0*)?)?([-+Z].*)?$"
_ZEROS_BELOW_MICROS = r"(\.[0-9]{6})0+"
_PARTS = r"^-?[0-9]+?(?P<zeros>0*)(?:\.(?P<fraction>[0-9]+))?(?:e(?P<exponent>[-+]?[0-9]+))?$"
_EXACT_DIGITS, _MAX_DOUBLE_DIGITS, _MAX_FLOAT_DIGITS = 15, 17, 11
"""Digits that every double preserves, and the most digits in the text of a double and of a float."""
COUNTS = {"millis", "micros", "nanos"}
_NUMBERS = {"integer", "float", "double", "text"}


@dataclass(frozen=True)
class Encoding:
    """How the values of a column are encoded where their events do not declare it."""

    unit: str = "micros"
    """The unit of counts for timestamps."""
    counts_instants: bool = False
    """Whether counts may be instants; the counts of the connectors are local times."""
    precise: bool = False
    """Whether decimals are base64 of their unscaled values."""
    binaries: str = "base64"


def decoder(kind: pa.DataType, declared: Declared | None, encoding: Encoding) -> Decoder | None:
    """Return the decoder for a type that is not nested; None if the declared type cannot be read as it."""
    form = None if declared is None else declared.form
    decode: Decoder
    if pat.is_boolean(kind):
        forms = {"boolean", "integer", "text"}
        decode = partial(_cast, pattern=_BOOLEAN, kind=kind)
    elif pat.is_integer(kind):
        forms = COUNTS | {"integer", "days", "count", "text"}
        decode = partial(_cast, pattern=_INTEGER, kind=kind)
    elif pat.is_floating(kind):
        forms = _NUMBERS
        decode = partial(_floats, kind=kind, form=form)
    elif pat.is_decimal(kind):
        forms = _NUMBERS | {"decimal"}
        if form == "decimal" or (form is None and encoding.precise):
            decode = partial(
                decimals_from_base64, kind=kind, scale=kind.scale if declared is None else declared.scale
            )
        else:
            decode = partial(_cast, pattern=_NUMBER, kind=kind)
    elif pat.is_date(kind):
        forms = {"days", "text", "local date"}
        decode = partial(_dates, form=form)
    elif pat.is_timestamp(kind):
        forms = {"text"} if kind.tz else COUNTS | {"text", "local time"}
        if encoding.counts_instants:
            forms = forms | COUNTS | {"integer"}
        decode = partial(_timestamps, kind=kind, form=form, encoding=encoding)
    elif pat.is_binary(kind):
        forms = {"bytes", "text"}
        decode = from_base64 if form == "bytes" else binary_reader(encoding.binaries)
    else:
        forms = _NUMBERS | {"boolean", "nested", "local date", "local time"}
        decode = partial(pa.Array.cast, target_type=kind)
    return decode if form is None or form in forms else None


def decode_column(column: pa.Array, decode: Decoder, kind: pa.DataType) -> pa.Array:
    """Decode a column; if Arrow refuses a value, find it by bisection and replace it with null."""
    try:
        return decode(column)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind)
        half = len(column) // 2
        parts = (column.slice(0, half), column.slice(half))
        return pa.concat_arrays([decode_column(part, decode, kind) for part in parts])


def where_mask(values: pa.Array | str, mask: pa.Array) -> pa.Array:
    """Return the values (or one text) where the mask is true, and nulls elsewhere."""
    kind = pa.string() if isinstance(values, str) else values.type
    return pc.if_else(mask, values, pa.scalar(None, kind))


def _matching(column: pa.Array, pattern: str) -> pa.Array:
    return where_mask(column, pc.match_substring_regex(column, pattern))


def _cast(column: pa.Array, pattern: str, kind: pa.DataType) -> pa.Array:
    # Arrow refuses a decimal that it would have to round.
    return _matching(column, pattern).cast(kind)


def _floats(column: pa.Array, kind: pa.DataType, form: str | None) -> pa.Array:
    numbers = _matching(column, _FLOAT)
    values = numbers.cast(kind)
    if form == "float" or (form == "double" and pat.is_float64(kind)):
        return values
    exact = _is_double(numbers, values, form) if pat.is_float64(kind) else _is_float(numbers, values)
    # Subnormal doubles are less precise, so compare all digits.
    tiny = pc.and_(pc.less(pc.abs(values), sys.float_info.min), pc.not_equal(values, 0))
    if pat.is_float64(kind) and pc.any(tiny).as_py():
        same = pc.equal(_digits(numbers), _digits(values.cast(pa.string())))
        exact = pc.and_(exact, pc.or_(pc.invert(tiny), same))
    # Refuse numbers outside the range of the type, which became infinity or zero.
    zero = pc.equal(values, 0)
    if pc.any(zero).as_py():
        exact = pc.and_not(exact, pc.and_(zero, pc.match_substring_regex(numbers, _NOT_ZERO)))
    return where_mask(values, pc.and_(exact, pc.equal(pc.is_inf(values), pc.ends_with(numbers, "y"))))


def _is_float(texts: pa.Array, values: pa.Array) -> pa.Array:
    """Whether texts are those of floats: equal to the last digit of the text, or equal as doubles.

    The shortest text of a float is. Java before 19 writes one or two digits more.
    """
    doubles, own = texts.cast(pa.float64()), values.cast(pa.float64())
    # Half a unit of the last digit, and the rounding error of doubles.
    tolerance = pc.add(pc.multiply(0.5, _last_digit(doubles)), pc.multiply(pc.abs(doubles), 2.0**-52))
    close = pc.less_equal(pc.abs(pc.subtract(doubles, own)), tolerance)
    equal = pc.or_(pc.equal(doubles, own), pc.is_nan(doubles))
    if pc.any(pc.greater(pc.utf8_length(texts), _MAX_FLOAT_DIGITS)).as_py():
        digits = pc.utf8_length(_digits(texts))
        close = pc.and_(close, pc.less_equal(digits, _MAX_FLOAT_DIGITS))
        equal = pc.and_(equal, pc.less_equal(digits, _MAX_DOUBLE_DIGITS))
    return pc.or_(close, equal)


def _last_digit(numbers: pa.Array) -> pa.Array:
    """Return the place value of the last significant digit of each number."""
    parts = pc.extract_regex(numbers.cast(pa.string()), _PARTS)
    zeros, fraction, exponent = (pc.struct_field(parts, name) for name in ("zeros", "fraction", "exponent"))
    power = where_mask(exponent, pc.not_equal(exponent, "")).cast(pa.float64()).fill_null(0)
    size = pc.utf8_length(fraction)
    place = pc.if_else(pc.greater(size, 0), pc.negate(size), pc.utf8_length(zeros))
    return pc.power(10.0, pc.add(power, place.fill_null(0)))


def _is_double(texts: pa.Array, values: pa.Array, form: str | None) -> pa.Array:
    """Whether texts are those of doubles.

    A text of 16 or 17 digits may be that of a double, unless it is an integer or its event declares another
    type.
    """
    bare = pc.utf8_ltrim(texts, "-0.")
    fraction = pc.match_substring(bare, ".")
    digit_count = pc.subtract(pc.utf8_length(bare), fraction.cast(pa.int32()))
    is_exact = pc.less_equal(digit_count, _EXACT_DIGITS)
    if form is None:
        is_fraction = pc.match_substring_regex(texts, r"[.eE]")
        is_exact = pc.or_(is_exact, pc.and_(is_fraction, pc.less_equal(digit_count, _MAX_DOUBLE_DIGITS)))
    is_exact = is_exact.fill_null(True)
    if pc.all(is_exact).as_py():
        return is_exact
    unclear = pc.invert(is_exact)
    digits = _digits(texts.filter(unclear))
    exact = pc.equal(digits, _digits(values.filter(unclear).cast(pa.string())))
    count = pc.utf8_length(digits)
    exact = pc.or_(exact, pc.less_equal(count, _EXACT_DIGITS))
    if form is None:
        exact = pc.or_(exact, pc.and_(is_fraction.filter(unclear), pc.less_equal(count, _MAX_DOUBLE_DIGITS)))
    return pc.replace_with_mask(is_exact, unclear, exact)


def _digits(texts: pa.Array) -> pa.Array:
    """Return the significant digits of numbers."""
    bare = pc.replace_substring_regex(texts, r"[eE].*|[-.]", "")
    return pc.utf8_trim(pc.utf8_ltrim(bare, "0"), "0")


def _dates(column: pa.Array, form: str | None) -> pa.Array:
    nulls = pa.nulls(len(column), column.type)
    days = _matching(column, _INTEGER) if form in (None, "days") else nulls
    texts = nulls if form == "days" else _matching(_without_zone(column, form), _DATE)
    counted = _require_range(days.cast(pa.int64()), _FIRST_DAY, _LAST_DAY).cast(pa.int32()).cast(pa.date32())
    return pc.coalesce(counted, texts.cast(pa.date32()))


def _timestamps(column: pa.Array, kind: pa.DataType, form: str | None, encoding: Encoding) -> pa.Array:
    nulls = pa.nulls(len(column), column.type)
    is_text = form in ("text", "local time")
    can_count = not is_text and (kind.tz is None or encoding.counts_instants)
    counts = (_matching(column, _INTEGER) if can_count else nulls).cast(pa.int64())
    texts = _matching(_without_zone(column, form), _TIMESTAMP) if is_text or form is None else nulls
    micros = _micros(counts, form if form in COUNTS else encoding.unit)
    bounds = _FIRST_DAY * _DAY_MICROS, (_LAST_DAY + 1) * _DAY_MICROS - 1
    counted = _require_range(micros, *bounds).cast(kind)
    return pc.coalesce(counted, pc.replace_substring_regex(texts, _ZEROS_BELOW_MICROS, r"\1").cast(kind))


def _without_zone(column: pa.Array, form: str | None) -> pa.Array:
    return pc.replace_substring_regex(column, "Z$", "") if form in ("local date", "local time") else column


def _micros(counts: pa.Array, unit: str) -> pa.Array:
    """Return counts in microseconds; null for a count that is not a whole number of them."""
    if unit != "nanos":
        return pc.multiply_checked(counts, 1000 if unit == "millis" else 1)
    micros = pc.divide(counts, 1000)
    return where_mask(micros, pc.equal(pc.multiply(micros, 1000), counts))


def _require_range(numbers: pa.Array, low: int, high: int) -> pa.Array:
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and (ends["min"] < low or ends["max"] > high):
        raise pa.ArrowInvalid("a time is before the year 1 or after the year 9999")
    return numbers
