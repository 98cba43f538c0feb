"""Statistics of a data file in the form of the Delta protocol.

Readers skip a file whose statistics exclude what they look for, so each statistic is a bound of all values,
or is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from math import isinf
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

_COUNT, _COLUMNS = "delta.dataSkippingNumIndexedCols", "delta.dataSkippingStatsColumns"
_DEFAULT_COUNT = 32
_NAME = re.compile(r"\s*(`(?:[^`]|``)*`|[^,`]*)\s*(?:,|$)")
_CHARACTERS = 32
"""The length to which longer texts are cut, as by Delta's own writer."""
_LAST = "\U0010ffff"
_DIGITS = 15
"""The number of digits of a decimal that a reader who parses it as a double still gets right."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_DAY, _LAST_DAY = date.min.toordinal(), date.max.toordinal()


def indexed_columns(schema: pa.Schema, configuration: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the columns for which a table's properties ask for statistics: the named ones, or the first 32.

    Fields of nested columns count, but get no statistics here.
    """
    simple = {field.name for field in schema if not pat.is_nested(field.type)}
    named = configuration.get(_COLUMNS)
    if named is not None:
        wanted = {_unquoted(name).lower() for name in _NAME.findall(named) if name}
        return tuple(name for name in schema.names if name in simple and name.lower() in wanted)
    most = int(configuration.get(_COUNT) or _DEFAULT_COUNT)
    found, leaves = [], 0
    for column in schema:
        leaves += _leaves(column.type)
        if column.name in simple and (most < 0 or leaves <= most):
            found.append(column.name)
    return tuple(found)


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name.strip()


def _leaves(kind: pa.DataType) -> int:
    return sum(_leaves(part.type) for part in kind) if pat.is_struct(kind) else 1


Bounds = tuple[str, str]


class NoBounds(Exception):
    """Values cannot be written as JSON, or readers do not agree on their order."""


@dataclass
class ColumnStatistics:
    """The statistics of one column, accumulated over batches."""

    type: pa.DataType
    nulls: int = 0
    low: Any = None
    """The smallest value, in a Python type with the order that all readers use."""
    high: Any = None
    unordered: bool = False
    """Whether there is a value that readers order differently, such as NaN."""

    def add(self, values: pa.Array) -> None:
        self.nulls += values.null_count
        if not self._has_bounds or self.unordered or values.null_count == len(values):
            return
        if pat.is_floating(self.type) and pc.any(pc.is_nan(values)).as_py():
            self.unordered = True
            return
        least, most = pc.min_max(_comparable(values)).values()
        low, high = least.as_py(), most.as_py()
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    @property
    def _has_bounds(self) -> bool:
        return _kind(self.type) in _FORMS

    def bounds(self) -> Bounds | None:
        """Return bounds of the values as JSON; None without values."""
        if self.unordered:
            raise NoBounds
        return None if self.low is None else _FORMS[_kind(self.type)](self.low, self.high, self.type)


@dataclass
class FileStatistics:
    """The statistics of a data file, accumulated over batches."""

    columns: dict[str, ColumnStatistics]
    rows: int = field(default=0, init=False)

    @classmethod
    def of(cls, schema: pa.Schema, names: Iterable[str]) -> FileStatistics:
        return cls(
            {name: ColumnStatistics(schema.field(name).type) for name in names if name in schema.names}
        )

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        for name, column in self.columns.items():
            column.add(batch.column(name))

    def to_json(self) -> str:
        """Return the value of ``stats`` in an add action."""
        nulls = {name: str(column.nulls) for name, column in self.columns.items()}
        parts = {"numRecords": str(self.rows), **self._bounds(), "nullCount": _object(nulls)}
        return _object(parts)

    def _bounds(self) -> dict[str, str]:
        try:
            bounds = {name: found for name, column in self.columns.items() if (found := column.bounds())}
        except NoBounds:
            # For Arrow datasets, deltalake treats a column without bounds as one without rows if other
            # columns have bounds.
            return {}
        return {
            "minValues": _object({name: low for name, (low, _) in bounds.items()}),
            "maxValues": _object({name: high for name, (_, high) in bounds.items()}),
        }


def _object(values: Mapping[str, str]) -> str:
    # Decimals are written digit by digit, which the json module cannot do.
    return f"{{{','.join(f'{_text(name)}:{value}' for name, value in values.items())}}}"


def _text(value: str) -> str:
    # deltalake misreads escaped characters beyond U+FFFF.
    return json.dumps(value, ensure_ascii=False)


def _comparable(values: pa.Array) -> pa.Array:
    """Return values of a type that always converts to Python objects, which have the same order."""
    if pat.is_date(values.type):
        return values.view(pa.int32())
    if pat.is_timestamp(values.type):
        return values.view(pa.int64())
    if pat.is_string(values.type):
        # Readers compare the bytes of texts, which need not be valid UTF-8.
        return values.view(pa.binary())
    return values


def _kind(kind: pa.DataType) -> str | None:
    return next((name for name, test in _KINDS.items() if test(kind)), None)


def _integers(low: int, high: int, _: pa.DataType) -> Bounds:
    return str(low), str(high)


def _booleans(low: bool, high: bool, _: pa.DataType) -> Bounds:
    return json.dumps(low), json.dumps(high)


def _floats(low: float, high: float, _: pa.DataType) -> Bounds:
    if isinf(low) or isinf(high):
        raise NoBounds
    # Some readers order -0.0 before 0.0.
    return repr(low or -0.0), repr(high or 0.0)


def _decimals(low: Decimal, high: Decimal, kind: pa.DataType) -> Bounds:
    return _rounded(low, ROUND_FLOOR, kind), _rounded(high, ROUND_CEILING, kind)


def _rounded(value: Decimal, rounding: str, kind: pa.DataType) -> str:
    rounded = Context(prec=_DIGITS, rounding=rounding).plus(value)
    fits = abs(rounded) < Decimal(10) ** (kind.precision - kind.scale)
    return format(rounded if fits else value, "f")


def _strings(low: bytes, high: bytes, _: pa.DataType) -> Bounds:
    try:
        least, most = low.decode(), high.decode()
    except UnicodeDecodeError:
        raise NoBounds from None
    return _text(least[:_CHARACTERS]), _text(_above(most))


def _above(text: str) -> str:
    """Return an upper bound, of about 32 characters, of all texts with the same first characters."""
    end = _CHARACTERS
    while text[end : end + 1] == _LAST:
        end += 1
    return text[:end] + _LAST if end < len(text) else text


def _dates(low: int, high: int, _: pa.DataType) -> Bounds:
    return _day(low), _day(high)


def _day(days: int) -> str:
    number = days + _EPOCH.toordinal()
    if not _FIRST_DAY <= number <= _LAST_DAY:
        # Readers do not agree on how other years are written.
        raise NoBounds
    return _text(date.fromordinal(number).isoformat())


def _timestamps(low: int, high: int, kind: pa.DataType) -> Bounds:
    # The protocol has milliseconds: the bounds are rounded away from the values.
    return _instant(low // 1000, kind), _instant(-(-high // 1000), kind)


def _instant(milliseconds: int, kind: pa.DataType) -> str:
    try:
        at = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        raise NoBounds from None
    text = at.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return _text(text if kind.tz is None else f"{text}Z")


_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "integer": pat.is_integer,
    "boolean": pat.is_boolean,
    "float": pat.is_floating,
    "decimal": pat.is_decimal,
    "string": pat.is_string,
    "date": pat.is_date,
    "timestamp": pat.is_timestamp,
}
_FORMS: dict[str | None, Callable[[Any, Any, pa.DataType], Bounds]] = {
    "integer": _integers,
    "boolean": _booleans,
    "float": _floats,
    "decimal": _decimals,
    "string": _strings,
    "date": _dates,
    "timestamp": _timestamps,
}
"""How the bounds of each kind of type are written; other kinds have none."""
