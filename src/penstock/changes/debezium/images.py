"""Parsing of the images of a row, a whole column at a time, with the reasons for refused values."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from numpy.typing import NDArray

from penstock.feeds.protocol import binary_array, bytes_from_hex

Bytes: TypeAlias = NDArray[np.uint8]
Sizes: TypeAlias = NDArray[np.int64]
Parser: TypeAlias = Callable[[pa.Array], pa.Array]
_COUNT = r"^-?[0-9]+$"
_BELOW_MICROS = r"(\.[0-9]{6})[0-9]+"
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""The years 1 to 9999, the range of Spark and Python."""
_DAY_MICROS = 86_400_000_000
_PER_MICRO = {"micros": 1, "millis": 1000}
_SHOWN = 50
_BETWEEN = "\0"


@dataclass(frozen=True)
class ExpectedColumns:
    """The expected columns of a row after a change, so that a schema change of the table is noticed."""

    schema: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Columns that it may lack; ``*`` for all."""
    ignored: tuple[str, ...] = ()
    """Further columns that it may have; ``*`` for all."""

    @property
    def matter(self) -> bool:
        return "*" not in self.optional or "*" not in self.ignored

    def reasons(self, names: pa.ListArray, used: pa.Array, reasons: pa.Array) -> pa.Array:
        """Add the reasons of events in a mask whose row has other columns than expected."""
        if not self.matter:
            return reasons
        # Rows of a table mostly have the same columns.
        kinds = pc.binary_join(names, _BETWEEN).dictionary_encode()
        mismatches = pa.array([self._mismatch(text) for text in kinds.dictionary.to_pylist()], pa.string())
        refused = pc.and_(used, mismatches.is_valid().take(kinds.indices)).fill_null(False)
        return _with_reason(reasons, refused, "", mismatches.take(kinds.indices))

    def _mismatch(self, names: str) -> str | None:
        columns = names.split(_BETWEEN)
        absent = [name for name in self.schema if name not in columns and name not in self.optional]
        if absent and "*" not in self.optional:
            return (
                f"after has no column {', '.join(absent)}, which was dropped or renamed, or added later: "
                "remove it from the schema, or name it in optional to read it as NULL"
            )
        more = [name for name in columns if name not in self.schema and name not in self.ignored]
        if more and "*" not in self.ignored:
            return (
                f"after has a column {', '.join(more)} that the schema lacks: add it to the schema, or name "
                "it in ignored"
            )
        return None


@dataclass(frozen=True)
class Reading:
    """Settings for parsing the columns of an image."""

    schema: pa.Schema
    """The names, types and nullability of the columns."""
    row_id: tuple[str, ...]
    units: Mapping[str, str]
    """The units of counts for timestamps, by column; microseconds for others."""
    precise: bool
    binaries: str
    unavailable: str | None
    columns: ExpectedColumns

    def image(
        self, name: str, image: pa.StructArray, used: pa.Array, reasons: pa.Array
    ) -> tuple[list[pa.Array], pa.Array]:
        """Parse the columns of the images in a mask; return them, and the reasons with added ones.

        ``name`` is ``before``, of which a table may log only the key, or ``after``. Columns with
        :func:`is_text` come as text.
        """
        read: list[pa.Array] = []
        for field, column in zip(self.schema, image.flatten(), strict=True):
            text = pc.if_else(used, column, pa.scalar(None, column.type))
            values = parsed(text, self._parser(field), field.type) if is_text(field.type) else text
            read.append(values)
            where = f"{name}.{field.name}"
            unread = pc.and_(text.is_valid(), values.is_null())
            shown = (
                pc.utf8_slice_codeunits(text.cast(pa.string()), 0, _SHOWN) if pc.any(unread).as_py() else None
            )
            reasons = _with_reason(
                reasons, unread, f"{where} cannot be read as {_named(field.type)}: ", shown
            )
            if field.name in self.row_id or (name == "after" and not field.nullable):
                missing = pc.and_(used, text.is_null())
                reasons = _with_reason(reasons, missing, f"{where} is missing or null")
            reasons = _with_reason(
                reasons,
                self._unavailable(text, field.type),
                f"{where} is an unchanged TOAST value, which was not sent: ALTER TABLE … REPLICA IDENTITY "
                "FULL sends it",
            )
        return read, reasons

    def _parser(self, field: pa.Field) -> Parser:
        kind = field.type
        if pat.is_decimal(kind) and self.precise:
            return partial(unscaled, kind=kind)
        if pat.is_date(kind):
            return _dates
        if pat.is_timestamp(kind):
            return partial(_timestamps, kind=kind, unit=self.units.get(field.name, "micros"))
        if pat.is_binary(kind):
            return binary_reader(self.binaries)
        # A decimal that would be rounded is refused.
        return lambda column: column.cast(kind)

    def _unavailable(self, column: pa.Array, kind: pa.DataType) -> pa.Array | None:
        if self.unavailable is None or not (pat.is_string(kind) or pat.is_binary(kind)):
            return None
        text = self.unavailable
        value = text if pat.is_string(kind) else encoded(text.encode(), self.binaries)
        return pc.equal(column, pa.scalar(value, column.type)).fill_null(False)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column comes as its JSON text: every column that is not nested."""
    return not pat.is_nested(kind)


def can_be_read(kind: pa.DataType) -> bool:
    numbers = pat.is_boolean, pat.is_integer, pat.is_floating, pat.is_decimal
    others = pat.is_string, pat.is_binary, pat.is_date, pat.is_timestamp, pat.is_nested
    return any(is_one(kind) for is_one in (*numbers, *others))


def parsed(column: pa.Array, parser: Parser, kind: pa.DataType) -> pa.Array:
    """Parse a column at once; if a value is invalid, find it by halving, and replace it with null."""
    try:
        return parser(column)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind)
        half = len(column) // 2
        parts = (column.slice(0, half), column.slice(half))
        return pa.concat_arrays([parsed(part, parser, kind) for part in parts])


def _dates(column: pa.Array) -> pa.Array:
    days, texts = _split(column)
    counted = _within(days, _FIRST_DAY, _LAST_DAY).cast(pa.int32()).cast(pa.date32())
    return pc.coalesce(counted, texts.cast(pa.date32()))


def _timestamps(column: pa.Array, kind: pa.DataType, unit: str) -> pa.Array:
    counts, texts = _split(column)
    if unit == "nanos":
        # Rounded down to the microsecond.
        whole = pc.floor_temporal(counts.cast(pa.timestamp("ns")), unit="microsecond")
        micros = whole.cast(pa.timestamp("us")).cast(pa.int64())
    else:
        micros = pc.multiply_checked(counts, _PER_MICRO[unit])
    bounds = _FIRST_DAY * _DAY_MICROS, (_LAST_DAY + 1) * _DAY_MICROS - 1
    counted = _within(micros, *bounds).cast(kind)
    return pc.coalesce(counted, pc.replace_substring_regex(texts, _BELOW_MICROS, r"\1").cast(kind))


def _split(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Split a column into numbers and other text."""
    number = pc.match_substring_regex(column, _COUNT)
    null = pa.scalar(None, column.type)
    return pc.if_else(number, column, null).cast(pa.int64()), pc.if_else(number, null, column)


def _within(numbers: pa.Array, low: int, high: int) -> pa.Array:
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and (ends["min"] < low or ends["max"] > high):
        raise pa.ArrowInvalid("a time before the year 1 or after the year 9999")
    return numbers


def _with_reason(
    reasons: pa.Array, where: pa.Array | None, reason: str, shown: pa.Array | None = None
) -> pa.Array:
    """Add a reason where there is none yet."""
    if where is None or not pc.any(where).as_py():
        return reasons
    why = pa.repeat(reason, len(reasons))
    if shown is not None:
        why = pc.binary_join_element_wise(why, shown.fill_null(""), "")
    return pc.if_else(pc.and_(where, reasons.is_null()), why, reasons)


def _named(kind: pa.DataType) -> str:
    """Return the type's name in SQL."""
    names = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean"}
    if pat.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pat.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return names.get(str(kind), str(kind).removesuffix("32[day]"))


_WORD = 16
"""Bytes of a decimal."""
_SIGN = 0x80
_LOWEST = np.array([_SIGN, *[0] * (_WORD - 1)], np.uint8)
_BAD = 0xFF
_PAD = ord("=")


_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BASE64: Bytes = np.full(256, _BAD, np.uint8)
_BASE64[np.frombuffer(_ALPHABET, np.uint8)] = np.arange(64)


def from_base64(column: pa.Array) -> pa.Array:
    """Decode padded base64."""
    text, sizes = _joined(column)
    if (sizes % 4).any():
        raise pa.ArrowInvalid("base64 comes in groups of four")
    pads = text == _PAD
    groups = np.where(pads, 0, _BASE64[text]).reshape(-1, 4).astype(np.uint32)
    padded = pads.reshape(-1, 4)
    last = np.zeros(len(groups), np.bool_)
    last[(np.cumsum(sizes) // 4 - 1)[sizes > 0]] = True
    at_end = ~padded[:, :2].any(axis=1) & (padded[:, 3] | ~padded[:, 2])
    if (groups == _BAD).any() or (padded.any(axis=1) & ~(last & at_end)).any():
        raise pa.ArrowInvalid("invalid base64")
    whole = groups @ np.array([1 << 18, 1 << 12, 1 << 6, 1], np.uint32)
    triples = np.stack([whole >> 16, whole >> 8, whole], axis=1).astype(np.uint8)
    count = 3 - padded.sum(axis=1)
    data = triples[np.arange(3) < count[:, None]]
    return binary_array(column, data, sizes // 4 * 3 - _sums(pads, sizes))


def binary_reader(encoding: str) -> Callable[[pa.Array], pa.Array]:
    return bytes_from_hex if encoding == "hex" else from_base64


def encoded(data: bytes, encoding: str) -> str:
    return data.hex() if encoding == "hex" else base64.b64encode(data).decode()


def unscaled(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decode decimals from base64 of their unscaled values, big-endian two's complement."""
    data, sizes = _joined(from_base64(column))
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if (sizes > _WORD).any() or (sizes[valid] == 0).any():
        raise pa.ArrowInvalid(f"a decimal of more than {_WORD} bytes, or of none")
    words = np.zeros((len(column), _WORD), np.uint8)
    if len(data):
        firsts = np.cumsum(sizes) - sizes
        words[valid & (data[np.minimum(firsts, len(data) - 1)] >= _SIGN)] = 0xFF
        row = np.repeat(np.arange(len(column)), sizes)
        words[row, np.arange(len(data)) - firsts[row] + _WORD - sizes[row]] = data
    if (words == _LOWEST).all(axis=1).any():
        # Its absolute value has no 16-byte form, which Arrow's own check does not detect.
        raise pa.ArrowInvalid("a decimal of more than 38 digits")
    widest = pa.decimal128(38, kind.scale)
    buffers = [pa.array(valid).buffers()[1], pa.py_buffer(np.ascontiguousarray(words[:, ::-1]))]
    decimals = pa.Array.from_buffers(widest, len(column), buffers)
    decimals.validate(full=True)
    return decimals.cast(kind)


def _joined(column: pa.Array) -> tuple[Bytes, Sizes]:
    """Return the concatenated bytes of a column, and the size of each value; a null has none."""
    filled = pc.fill_null(column.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(filled.buffers()[1], np.int64)[filled.offset : filled.offset + len(filled) + 1]
    data = filled.buffers()[2]
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return whole[offsets[0] : offsets[-1]], np.diff(offsets)


def _sums(flags: NDArray[np.bool_], sizes: Sizes) -> Sizes:
    """Count the flags that are set for each value."""
    upto = np.concatenate([[0], np.cumsum(flags)])
    ends = np.cumsum(sizes)
    sums: Sizes = upto[ends] - upto[ends - sizes]
    return sums
