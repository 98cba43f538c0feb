"""Lossless conversion of columns to a queue's canonical schema, without copies where none are needed.

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

_ZERO = zeros(pa.int32())


class Misfit(Exception):
    """A value or a type that the schema cannot take.

    The message says what does not fit and how to fix it, in one clause that can follow ``row 3:``. The column
    is a dotted path. ``by_value`` means that other values of the same type would fit, so the 0-based row
    should be named.
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
        about = {"column": self.column, "expected": self.expected, "found": self.found}
        if self.row is None:
            return SchemaMismatchError(self.message, condition=self.condition, **about)
        message = f"row {self.row}: {self.message}"
        return SchemaMismatchError(message, condition=self.condition, row=self.row, **about)


def conform(rows: Rows, schema: pa.Schema) -> Rows:
    """Return a table or a batch in exactly the schema, a queue's canonical one; rows that already have that
    schema are returned unchanged.

    Columns are matched by name, in any order, and case-insensitively if no name matches exactly. A missing
    nullable column is filled with nulls. Values are cast only if nothing is lost. It does not matter whether
    the rows' fields are declared nullable, only whether they contain nulls.

    Pass the same schema object each time, since values derived from it are cached.
    """
    target = target_of(schema)
    if not rows.schema.equals(schema, check_metadata=True):
        rows = type(rows).from_arrays(_conformed(rows, target), schema=schema)
    for place, column in target.checked_for_nulls:
        values = rows.column(place)
        if column.required_below or values.null_count:
            _check_nulls(values, column)
    return rows


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a canonical schema."""

    field: pa.Field
    name: str
    type: pa.DataType
    required: bool
    """Whether the column takes no nulls."""
    required_below: bool
    """Whether any nested field takes no nulls."""

    @classmethod
    def of(cls, field: pa.Field) -> Column:
        return cls(field, field.name, field.type, not field.nullable, _forbids_nulls_below(field))


@dataclass(frozen=True, slots=True)
class Target:
    """A canonical schema, prepared for conversions."""

    columns: tuple[Column, ...]
    fields: tuple[pa.Field, ...]
    names: frozenset[str]
    checked_for_nulls: tuple[tuple[int, Column], ...]

    @classmethod
    def of(cls, schema: pa.Schema) -> Target:
        columns = tuple(Column.of(field) for field in schema)
        checked = tuple((i, each) for i, each in enumerate(columns) if each.required or each.required_below)
        return cls(columns, tuple(schema), frozenset(schema.names), checked)


target_of = PerSchema(Target.of)


def _conformed(source: pa.Table | pa.RecordBatch, target: Target) -> list[pa.Array | pa.ChunkedArray]:
    try:
        places = match_names(source.schema.names, target.fields, "")
    except Misfit as misfit:
        raise misfit.error() from None
    return [
        pa.nulls(source.num_rows, column.type)
        if place is None
        else _conform_column(source.column(place), column)
        for place, column in zip(places, target.columns, strict=True)
    ]


def _conform_column(values: pa.Array | pa.ChunkedArray, column: Column) -> pa.Array | pa.ChunkedArray:
    if same_type(values.type, column.type):
        return values
    try:
        chunks = [conform_array(chunk, column.type, column.name) for chunk in _chunks(values)]
    except Misfit as misfit:
        if misfit.by_value:
            _name_row(misfit, values, column)
        raise misfit.error() from misfit.__cause__
    return pa.chunked_array(chunks, column.type) if isinstance(values, pa.ChunkedArray) else chunks[0]


def _name_row(misfit: Misfit, values: pa.Array | pa.ChunkedArray, column: Column) -> None:
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
    """Return the first bad row of ``length`` rows, by bisection: ``is_bad(start, end)`` says whether a range
    has a bad row.
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
    """Refuse nulls that the column does not take, in nested values too; Arrow itself does not check this."""
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


def _forbids_nulls_below(field: pa.Field) -> bool:
    """Return whether any nested field takes no nulls; Arrow itself checks the keys of maps."""
    below = nested_fields(field.type)
    values = below[1:] if pat.is_map(field.type) else below
    return any(not each.nullable or _forbids_nulls_below(each) for each in values)


def _null_path(array: pa.Array, field: pa.Field, path: str) -> str | None:
    """Return the dotted path of the first field that holds a forbidden null, or None."""
    if not field.nullable and array.null_count:
        return path
    if not _forbids_nulls_below(field):
        return None
    for name, child, child_field in _below(array):
        found = _null_path(child, child_field, join(path, name))
        if found is not None:
            return found
    return None


def _below(array: pa.Array) -> list[tuple[str, pa.Array, pa.Field]]:
    kind = array.type
    if pat.is_list(kind):
        return [("element", array.flatten(), kind.value_field)]
    if pat.is_map(kind):
        return [("value", map_entries(array).flatten().field(1), kind.item_field)]
    # A null below a null struct does not count.
    alive = array.filter(array.is_valid()) if array.null_count else array
    return [(each.name, alive.field(i), each) for i, each in enumerate(kind)]


def shorten(value: object) -> str:
    """Return a value's text for an error, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
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
    """Return the name of the family that a type belongs to, such as ``integer`` or ``list``."""
    return next((name for test, name in _KINDS if test(arrow_type)), str(arrow_type))


def same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether two types are equal, including the names and metadata of nested fields."""
    return bool(found.equals(wanted, check_metadata=True))


def conform_array(array: pa.Array, wanted: pa.DataType, path: str) -> pa.Array:
    """Return any array as a canonical type, with the same values; the same object if it already has the type.

    Raise ``Misfit``, with the column's dotted path, if the types are of different kinds or a value would
    change.
    """
    if same_type(array.type, wanted):
        return array
    plain = _decoded(array)
    if plain is not array:
        return conform_array(plain, wanted, path)
    kinds = (kind_of(array.type), kind_of(wanted))
    if kinds[0] == "null":
        return pa.nulls(len(array), wanted)
    if kinds[0] != kinds[1] and kinds not in _WIDENING:
        fix = _FIXES.get(kinds, "cast it first")
        message = f"column {in_quotes(path)} is {array.type} and has to be {wanted}: {fix}"
        raise Misfit(message, path, wanted, array.type, condition="SCHEMA_MISMATCH.COLUMN_TYPE")
    if kinds[1] in _NESTED:
        return _NESTED[kinds[1]](array, wanted, path)
    try:
        return _WIDENING.get(kinds, pa.Array.cast)(array, wanted)
    except pa.ArrowInvalid as error:
        message = (
            f"column {in_quotes(path)} is {array.type} and has to be {wanted}, which would change a value "
            f"({error}): cast it first, deciding what may be lost"
        )
        raise Misfit(
            message, path, wanted, array.type, condition="SCHEMA_MISMATCH.VALUE", by_value=True
        ) from error


def _decoded(array: pa.Array) -> pa.Array:
    if pat.is_dictionary(array.type):
        return array.dictionary_decode()
    if pat.is_run_end_encoded(array.type):
        return pc.run_end_decode(array)
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _narrowed_float(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    narrowed = array.cast(wanted, safe=False)
    if narrowed.type.bit_width >= array.type.bit_width:
        return narrowed
    kept = pc.or_(pc.equal(narrowed.cast(array.type), array), pc.is_nan(array))
    if pc.all(kept).as_py() is False:
        raise pa.ArrowInvalid("it needs more digits than the narrower float has")
    return narrowed


def _integer_to_decimal(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    # Arrow decides about this cast by the types alone, as if every integer had the maximum length. So go
    # through a decimal into which any integer fits, and let the second cast check the values.
    return array.cast(pa.decimal256(76, wanted.scale)).cast(wanted)


_WIDENING: dict[tuple[str, str], Callable[[pa.Array, pa.DataType], pa.Array]] = {
    ("integer", "float"): pa.Array.cast,
    ("integer", "decimal"): _integer_to_decimal,
    ("float", "float"): _narrowed_float,
}
_FIXES = {
    ("timestamp without time zone", "timestamp"): "say its zone with pyarrow.compute.assume_timezone",
    ("timestamp", "timestamp without time zone"): "drop its zone with pyarrow.compute.local_timestamp",
}


def _conform_list(array: pa.Array, wanted: pa.DataType, path: str) -> pa.Array:
    values = conform_array(array.flatten(), wanted.value_type, join(path, "element"))
    return pa.ListArray.from_arrays(_dense_offsets(array), values, type=wanted, mask=_null_mask(array))


def _conform_map(array: pa.Array, wanted: pa.DataType, path: str) -> pa.Array:
    entries = map_entries(array)
    flat = entries.flatten()
    keys = conform_array(flat.field(0), wanted.key_type, join(path, "key"))
    values = conform_array(flat.field(1), wanted.item_type, join(path, "value"))
    return pa.MapArray.from_arrays(_dense_offsets(entries), keys, values, type=wanted, mask=_null_mask(array))


def _dense_offsets(array: pa.Array) -> pa.Array:
    """Return the offsets of a list's values in ``flatten()``, which drops values outside a slice or below a
    null.
    """
    lengths = pc.list_value_length(array).cast(pa.int32()).fill_null(_ZERO[0])
    return pa.concat_arrays([_ZERO, pc.cumulative_sum_checked(lengths)])


def _null_mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _conform_struct(array: pa.Array, wanted: pa.DataType, path: str) -> pa.Array:
    fields = list(wanted)
    places = match_names([field.name for field in array.type], fields, path)
    # flatten() and not field(): values below a null struct must not be checked.
    children = array.flatten()
    conformed = [
        conform_array(children[place], field.type, join(path, field.name))
        if place is not None
        else pa.nulls(len(array), field.type)
        for place, field in zip(places, fields, strict=True)
    ]
    mask = array.is_null() if array.null_count or not conformed else None
    return pa.StructArray.from_arrays(conformed, fields=fields, mask=mask)


_NESTED: dict[str, Callable[[pa.Array, pa.DataType, str], pa.Array]] = {
    "list": _conform_list,
    "map": _conform_map,
    "struct": _conform_struct,
}


def match_names(found: Sequence[str], wanted: Sequence[pa.Field], path: str) -> list[int | None]:
    """Return the position of each wanted field among the found names, or None for a missing nullable field.

    A name matches exactly, or case-insensitively if only one found name does.
    """
    places = _places(found, [field.name for field in wanted], path)
    for field in wanted:
        if field.name not in places and not field.nullable:
            column = join(path, field.name)
            hint = did_you_mean(field.name, found)
            message = f"column {in_quotes(column)} is missing and takes no nulls: add it.{hint}"
            condition = "SCHEMA_MISMATCH.MISSING_COLUMN"
            raise Misfit(message, column, f"{field.type} not null", "no such column", condition=condition)
    return [places.get(field.name) for field in wanted]


def _places(found: Sequence[str], names: Sequence[str], path: str) -> dict[str, int]:
    exact = set(names)
    by_lower = {name.lower(): name for name in names}
    places: dict[str, int] = {}
    for place, name in enumerate(found):
        target = name if name in exact else by_lower.get(name.lower())
        if target is None:
            raise _unknown_name(name, names, path)
        if target in places:
            column, first = join(path, target), found[places[target]]
            message = (
                f"{in_quotes(first)} and {in_quotes(name)} both match column {in_quotes(column)}: "
                "drop one of them"
            )
            raise Misfit(message, column, "one column", "two columns", condition=DUPLICATE_COLUMN)
        places[target] = place
    return places


def _unknown_name(name: str, names: Sequence[str], path: str) -> Misfit:
    column = join(path, name)
    known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    message = f"there is no column {in_quotes(column)}; the columns are {known}.{did_you_mean(name, names)}"
    return Misfit(message, column, f"one of {known}", name, condition=UNKNOWN_COLUMN)
