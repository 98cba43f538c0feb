"""Statistics of a data file in the format of the Delta protocol.

Readers skip a file by its statistics, so each one is a bound of all values, or is left out.
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

_INDEXED_COUNT_PROPERTY, _INDEXED_NAMES_PROPERTY = (
    "delta.dataSkippingNumIndexedCols",
    "delta.dataSkippingStatsColumns",
)
_DEFAULT_INDEXED_COUNT = 32
_COLUMN_NAME = re.compile(r"\s*(`(?:[^`]|``)*`|[^,`]*)\s*(?:,|$)")
_MAX_CHARACTERS = 32
"""The length to which longer strings are truncated, as in Delta's own writer."""
_LAST_CODE_POINT = "\U0010ffff"
_MAX_DIGITS = 15
"""The number of digits of a decimal that are exact for readers that parse it as a double."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_DAY, _LAST_DAY = date.min.toordinal(), date.max.toordinal()


def indexed_columns(schema: pa.Schema, configuration: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the columns with statistics by a table's properties: the named ones, by default the first 32.

    Fields of nested columns count, but get no statistics here.
    """
    simple = {field.name for field in schema if not pat.is_nested(field.type)}
    listed_names = configuration.get(_INDEXED_NAMES_PROPERTY)
    if listed_names is not None:
        lower_names = {_unquoted(name).lower() for name in _COLUMN_NAME.findall(listed_names) if name}
        return tuple(name for name in schema.names if name in simple and name.lower() in lower_names)
    maximum = int(configuration.get(_INDEXED_COUNT_PROPERTY) or _DEFAULT_INDEXED_COUNT)
    indexed, leaf_columns = [], 0
    for column in schema:
        leaf_columns += _leaf_count(column.type)
        if column.name in simple and (maximum < 0 or leaf_columns <= maximum):
            indexed.append(column.name)
    return tuple(indexed)


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name.strip()


def _leaf_count(kind: pa.DataType) -> int:
    return sum(_leaf_count(part.type) for part in kind) if pat.is_struct(kind) else 1


Bounds = tuple[str, str]


class NoBounds(Exception):
    """The bounds of values cannot be written as JSON, or readers disagree on the order of the values."""


@dataclass
class ColumnStatistics:
    """The statistics of one column, accumulated over batches."""

    type: pa.DataType
    nulls: int = 0
    minimum: Any = None
    """The smallest value, in a Python type with the order that all readers use."""
    maximum: Any = None
    unordered: bool = False
    """Whether the column has a value that readers order differently, such as NaN."""

    def add(self, values: pa.Array) -> None:
        self.nulls += values.null_count
        if not self._has_bounds or self.unordered or values.null_count == len(values):
            return
        if pat.is_floating(self.type) and pc.any(pc.is_nan(values)).as_py():
            self.unordered = True
            return
        minimum_scalar, maximum_scalar = pc.min_max(_comparable(values)).values()
        minimum, maximum = minimum_scalar.as_py(), maximum_scalar.as_py()
        self.minimum = minimum if self.minimum is None else min(self.minimum, minimum)
        self.maximum = maximum if self.maximum is None else max(self.maximum, maximum)

    @property
    def _has_bounds(self) -> bool:
        return _type_family(self.type) in _BOUND_FORMATTERS

    def bounds(self) -> Bounds | None:
        """Return bounds of the values as JSON; None without values."""
        if self.unordered:
            raise NoBounds
        return (
            None
            if self.minimum is None
            else _BOUND_FORMATTERS[_type_family(self.type)](self.minimum, self.maximum, self.type)
        )


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
        parts = {"numRecords": str(self.rows), **self._bounds(), "nullCount": _json_object(nulls)}
        return _json_object(parts)

    def _bounds(self) -> dict[str, str]:
        try:
            bounds = {
                name: column_bounds
                for name, column in self.columns.items()
                if (column_bounds := column.bounds())
            }
        except NoBounds:
            # For Arrow datasets, deltalake treats a column without bounds as one without rows if other
            # columns have bounds.
            return {}
        return {
            "minValues": _json_object({name: minimum for name, (minimum, _) in bounds.items()}),
            "maxValues": _json_object({name: maximum for name, (_, maximum) in bounds.items()}),
        }


def _json_object(values: Mapping[str, str]) -> str:
    # Decimals are written digit by digit, which the json module cannot do.
    return f"{{{','.join(f'{_json_string(name)}:{value}' for name, value in values.items())}}}"


def _json_string(value: str) -> str:
    # deltalake misreads escaped characters beyond U+FFFF.
    return json.dumps(value, ensure_ascii=False)


def _comparable(values: pa.Array) -> pa.Array:
    """Return the values in a type that always converts to Python objects, with the same order."""
    if pat.is_date(values.type):
        return values.view(pa.int32())
    if pat.is_timestamp(values.type):
        return values.view(pa.int64())
    if pat.is_string(values.type):
        # Readers compare strings by bytes, and the bytes need not be valid UTF-8.
        return values.view(pa.binary())
    return values


def _type_family(kind: pa.DataType) -> str | None:
    return next((name for name, test in _TYPE_FAMILIES.items() if test(kind)), None)


def _integer_bounds(low: int, high: int, _: pa.DataType) -> Bounds:
    return str(low), str(high)


def _boolean_bounds(low: bool, high: bool, _: pa.DataType) -> Bounds:
    return json.dumps(low), json.dumps(high)


def _float_bounds(low: float, high: float, _: pa.DataType) -> Bounds:
    if isinf(low) or isinf(high):
        raise NoBounds
    # Some readers order -0.0 before 0.0.
    return repr(low or -0.0), repr(high or 0.0)


def _decimal_bounds(low: Decimal, high: Decimal, kind: pa.DataType) -> Bounds:
    return _round_decimal(low, ROUND_FLOOR, kind), _round_decimal(high, ROUND_CEILING, kind)


def _round_decimal(value: Decimal, rounding: str, kind: pa.DataType) -> str:
    rounded = Context(prec=_MAX_DIGITS, rounding=rounding).plus(value)
    fits = abs(rounded) < Decimal(10) ** (kind.precision - kind.scale)
    return format(rounded if fits else value, "f")


def _string_bounds(low: bytes, high: bytes, _: pa.DataType) -> Bounds:
    try:
        minimum, maximum = low.decode(), high.decode()
    except UnicodeDecodeError:
        raise NoBounds from None
    return _json_string(minimum[:_MAX_CHARACTERS]), _json_string(_upper_bound(maximum))


def _upper_bound(text: str) -> str:
    """Return an upper bound of about 32 characters for all strings with the same prefix."""
    end = _MAX_CHARACTERS
    while text[end : end + 1] == _LAST_CODE_POINT:
        end += 1
    return text[:end] + _LAST_CODE_POINT if end < len(text) else text


def _date_bounds(low: int, high: int, _: pa.DataType) -> Bounds:
    return _date_string(low), _date_string(high)


def _date_string(days: int) -> str:
    number = days + _EPOCH.toordinal()
    if not _FIRST_DAY <= number <= _LAST_DAY:
        # Readers disagree on the format of other years.
        raise NoBounds
    return _json_string(date.fromordinal(number).isoformat())


def _timestamp_bounds(low: int, high: int, kind: pa.DataType) -> Bounds:
    # Bounds have milliseconds in the protocol, so round them away from the values.
    return _timestamp_string(low // 1000, kind), _timestamp_string(-(-high // 1000), kind)


def _timestamp_string(milliseconds: int, kind: pa.DataType) -> str:
    try:
        timestamp = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        raise NoBounds from None
    text = timestamp.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return _json_string(text if kind.tz is None else f"{text}Z")


_TYPE_FAMILIES: dict[str, Callable[[pa.DataType], bool]] = {
    "integer": pat.is_integer,
    "boolean": pat.is_boolean,
    "float": pat.is_floating,
    "decimal": pat.is_decimal,
    "string": pat.is_string,
    "date": pat.is_date,
    "timestamp": pat.is_timestamp,
}
_BOUND_FORMATTERS: dict[str | None, Callable[[Any, Any, pa.DataType], Bounds]] = {
    "integer": _integer_bounds,
    "boolean": _boolean_bounds,
    "float": _float_bounds,
    "decimal": _decimal_bounds,
    "string": _string_bounds,
    "date": _date_bounds,
    "timestamp": _timestamp_bounds,
}
"""The functions that format bounds, by type family; other types have no bounds."""
