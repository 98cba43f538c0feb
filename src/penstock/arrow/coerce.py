"""Lossless conversion of columns to a queue's canonical schema, which copies only if necessary.

A cast is allowed when it keeps every value: between widths of one kind, and from integers to floats and
decimals. Each value is checked for whether it fits. Ambiguous casts (text to numbers, a time without a zone
to an instant) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.arrays import PerSchema, Rows, map_entries, nested_fields, zeros
from penstock.arrow.spark_json import join
from penstock.errors import SchemaMismatchError

UNKNOWN_COLUMN = "SCHEMA_MISMATCH.UNKNOWN_COLUMN"
DUPLICATE_COLUMN = "SCHEMA_MISMATCH.DUPLICATE_COLUMN"

_ZERO_OFFSET = zeros(pa.int32())


class Misfit(Exception):
    """A value or type that does not fit the schema.

    The message says what does not fit and how to fix it, in a clause that can follow ``row 3:``. The column
    is a dotted path. ``by_value`` means that other values of the same type would fit, so the error should
    name the 0-based row.
    """

    def __init__(
        self,
        message: str,
        column: str,
        expected: object,
        found: object,
        *,
        condition: str,
        by_value: bool = False,
        row: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.condition = condition
        self.column = column
        self.expected = str(expected)
        self.found = str(found)
        self.by_value = by_value
        self.row = row

    def error(self) -> SchemaMismatchError:
        """Return the public error."""
        parameters = {"column": self.column, "expected": self.expected, "found": self.found}
        if self.row is None:
            return SchemaMismatchError(self.message, condition=self.condition, **parameters)
        message = f"row {self.row}: {self.message}"
        return SchemaMismatchError(message, condition=self.condition, row=self.row, **parameters)


def conform(rows: Rows, schema: pa.Schema) -> Rows:
    """Convert a table or batch to exactly the schema, which must be canonical.

    Rows that already have the schema are returned unchanged. Columns are matched by name, in any order, and
    case-insensitively if no name matches exactly. A missing nullable column is filled with nulls. Values are
    cast only if nothing is lost. It does not matter whether fields of the rows are declared nullable, only
    whether they contain nulls.

    Pass the same schema object each time, because values derived from it are cached.
    """
    target = target_of(schema)
    if not rows.schema.equals(schema, check_metadata=True):
        rows = type(rows).from_arrays(_conform_columns(rows, target), schema=schema)
    for position, column in target.checked_for_nulls:
        values = rows.column(position)
        if column.has_required_nested or values.null_count:
            _check_nulls(values, column)
    return rows


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a canonical schema."""

    field: pa.Field
    name: str
    type: pa.DataType
    required: bool
    """Whether the column is not nullable."""
    has_required_nested: bool
    """Whether any nested field is not nullable."""

    @classmethod
    def of(cls, field: pa.Field) -> Column:
        return cls(field, field.name, field.type, not field.nullable, _has_required_nested(field))


@dataclass(frozen=True, slots=True)
class Target:
    """A canonical schema that is prepared for conversions."""

    columns: tuple[Column, ...]
    fields: tuple[pa.Field, ...]
    names: frozenset[str]
    checked_for_nulls: tuple[tuple[int, Column], ...]

    @classmethod
    def of(cls, schema: pa.Schema) -> Target:
        columns = tuple(Column.of(field) for field in schema)
        checked = tuple(
            (i, column) for i, column in enumerate(columns) if column.required or column.has_required_nested
        )
        return cls(columns, tuple(schema), frozenset(schema.names), checked)


target_of = PerSchema(Target.of)


def _conform_columns(source: pa.Table | pa.RecordBatch, target: Target) -> list[pa.Array | pa.ChunkedArray]:
    try:
        positions = match_names(source.schema.names, target.fields, "")
    except Misfit as misfit:
        raise misfit.error() from None
    return [
        pa.nulls(source.num_rows, column.type)
        if position is None
        else _conform_column(source.column(position), column)
        for position, column in zip(positions, target.columns, strict=True)
    ]


def _conform_column(values: pa.Array | pa.ChunkedArray, column: Column) -> pa.Array | pa.ChunkedArray:
    if same_type(values.type, column.type):
        return values
    try:
        chunks = [conform_array(chunk, column.type, column.name) for chunk in _chunks(values)]
    except Misfit as misfit:
        if misfit.by_value:
            _locate_row(misfit, values, column)
        raise misfit.error() from misfit.__cause__
    return pa.chunked_array(chunks, column.type) if isinstance(values, pa.ChunkedArray) else chunks[0]


def _locate_row(misfit: Misfit, values: pa.Array | pa.ChunkedArray, column: Column) -> None:
    def is_bad(start: int, end: int) -> bool:
        try:
            for chunk in _chunks(values.slice(start, end - start)):
                conform_array(chunk, column.type, column.name)
        except Misfit:
            return True
        return False

    misfit.row = _first_row(len(values), is_bad)
    value = shorten(values[misfit.row].as_py())
    misfit.found = f"{values.type} {value}"
    misfit.message = f"the value {value} does not fit: {misfit.message}"


def _first_row(length: int, is_bad: Callable[[int, int], bool]) -> int:
    """Return the first bad row of ``length`` rows by bisection.

    ``is_bad(start, end)`` returns whether a range has a bad row.
    """
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(low, middle) else (middle, high)
    return low


def _chunks(column: pa.Array | pa.ChunkedArray) -> Sequence[pa.Array]:
    chunks: Sequence[pa.Array] = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return chunks


def _check_nulls(values: pa.Array | pa.ChunkedArray, column: Column) -> None:
    """Refuse nulls in fields that are not nullable, also in nested values; Arrow does not check this."""
    start = 0
    for chunk in _chunks(values):
        if _null_path(chunk, column.field, column.name) is not None:
            _refuse_null(chunk, column, start)
        start += len(chunk)


def _refuse_null(chunk: pa.Array, column: Column, start: int) -> NoReturn:
    def is_bad(first: int, end: int) -> bool:
        return _null_path(chunk.slice(first, end - first), column.field, column.name) is not None

    row = _first_row(len(chunk), is_bad)
    path = _null_path(chunk.slice(row, 1), column.field, column.name) or column.name
    raise _null_misfit(path, start + row).error()


def _null_misfit(path: str, row: int) -> Misfit:
    message = (
        f"column {in_quotes(path)} takes no nulls and has one here: fill it, or declare the column nullable"
    )
    return Misfit(message, path, "not null", "null", condition="SCHEMA_MISMATCH.NULL_VALUE", row=row)


def _has_required_nested(field: pa.Field) -> bool:
    """Return whether any nested field is not nullable; Arrow itself checks the keys of maps."""
    nested = nested_fields(field.type)
    values = nested[1:] if pat.is_map(field.type) else nested
    return any(not nested_field.nullable or _has_required_nested(nested_field) for nested_field in values)


def _null_path(array: pa.Array, field: pa.Field, path: str) -> str | None:
    """Return the dotted path of the first field with a forbidden null; None if there is none."""
    if not field.nullable and array.null_count:
        return path
    if not _has_required_nested(field):
        return None
    for name, child, child_field in _nested_arrays(array):
        null_path = _null_path(child, child_field, join(path, name))
        if null_path is not None:
            return null_path
    return None


def _nested_arrays(array: pa.Array) -> list[tuple[str, pa.Array, pa.Field]]:
    array_type = array.type
    if pat.is_list(array_type):
        return [("element", array.flatten(), array_type.value_field)]
    if pat.is_map(array_type):
        return [("value", map_entries(array).flatten().field(1), array_type.item_field)]
    # A null below a null struct does not count.
    non_null = array.filter(array.is_valid()) if array.null_count else array
    return [(child_field.name, non_null.field(i), child_field) for i, child_field in enumerate(array_type)]


def shorten(value: object) -> str:
    """Return the text of a value for an error, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_TYPE_FAMILIES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pat.is_null, "null"),
    (pat.is_boolean, "boolean"),
    (pat.is_integer, "integer"),
    (pat.is_floating, "float"),
    (pat.is_decimal, "decimal"),
    (lambda t: pat.is_string(t) or pat.is_large_string(t) or pat.is_string_view(t), "string"),
    (pat.is_binary, "binary"),
    (pat.is_large_binary, "binary"),
    (pat.is_fixed_size_binary, "binary"),
    (pat.is_binary_view, "binary"),
    (pat.is_date, "date"),
    (lambda t: pat.is_timestamp(t) and t.tz is None, "timestamp without time zone"),
    (pat.is_timestamp, "timestamp"),
    (pat.is_time, "time"),
    (pat.is_duration, "duration"),
    (pat.is_map, "map"),
    (pat.is_struct, "struct"),
    (pat.is_list, "list"),
    (pat.is_large_list, "list"),
    (pat.is_fixed_size_list, "list"),
    (pat.is_list_view, "list"),
    (pat.is_large_list_view, "list"),
    (pat.is_dictionary, "dictionary"),
    (pat.is_run_end_encoded, "run-end encoded"),
)


def kind_of(arrow_type: pa.DataType) -> str:
    """Return the name of a type's family, such as ``integer`` or ``list``."""
    return next((name for test, name in _TYPE_FAMILIES if test(arrow_type)), str(arrow_type))


def same_type(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether two types are equal, including the names and metadata of nested fields."""
    return bool(found.equals(expected, check_metadata=True))


def conform_array(array: pa.Array, target_type: pa.DataType, path: str) -> pa.Array:
    """Convert an array to a canonical type without changing values; return it unchanged if it has the type.

    Raise ``Misfit`` with the dotted path if the types belong to different families or a value would change.
    """
    if same_type(array.type, target_type):
        return array
    decoded = _without_encoding(array)
    if decoded is not array:
        return conform_array(decoded, target_type, path)
    kinds = (kind_of(array.type), kind_of(target_type))
    if kinds[0] == "null":
        return pa.nulls(len(array), target_type)
    if kinds[0] != kinds[1] and kinds not in _WIDENING:
        advice = _CAST_ADVICE.get(kinds, "cast it first")
        message = f"column {in_quotes(path)} is {array.type} and has to be {target_type}: {advice}"
        raise Misfit(message, path, target_type, array.type, condition="SCHEMA_MISMATCH.COLUMN_TYPE")
    if kinds[1] in _NESTED:
        return _NESTED[kinds[1]](array, target_type, path)
    try:
        return _WIDENING.get(kinds, pa.Array.cast)(array, target_type)
    except pa.ArrowInvalid as error:
        message = (
            f"column {in_quotes(path)} is {array.type} and has to be {target_type}, which would change a "
            f"value ({error}): cast it first, deciding what may be lost"
        )
        raise Misfit(
            message, path, target_type, array.type, condition="SCHEMA_MISMATCH.VALUE", by_value=True
        ) from error


def _without_encoding(array: pa.Array) -> pa.Array:
    if pat.is_dictionary(array.type):
        return array.dictionary_decode()
    if pat.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _narrow_float(array: pa.Array, target_type: pa.DataType) -> pa.Array:
    narrowed = array.cast(target_type, safe=False)
    if narrowed.type.bit_width >= array.type.bit_width:
        return narrowed
    is_exact = pc.or_(pc.equal(narrowed.cast(array.type), array), pc.is_nan(array))
    if pc.all(is_exact).as_py() is False:
        raise pa.ArrowInvalid("it needs more digits than the narrower float has")
    return narrowed


def _integer_to_decimal(array: pa.Array, target_type: pa.DataType) -> pa.Array:
    # Arrow decides about this cast only by the types, as if every integer had the maximum length. So cast to
    # a decimal that fits any integer first, and let the second cast check the values.
    return array.cast(pa.decimal256(76, target_type.scale)).cast(target_type)


_WIDENING: dict[tuple[str, str], Callable[[pa.Array, pa.DataType], pa.Array]] = {
    ("integer", "float"): pa.Array.cast,
    ("integer", "decimal"): _integer_to_decimal,
    ("float", "float"): _narrow_float,
}
_CAST_ADVICE = {
    ("timestamp without time zone", "timestamp"): "say its zone with pyarrow.compute.assume_timezone",
    ("timestamp", "timestamp without time zone"): "drop its zone with pyarrow.compute.local_timestamp",
}


def _conform_list(array: pa.Array, target_type: pa.DataType, path: str) -> pa.Array:
    values = conform_array(array.flatten(), target_type.value_type, join(path, "element"))
    return pa.ListArray.from_arrays(_dense_offsets(array), values, type=target_type, mask=_null_mask(array))


def _conform_map(array: pa.Array, target_type: pa.DataType, path: str) -> pa.Array:
    entries = map_entries(array)
    flat = entries.flatten()
    keys = conform_array(flat.field(0), target_type.key_type, join(path, "key"))
    values = conform_array(flat.field(1), target_type.item_type, join(path, "value"))
    return pa.MapArray.from_arrays(
        _dense_offsets(entries), keys, values, type=target_type, mask=_null_mask(array)
    )


def _dense_offsets(array: pa.Array) -> pa.Array:
    """Return the offsets of a list's values in ``flatten()``, which drops values outside a slice or below a
    null.
    """
    lengths = pc.list_value_length(array).cast(pa.int32()).fill_null(_ZERO_OFFSET[0])
    return pa.concat_arrays([_ZERO_OFFSET, pc.cumulative_sum_checked(lengths)])


def _null_mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _conform_struct(array: pa.Array, target_type: pa.DataType, path: str) -> pa.Array:
    fields = list(target_type)
    positions = match_names([field.name for field in array.type], fields, path)
    # Use flatten() instead of field(), because values below a null struct must not be checked.
    children = array.flatten()
    conformed = [
        conform_array(children[position], field.type, join(path, field.name))
        if position is not None
        else pa.nulls(len(array), field.type)
        for position, field in zip(positions, fields, strict=True)
    ]
    mask = array.is_null() if array.null_count or not conformed else None
    return pa.StructArray.from_arrays(conformed, fields=fields, mask=mask)


_NESTED: dict[str, Callable[[pa.Array, pa.DataType, str], pa.Array]] = {
    "list": _conform_list,
    "map": _conform_map,
    "struct": _conform_struct,
}


def match_names(names: Sequence[str], fields: Sequence[pa.Field], path: str) -> list[int | None]:
    """Return the position of each field in ``names``; None for a missing nullable field.

    A name matches exactly, or case-insensitively if only one of ``names`` does.
    """
    positions = _match_positions(names, [field.name for field in fields], path)
    for field in fields:
        if field.name not in positions and not field.nullable:
            column = join(path, field.name)
            hint = did_you_mean(field.name, names)
            message = f"column {in_quotes(column)} is missing and takes no nulls: add it.{hint}"
            condition = "SCHEMA_MISMATCH.MISSING_COLUMN"
            raise Misfit(message, column, f"{field.type} not null", "no such column", condition=condition)
    return [positions.get(field.name) for field in fields]


def _match_positions(given_names: Sequence[str], names: Sequence[str], path: str) -> dict[str, int]:
    exact = set(names)
    by_lower = {name.lower(): name for name in names}
    positions: dict[str, int] = {}
    for position, name in enumerate(given_names):
        target = name if name in exact else by_lower.get(name.lower())
        if target is None:
            raise _unknown_name(name, names, path)
        if target in positions:
            column, first = join(path, target), given_names[positions[target]]
            message = (
                f"{in_quotes(first)} and {in_quotes(name)} both match column {in_quotes(column)}: "
                "drop one of them"
            )
            raise Misfit(message, column, "one column", "two columns", condition=DUPLICATE_COLUMN)
        positions[target] = position
    return positions


def _unknown_name(name: str, names: Sequence[str], path: str) -> Misfit:
    column = join(path, name)
    known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    message = f"there is no column {in_quotes(column)}; the columns are {known}.{did_you_mean(name, names)}"
    return Misfit(message, column, f"one of {known}", name, condition=UNKNOWN_COLUMN)
