"""Rows as Python objects, converted to a queue's canonical schema without loss.

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

_NOTHING = type(None)
# Halfway from the largest float32 to the next step, which would round to infinity.
_MAX_FLOAT32 = 3.4028235677973366e38

Time = TypeVar("Time", dt.datetime, dt.timedelta)

# What Arrow's conversion raises for a value that it cannot take.
_CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def to_table(rows: pa.Table | pa.RecordBatch | Iterable[Mapping[str, object]], schema: pa.Schema) -> pa.Table:
    """Return the rows as a table of exactly the schema, a queue's canonical one, under the rules of
    ``conform``.

    Rows are a table, a record batch, anything that exports an Arrow stream (a pandas or polars data frame),
    or an iterable of mappings, one for each row. Without rows, the table is empty.
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
            _array(mappings, column, coder)
            for column, coder in zip(target.columns, _coders_of(schema), strict=True)
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
    listed = list(rows)
    if set(map(type, listed)) <= {dict}:
        return listed
    return [_as_mapping(row, number) for number, row in enumerate(listed)]


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
    return [_renamed(mapping, number, target) for number, mapping in enumerate(mappings)]


def _renamed(mapping: Mapping[str, object], number: int, target: Target) -> Mapping[str, object]:
    if mapping.keys() <= target.names:
        return mapping
    keys = list(mapping)
    try:
        places = match_names([str(key) for key in keys], target.fields, "")
    except Misfit as unmatched:
        unmatched.row = number
        raise
    columns = zip(places, target.columns, strict=True)
    return {column.name: mapping[keys[place]] for place, column in columns if place is not None}


def _array(mappings: list[Mapping[str, object]], column: Column, coder: Coder) -> pa.Array:
    name = column.name
    values: Sequence[object] = [mapping.get(name) for mapping in mappings]
    try:
        return pa.array(coder.values(values), column.type)
    except (Misfit, *_CONVERSION_ERRORS):
        raise _first_misfit(values, column, coder) from None


def _first_misfit(values: Sequence[object], column: Column, coder: Coder) -> Misfit:
    for row, value in enumerate(values):
        found = _misfit_of(value, column, coder)
        if found is not None:
            found.row = row
            return found
    message = f"column {in_quotes(column.name)} cannot be built as {column.type}: append fewer rows at a time"
    alone = "values that fit one by one"
    return Misfit(message, column.name, column.type, alone, condition="SCHEMA_MISMATCH.TOO_MANY_ROWS")


def _misfit_of(value: object, column: Column, coder: Coder) -> Misfit | None:
    try:
        pa.array(coder.values([value]), column.type)
    except Misfit as found:
        return found
    except _CONVERSION_ERRORS as error:
        reason = str(error).strip().rstrip(".")
        reason = reason[:1].lower() + reason[1:]
        return misfit(value, column.type, column.name, reason, "change the value or the schema")
    return None


@dataclass(frozen=True, slots=True)
class Coder:
    """A converter for the values of one type.

    Arrow converts the Python types in ``plain`` without loss; ``plain`` is None if Arrow itself refuses every
    wrong value. ``convert`` turns any other value except None into one that Arrow converts, or raises
    ``Misfit``.
    """

    plain: frozenset[type] | None
    convert: Callable[[object], object]

    def values(self, values: Sequence[object]) -> Sequence[object]:
        """Return the values, converted if at least one needs it."""
        plain = self.plain
        if plain is None or set(map(type, values)) <= plain:
            return values
        convert = self.convert
        return [None if value is None else convert(value) for value in values]


def coder_of(arrow_type: pa.DataType, path: str) -> Coder:
    """Return the coder of a canonical type; ``path`` is the column's dotted path, for the error."""
    kind = kind_of(arrow_type)
    nested = _NESTED.get(kind)
    if nested is not None:
        return nested(arrow_type, path)
    if kind == "float" and arrow_type.bit_width == 32:
        return _checked((), _float32_value, arrow_type, path)
    if kind not in _SCALARS:
        return Coder(None, lambda value: value)
    plain, check = _SCALARS[kind]
    return _checked(plain, check, arrow_type, path)


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


def _checked(
    plain: Sequence[type], check: Callable[[object], object], arrow_type: pa.DataType, path: str
) -> Coder:
    def convert(value: object) -> object:
        try:
            return check(value)
        except _RefusalError as refusal:
            raise misfit(value, arrow_type, path, refusal.reason, refusal.fix) from None

    return Coder(frozenset({_NOTHING, *plain}), convert)


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


def _in_microseconds(value: object, wanted: type[Time], finer: str) -> Time:
    if not isinstance(value, wanted):
        raise _RefusalError(f"it is not a {wanted.__name__}", f"pass a datetime.{wanted.__name__}")
    if getattr(value, finer, 0):
        raise _RefusalError("it is finer than a microsecond", "round it to microseconds first")
    return value


_SCALARS: dict[str, tuple[tuple[type, ...], Callable[[object], object]]] = {
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


def _list_coder(arrow_type: pa.DataType, path: str) -> Coder:
    element = coder_of(arrow_type.value_type, join(path, "element"))

    def convert(value: object) -> object:
        items = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(items, list | tuple):
            raise misfit(value, arrow_type, path, "it is not a list", "pass a list or a tuple")
        return element.values(items)

    return Coder(frozenset({_NOTHING}), convert)


def _map_coder(arrow_type: pa.DataType, path: str) -> Coder:
    key = coder_of(arrow_type.key_type, join(path, "key"))
    item = coder_of(arrow_type.item_type, join(path, "value"))

    def convert(value: object) -> object:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(len(pair) == 2 for pair in pairs):
            raise misfit(value, arrow_type, path, "it is not a mapping", "pass a dict or a list of pairs")
        keys = key.values([pair[0] for pair in pairs])
        return list(zip(keys, item.values([pair[1] for pair in pairs]), strict=True))

    return Coder(frozenset({_NOTHING}), convert)


def _struct_coder(arrow_type: pa.DataType, path: str) -> Coder:
    fields = list(arrow_type)
    coders = [(field.name, coder_of(field.type, join(path, field.name))) for field in fields]

    def convert(value: object) -> object:
        mapping = as_mapping(value)
        if mapping is None:
            raise misfit(value, arrow_type, path, "it is not a mapping", "pass a dict")
        found = list(mapping)
        places = match_names([str(name) for name in found], fields, path)
        return {
            name: None if place is None else coder.values([mapping[found[place]]])[0]
            for place, (name, coder) in zip(places, coders, strict=True)
        }

    return Coder(frozenset({_NOTHING}), convert)


def as_mapping(row: object) -> Mapping[str, object] | None:
    """Return a dict, another mapping or a pyspark ``Row`` as a mapping, and None for anything else."""
    if isinstance(row, Mapping):
        return row
    as_dict = getattr(row, "asDict", None)
    if callable(as_dict):
        mapping: Mapping[str, object] = as_dict()
        return mapping
    return None


_NESTED: dict[str, Callable[[pa.DataType, str], Coder]] = {
    "list": _list_coder,
    "map": _map_coder,
    "struct": _struct_coder,
}


@PerSchema
def _coders_of(schema: pa.Schema) -> tuple[Coder, ...]:
    return tuple(coder_of(field.type, field.name) for field in schema)
