"""Lossless conversion of Python rows to a queue's canonical schema.

Arrow's own conversion changes values silently: it cuts 1.5 to 1 for an integer column, drops the time of day
for a date, treats a datetime without a zone as UTC, ignores unknown keys of a dict, and turns 1e300 into
infinity for a float32 column. All of these are refused here.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import SupportsFloat, SupportsIndex, TypeVar

import pyarrow as pa

from penstock.arguments import in_quotes
from penstock.arrow.arrays import PerSchema
from penstock.arrow.coerce import (
    Column,
    Misfit,
    Target,
    conform,
    kind_of,
    match_names,
    shorten,
    target_of,
)
from penstock.arrow.spark_json import join
from penstock.errors import SchemaMismatchError

_NONE_TYPE = type(None)
# Halfway between the largest float32 and the next step; numbers from here on would round to infinity.
_MAX_FLOAT32 = 3.4028235677973366e38

Time = TypeVar("Time", dt.datetime, dt.timedelta)

# The errors that Arrow raises for values that it cannot convert.
_CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def to_table(rows: pa.Table | pa.RecordBatch | Iterable[Mapping[str, object]], schema: pa.Schema) -> pa.Table:
    """Convert rows to a table with exactly the schema, which must be canonical, by the rules of ``conform``.

    Rows are a table, a record batch, an object that exports an Arrow stream (such as a pandas or polars data
    frame), or an iterable of mappings, one for each row. Without rows, the table is empty.
    """
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    elif not isinstance(rows, pa.Table):
        stream = hasattr(rows, "__arrow_c_stream__")
        rows = pa.RecordBatchReader.from_stream(rows).read_all() if stream else _from_mappings(rows, schema)
    return conform(rows, schema)


def _from_mappings(rows: Iterable[object], schema: pa.Schema) -> pa.Table:
    target = target_of(schema)
    try:
        mappings = _with_known_keys(_as_mappings(rows), target)
        arrays = [
            _array(mappings, column, converter)
            for column, converter in zip(target.columns, _converters_of(schema), strict=True)
        ]
    except Misfit as misfit:
        raise misfit.error() from misfit.__cause__
    return pa.Table.from_arrays(arrays, schema=schema)


def _as_mappings(rows: object) -> list[Mapping[str, object]]:
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise SchemaMismatchError(
            f"rows are a table, a record batch or an iterable of mappings, not one {type(rows).__name__}: "
            "put it in a list",
            found=type(rows).__name__,
        )
    row_list = list(rows)
    if set(map(type, row_list)) <= {dict}:
        return row_list
    return [_as_mapping(row, number) for number, row in enumerate(row_list)]


def _as_mapping(row: object, number: int) -> Mapping[str, object]:
    mapping = as_mapping(row)
    if mapping is None:
        found = f"{type(row).__name__} {shorten(row)}"
        message = f"a row has to be a mapping of column names to values, not the {found}: pass dicts"
        raise Misfit(message, "", "a mapping", found, condition=SchemaMismatchError.condition, row=number)
    return mapping


def _with_known_keys(mappings: list[Mapping[str, object]], target: Target) -> list[Mapping[str, object]]:
    if set().union(*mappings) <= target.names:
        return mappings
    return [_with_target_names(mapping, number, target) for number, mapping in enumerate(mappings)]


def _with_target_names(mapping: Mapping[str, object], number: int, target: Target) -> Mapping[str, object]:
    if mapping.keys() <= target.names:
        return mapping
    keys = list(mapping)
    try:
        positions = match_names([str(key) for key in keys], target.fields, "")
    except Misfit as unmatched:
        unmatched.row = number
        raise
    columns = zip(positions, target.columns, strict=True)
    return {column.name: mapping[keys[position]] for position, column in columns if position is not None}


def _array(mappings: list[Mapping[str, object]], column: Column, converter: ValueConverter) -> pa.Array:
    name = column.name
    values: Sequence[object] = [mapping.get(name) for mapping in mappings]
    try:
        return pa.array(converter.values(values), column.type)
    except (Misfit, *_CONVERSION_ERRORS):
        raise _find_misfit(values, column, converter) from None


def _find_misfit(values: Sequence[object], column: Column, converter: ValueConverter) -> Misfit:
    for row, value in enumerate(values):
        problem = _misfit_of_value(value, column, converter)
        if problem is not None:
            problem.row = row
            return problem
    message = f"column {in_quotes(column.name)} cannot be built as {column.type}: append fewer rows at a time"
    expected = "values that fit one by one"
    return Misfit(message, column.name, column.type, expected, condition="SCHEMA_MISMATCH.TOO_MANY_ROWS")


def _misfit_of_value(value: object, column: Column, converter: ValueConverter) -> Misfit | None:
    try:
        pa.array(converter.values([value]), column.type)
    except Misfit as problem:
        return problem
    except _CONVERSION_ERRORS as error:
        reason = str(error).strip().rstrip(".")
        reason = reason[:1].lower() + reason[1:]
        return misfit(value, column.type, column.name, reason, "change the value or the schema")
    return None


@dataclass(frozen=True, slots=True)
class ValueConverter:
    """Converter for the values of one type.

    Arrow converts the Python types in ``accepted`` without loss; ``accepted`` is None if Arrow itself refuses
    every wrong value. ``convert`` turns any other value except None into a value that Arrow converts, or
    raises ``Misfit``.
    """

    accepted: frozenset[type] | None
    convert: Callable[[object], object]

    def values(self, values: Sequence[object]) -> Sequence[object]:
        """Return the values, converted if at least one of them requires it."""
        accepted = self.accepted
        if accepted is None or set(map(type, values)) <= accepted:
            return values
        convert = self.convert
        return [None if value is None else convert(value) for value in values]


def converter_of(arrow_type: pa.DataType, path: str) -> ValueConverter:
    """Return the converter for a canonical type; ``path`` is the column's dotted path, for errors."""
    kind = kind_of(arrow_type)
    nested = _NESTED_CONVERTERS.get(kind)
    if nested is not None:
        return nested(arrow_type, path)
    if kind == "float" and arrow_type.bit_width == 32:
        return _checked_converter((), _float32_value, arrow_type, path)
    if kind not in _SCALAR_CHECKS:
        return ValueConverter(None, lambda value: value)
    accepted, check = _SCALAR_CHECKS[kind]
    return _checked_converter(accepted, check, arrow_type, path)


def misfit(value: object, arrow_type: object, path: str, reason: str, fix: str) -> Misfit:
    """Return the error for one value."""
    found = f"{type(value).__name__} {shorten(value)}"
    message = (
        f"column {in_quotes(path)} is {arrow_type} and does not take the {found}, because {reason}: {fix}"
    )
    return Misfit(message, path, arrow_type, found, condition="SCHEMA_MISMATCH.VALUE", by_value=True)


class _RefusalError(Exception):
    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


def _checked_converter(
    accepted: Sequence[type], check: Callable[[object], object], arrow_type: pa.DataType, path: str
) -> ValueConverter:
    def convert(value: object) -> object:
        try:
            return check(value)
        except _RefusalError as refusal:
            raise misfit(value, arrow_type, path, refusal.reason, refusal.fix) from None

    return ValueConverter(frozenset({_NONE_TYPE, *accepted}), convert)


def _integer_value(value: object) -> object:
    try:
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            return operator.index(value)
    except TypeError:  # an array of several numbers
        pass
    raise _RefusalError("it is not an integer", "round or convert it first")


def _float_value(value: object) -> float:
    if isinstance(value, bool | str | Decimal) or not isinstance(value, SupportsFloat):
        raise _RefusalError("it is not a float", "convert it with float() first")
    return value if isinstance(value, float | int) else float(value)


def _float32_value(value: object) -> float:
    number = _float_value(value)
    if abs(number) >= _MAX_FLOAT32 and number not in (float("inf"), float("-inf")):
        raise _RefusalError("it is too large for 32 bits", "declare the column as float64")
    return number


def _decimal_value(value: object) -> object:
    if isinstance(value, Decimal):
        return value
    try:
        return _integer_value(value)
    except _RefusalError:
        raise _RefusalError(
            "it is neither a Decimal nor an integer", "convert it with Decimal(str(value))"
        ) from None


def _string_value(value: object) -> object:
    if not isinstance(value, str):
        raise _RefusalError("it is not a string", "decode or format it first")
    return value


def _binary_value(value: object) -> object:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _RefusalError("it is not bytes", "encode it first")
    return bytes(value)


def _date_value(value: object) -> object:
    if not isinstance(value, dt.date) or isinstance(value, dt.datetime):
        raise _RefusalError("it is not a date", "pass a datetime.date, from a datetime with its date()")
    return value


def _instant_value(value: object) -> object:
    moment = _in_microseconds(value, dt.datetime, "nanosecond")
    if moment.utcoffset() is None:
        raise _RefusalError("it has no time zone", "attach one, as in value.replace(tzinfo=timezone.utc)")
    return moment


def _local_time_value(value: object) -> object:
    moment = _in_microseconds(value, dt.datetime, "nanosecond")
    if moment.tzinfo is not None:
        raise _RefusalError(
            "it has a time zone and the column has none", "drop it with value.replace(tzinfo=None)"
        )
    return moment


def _time_value(value: object) -> object:
    if not isinstance(value, dt.time) or value.tzinfo is not None:
        raise _RefusalError("it is not a time of day without a zone", "pass a datetime.time without tzinfo")
    return value


def _duration_value(value: object) -> object:
    return _in_microseconds(value, dt.timedelta, "nanoseconds")


def _in_microseconds(value: object, expected: type[Time], finer_attribute: str) -> Time:
    if not isinstance(value, expected):
        raise _RefusalError(f"it is not a {expected.__name__}", f"pass a datetime.{expected.__name__}")
    if getattr(value, finer_attribute, 0):
        raise _RefusalError("it is finer than a microsecond", "round it to microseconds first")
    return value


_SCALAR_CHECKS: dict[str, tuple[tuple[type, ...], Callable[[object], object]]] = {
    "integer": ((int,), _integer_value),
    "float": ((float, int), _float_value),
    "decimal": ((Decimal, int), _decimal_value),
    "string": ((str,), _string_value),
    "binary": ((bytes,), _binary_value),
    "date": ((dt.date,), _date_value),
    "timestamp": ((), _instant_value),
    "timestamp without time zone": ((), _local_time_value),
    "time": ((), _time_value),
    "duration": ((dt.timedelta,), _duration_value),
}


def _list_converter(arrow_type: pa.DataType, path: str) -> ValueConverter:
    element = converter_of(arrow_type.value_type, join(path, "element"))

    def convert(value: object) -> object:
        items = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(items, list | tuple):
            raise misfit(value, arrow_type, path, "it is not a list", "pass a list or a tuple")
        return element.values(items)

    return ValueConverter(frozenset({_NONE_TYPE}), convert)


def _map_converter(arrow_type: pa.DataType, path: str) -> ValueConverter:
    key = converter_of(arrow_type.key_type, join(path, "key"))
    item = converter_of(arrow_type.item_type, join(path, "value"))

    def convert(value: object) -> object:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(len(pair) == 2 for pair in pairs):
            raise misfit(value, arrow_type, path, "it is not a mapping", "pass a dict or a list of pairs")
        keys = key.values([pair[0] for pair in pairs])
        return list(zip(keys, item.values([pair[1] for pair in pairs]), strict=True))

    return ValueConverter(frozenset({_NONE_TYPE}), convert)


def _struct_converter(arrow_type: pa.DataType, path: str) -> ValueConverter:
    fields = list(arrow_type)
    converters = [(field.name, converter_of(field.type, join(path, field.name))) for field in fields]

    def convert(value: object) -> object:
        mapping = as_mapping(value)
        if mapping is None:
            raise misfit(value, arrow_type, path, "it is not a mapping", "pass a dict")
        names = list(mapping)
        positions = match_names([str(name) for name in names], fields, path)
        return {
            name: None if position is None else converter.values([mapping[names[position]]])[0]
            for position, (name, converter) in zip(positions, converters, strict=True)
        }

    return ValueConverter(frozenset({_NONE_TYPE}), convert)


def as_mapping(row: object) -> Mapping[str, object] | None:
    """Return a mapping, or a pyspark ``Row``, as a mapping; None for anything else."""
    if isinstance(row, Mapping):
        return row
    as_dict = getattr(row, "asDict", None)
    if callable(as_dict):
        mapping: Mapping[str, object] = as_dict()
        return mapping
    return None


_NESTED_CONVERTERS: dict[str, Callable[[pa.DataType, str], ValueConverter]] = {
    "list": _list_converter,
    "map": _map_converter,
    "struct": _struct_converter,
}


@PerSchema
def _converters_of(schema: pa.Schema) -> tuple[ValueConverter, ...]:
    return tuple(converter_of(field.type, field.name) for field in schema)
