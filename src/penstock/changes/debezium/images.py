"""Bytes and decimals out of the text that JSON has for them, a whole column at a time."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

Bytes = npt.NDArray[np.uint8]

_WORD = 16
"""Bytes of a decimal."""
_SIGN = 0x80
_LOWEST = np.array([_SIGN, *[0] * (_WORD - 1)], np.uint8)
_BAD = 0xFF
_PAD = ord("=")


def _table(alphabet: bytes) -> Bytes:
    found = np.full(256, _BAD, np.uint8)
    found[np.frombuffer(alphabet, np.uint8)] = np.arange(len(alphabet), dtype=np.uint8)
    return found


_BASE64 = _table(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
_HEX = _table(b"0123456789abcdef")


def from_base64(given: pa.Array) -> pa.Array:
    """The bytes of padded base64.

    Raises
    ------
    pa.ArrowInvalid
        When a value is none.
    """
    text, sizes = _joined(given)
    if (sizes % 4).any():
        raise pa.ArrowInvalid("base64 comes in groups of four")
    pads = text == _PAD
    groups = np.where(pads, 0, _BASE64[text]).reshape(-1, 4).astype(np.uint32)
    padded = pads.reshape(-1, 4)
    last = np.zeros(len(groups), np.bool_)
    last[(np.cumsum(sizes) // 4 - 1)[sizes > 0]] = True
    at_end = ~padded[:, :2].any(axis=1) & (padded[:, 3] | ~padded[:, 2])
    if (groups == _BAD).any() or (padded.any(axis=1) & ~(last & at_end)).any():
        raise pa.ArrowInvalid("no base64")
    whole = groups @ np.array([1 << 18, 1 << 12, 1 << 6, 1], np.uint32)
    triples = np.stack([whole >> 16, whole >> 8, whole], axis=1).astype(np.uint8)
    count = 3 - padded.sum(axis=1)
    data = triples[np.arange(3) < count[:, None]]
    return _binary(given, data, sizes // 4 * 3 - _sums(pads, sizes))


def from_hex(given: pa.Array) -> pa.Array:
    """The bytes of hex digits.

    Raises
    ------
    pa.ArrowInvalid
        When a value is none.
    """
    text, sizes = _joined(pc.ascii_lower(given))
    digits = _HEX[text]
    if (sizes % 2).any() or (digits == _BAD).any():
        raise pa.ArrowInvalid("no hex")
    return _binary(given, (digits[::2] << 4) | digits[1::2], sizes // 2)


def binary_reader(encoding: str) -> Callable[[pa.Array], pa.Array]:
    """How bytes of an encoding are read."""
    return from_hex if encoding == "hex" else from_base64


def encoded(data: bytes, encoding: str) -> str:
    """Bytes in an encoding."""
    return data.hex() if encoding == "hex" else base64.b64encode(data).decode()


def unscaled(given: pa.Array, kind: pa.DataType) -> pa.Array:
    """Decimals from base64 of their unscaled values, two's complement, the most significant byte first.

    Raises
    ------
    pa.ArrowInvalid
        When a value does not fit the type.
    """
    data, sizes = _joined(from_base64(given))
    valid = given.is_valid().to_numpy(zero_copy_only=False)
    if (sizes > _WORD).any() or (sizes[valid] == 0).any():
        raise pa.ArrowInvalid(f"a decimal of more than {_WORD} bytes, or of none")
    words = np.zeros((len(given), _WORD), np.uint8)
    if len(data):
        firsts = np.cumsum(sizes) - sizes
        words[valid & (data[np.minimum(firsts, len(data) - 1)] >= _SIGN)] = 0xFF
        row = np.repeat(np.arange(len(given)), sizes)
        words[row, np.arange(len(data)) - firsts[row] + _WORD - sizes[row]] = data
    if (words == _LOWEST).all(axis=1).any():
        # Its absolute value is no number of 16 bytes, which Arrow's own check does not notice.
        raise pa.ArrowInvalid("a decimal of more than 38 digits")
    widest = pa.decimal128(38, kind.scale)
    buffers = [pa.array(valid).buffers()[1], pa.py_buffer(np.ascontiguousarray(words[:, ::-1]))]
    found = pa.Array.from_buffers(widest, len(given), buffers)
    found.validate(full=True)
    return found.cast(kind)


def _joined(given: pa.Array) -> tuple[Bytes, Any]:
    """All bytes of a column one after the other, and how many each value has; a null has none."""
    filled = pc.fill_null(given.cast(pa.large_binary()), b"")
    offsets = np.frombuffer(filled.buffers()[1], np.int64)[filled.offset : filled.offset + len(filled) + 1]
    data = filled.buffers()[2]
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return whole[offsets[0] : offsets[-1]], np.diff(offsets)


def _binary(given: pa.Array, data: Any, sizes: Any) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    valid = pa.array(given.is_valid().to_numpy(zero_copy_only=False)).buffers()[1]
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(given), buffers)


def _sums(flags: Any, sizes: Any) -> Any:
    """How many flags are set among those of each value."""
    upto = np.concatenate([[0], np.cumsum(flags)])
    ends = np.cumsum(sizes)
    return upto[ends] - upto[ends - sizes]


# ---- images: The images of a row: each column from the text that Debezium's JSON has for it to its own type, or why it cannot be.

Read = Callable[[pa.Array], pa.Array]

_COUNT = r"^-?[0-9]+$"
_BELOW_MICROS = r"(\.[0-9]{6})[0-9]+"
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""The years 1 to 9999, which is what Spark prints and Python reads."""
_DAY_MICROS = 86_400_000_000
_PER_MICRO = {"micros": 1, "millis": 1000}
_SHOWN = 50
_BETWEEN = "\0"


@dataclass(frozen=True)
class ExpectedColumns:
    """Which columns a row after a change is to have, so that a table that has others is not read as if nothing had happened."""

    schema: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Those that it may lack; ``*`` for all."""
    ignored: tuple[str, ...] = ()
    """Others that it may have; ``*`` for all."""

    @property
    def matter(self) -> bool:
        """Whether anything is expected."""
        return "*" not in self.optional or "*" not in self.ignored

    def reasons(self, names: pa.ListArray, used: pa.Array, reasons: pa.Array) -> pa.Array:
        """The reasons with those of events whose row has other columns.

        Parameters
        ----------
        names
            The columns that each row has.
        used
            Which of the rows count.
        """
        if not self.matter:
            return reasons
        # All rows of a table have the same ones, but for the time when it was changed.
        kinds = pc.binary_join(names, _BETWEEN).dictionary_encode()
        told = pa.array([self._amiss(text) for text in kinds.dictionary.to_pylist()], pa.string())
        return _noted(
            reasons,
            pc.and_(used, told.is_valid().take(kinds.indices)).fill_null(False),
            "",
            told.take(kinds.indices),
        )

    def _amiss(self, names: str) -> str | None:
        there = names.split(_BETWEEN)
        absent = [name for name in self.schema if name not in there and name not in self.optional]
        if absent and "*" not in self.optional:
            return (
                f"after has no column {', '.join(absent)}: the table has lost or renamed it, or the event is older than it. Take it out of the "
                "schema, or name it in optional, where it is to be NULL"
            )
        more = [name for name in there if name not in self.schema and name not in self.ignored]
        if more and "*" not in self.ignored:
            return f"after has a column {', '.join(more)} that the schema lacks: add it to the schema, or name it in ignored"
        return None


@dataclass(frozen=True)
class Reading:
    """How the columns of an image are read."""

    schema: pa.Schema
    """Their names and types, and which of them may be null, in the form that Spark uses."""
    row_id: tuple[str, ...]
    unit: str
    units: Mapping[str, str]
    precise: bool
    binaries: str
    unavailable: str | None
    columns: ExpectedColumns

    def image(
        self, name: str, image: pa.StructArray, used: pa.Array, reasons: pa.Array
    ) -> tuple[list[pa.Array], pa.Array]:
        """The columns of some images, and the reasons why events cannot be taken with those that were found here.

        Parameters
        ----------
        name
            ``before`` or ``after``; a table may log no more than its key of the row before.
        image
            The columns: text for those of which :func:`is_text` says so.
        used
            Which of the images count.
        """
        read: list[pa.Array] = []
        for field, given in zip(self.schema, image.flatten(), strict=True):
            given = pc.if_else(used, given, pa.scalar(None, given.type))
            values = readable(given, self._read(field), field.type) if is_text(field.type) else given
            read.append(values)
            where = f"{name}.{field.name}"
            unread = pc.and_(given.is_valid(), values.is_null())
            shown = (
                pc.utf8_slice_codeunits(given.cast(pa.string()), 0, _SHOWN)
                if pc.any(unread).as_py()
                else None
            )
            reasons = _noted(reasons, unread, f"{where} cannot be read as {_named(field.type)}: ", shown)
            if field.name in self.row_id or (name == "after" and not field.nullable):
                missing = pc.and_(used, given.is_null())
                reasons = _noted(reasons, missing, f"{where} is missing or null")
            reasons = _noted(
                reasons,
                self._unsent(given, field.type),
                f"the value of {where} was not sent, as it did not change: ALTER TABLE … REPLICA IDENTITY FULL has the source "
                "send it",
            )
        return read, reasons

    def _read(self, field: pa.Field) -> Read:
        kind = field.type
        if pat.is_decimal(kind) and self.precise:
            return partial(unscaled, kind=kind)
        if pat.is_date(kind):
            return _dates
        if pat.is_timestamp(kind):
            return partial(_moments, kind=kind, unit=self.units.get(field.name, self.unit))
        if pat.is_binary(kind):
            return binary_reader(self.binaries)
        return partial(_plain, kind=kind)

    def _unsent(self, given: pa.Array, kind: pa.DataType) -> pa.Array | None:
        if self.unavailable is None or not (pat.is_string(kind) or pat.is_binary(kind)):
            return None
        text = self.unavailable
        value = text if pat.is_string(kind) else encoded(text.encode(), self.binaries)
        return pc.equal(given, pa.scalar(value, given.type)).fill_null(False)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column comes as its JSON text: any but nested ones."""
    return not pat.is_nested(kind)


def can_be_read(kind: pa.DataType) -> bool:
    """Whether there is a way to read a column of a type."""
    plain = (
        pat.is_boolean,
        pat.is_integer,
        pat.is_floating,
        pat.is_decimal,
        pat.is_string,
        pat.is_binary,
        pat.is_date,
    )
    return pat.is_nested(kind) or pat.is_timestamp(kind) or any(is_one(kind) for is_one in plain)


def readable(given: pa.Array, read: Read, kind: pa.DataType) -> pa.Array:
    """What can be read, in one go where that is everything, null for what cannot: halves find it."""
    try:
        return read(given)
    except pa.ArrowInvalid:
        if len(given) == 1:
            return pa.nulls(1, kind)
        half = len(given) // 2
        parts = (given.slice(0, half), given.slice(half))
        return pa.concat_arrays([readable(part, read, kind) for part in parts])


def _plain(given: pa.Array, kind: pa.DataType) -> pa.Array:
    """Numbers and truth values; a decimal that would be rounded is refused."""
    return given.cast(kind)


def _dates(given: pa.Array) -> pa.Array:
    days, texts = _split(given)
    counted = _within(days, _FIRST_DAY, _LAST_DAY).cast(pa.int32()).cast(pa.date32())
    return pc.coalesce(counted, texts.cast(pa.date32()))


def _moments(given: pa.Array, kind: pa.DataType, unit: str) -> pa.Array:
    counts, texts = _split(given)
    if unit == "nanos":
        # Down to the microsecond, as a clock shows it.
        whole = pc.floor_temporal(counts.cast(pa.timestamp("ns")), unit="microsecond")
        micros = whole.cast(pa.timestamp("us")).cast(pa.int64())
    else:
        micros = pc.multiply_checked(counts, _PER_MICRO[unit])
    bounds = _FIRST_DAY * _DAY_MICROS, (_LAST_DAY + 1) * _DAY_MICROS - 1
    counted = _within(micros, *bounds).cast(kind)
    return pc.coalesce(counted, pc.replace_substring_regex(texts, _BELOW_MICROS, r"\1").cast(kind))


def _split(given: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Numbers, and what is none."""
    number = pc.match_substring_regex(given, _COUNT)
    none = pa.scalar(None, given.type)
    return pc.if_else(number, given, none).cast(pa.int64()), pc.if_else(number, none, given)


def _within(numbers: pa.Array, low: int, high: int) -> pa.Array:
    ends = pc.min_max(numbers).as_py()
    if ends["min"] is not None and (ends["min"] < low or ends["max"] > high):
        raise pa.ArrowInvalid("a time before the year 1 or after the year 9999")
    return numbers


def _noted(reasons: pa.Array, where: pa.Array | None, told: str, shown: pa.Array | None = None) -> pa.Array:
    """The reasons with one more, where there is none yet."""
    if where is None or not pc.any(where).as_py():
        return reasons
    why = pa.repeat(told, len(reasons))
    if shown is not None:
        why = pc.binary_join_element_wise(why, shown.fill_null(""), "")
    return pc.if_else(pc.and_(where, reasons.is_null()), why, reasons)


def _named(kind: pa.DataType) -> str:
    """The type's name in SQL."""
    names = {"int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint", "bool": "boolean"}
    if pat.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pat.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return names.get(str(kind), str(kind).removesuffix("32[day]"))
