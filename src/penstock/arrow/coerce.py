"""Conversion of rows of any shape to a queue's canonical schema, without loss, and without a copy where
none is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.arrow.arrays import chunks_of, map_entries, nested_fields
from penstock.arrow.casts import Misfit, conform_array, match_names, same_type
from penstock.arrow.python_values import Coder, as_mapping, coder_of, misfit, short
from penstock.arrow.spark_json import join
from penstock.errors import SchemaMismatch

_NOTHING = type(None)
# What Arrow's conversion raises for a value that it cannot take.
_CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def to_table(rows: pa.Table | pa.RecordBatch | Iterable[Mapping[str, object]], schema: pa.Schema) -> pa.Table:
    """Return the rows as a table of exactly the schema.

    Columns are matched by name, in any order; without case where no name matches exactly. A missing
    nullable column is filled with nulls. Values are cast only where that loses nothing.

    Parameters
    ----------
    rows
        A table, a record batch, anything that exports an Arrow stream (a pandas or polars data frame), or
        an iterable of mappings, one for each row. No rows give an empty table. A table of the same schema
        is returned as it is.
    schema
        The queue's canonical schema. Pass the same object each time: what is derived from it is cached.

    Raises
    ------
    SchemaMismatch
        A column is unknown, missing, or of a type that cannot be cast without loss; a value does not fit;
        or there is a null where the schema takes none. ``parameters`` has ``column``, ``expected``,
        ``found`` and, if one row is to blame, its 0-based ``row``.
    """
    plan = _plan_of(schema)
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    elif not isinstance(rows, pa.Table):
        if not hasattr(rows, "__arrow_c_stream__"):
            return _from_mappings(rows, plan, schema)
        rows = pa.RecordBatchReader.from_stream(rows).read_all()
    if not rows.schema.equals(schema, check_metadata=True):
        rows = pa.Table.from_arrays(_conform(rows, plan), schema=schema)
    _check_nulls(rows, plan)
    return rows


def conform_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return one batch in exactly the schema, under the rules of ``to_table``.

    Parameters
    ----------
    batch
        Rows; whether its fields are declared nullable does not matter, only the nulls in them.
    schema
        The queue's canonical schema.

    Raises
    ------
    SchemaMismatch
        As ``to_table``.
    """
    plan = _plan_of(schema)
    if not batch.schema.equals(schema, check_metadata=True):
        batch = pa.RecordBatch.from_arrays(_conform(batch, plan), schema=schema)
    _check_nulls(batch, plan)
    return batch


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the schema.

    Parameters
    ----------
    required
        Whether it takes no nulls.
    required_below
        Whether something in its nested values takes no nulls.
    coder
        Prepares Python values so that Arrow converts them without loss.
    """

    name: str
    type: pa.DataType
    field: pa.Field
    required: bool
    required_below: bool
    coder: Coder


@dataclass(frozen=True, slots=True)
class _Plan:
    """What conversions need to know about a schema."""

    columns: tuple[_Column, ...]
    fields: tuple[pa.Field, ...]
    names: frozenset[str]
    checked_for_nulls: tuple[tuple[int, _Column], ...]

    @classmethod
    def of(cls, schema: pa.Schema) -> _Plan:
        columns = tuple(
            _Column(
                name=field.name,
                type=field.type,
                field=field,
                required=not field.nullable,
                required_below=_forbids_nulls_below(field),
                coder=coder_of(field.type, field.name),
            )
            for field in schema
        )
        checked = tuple((i, each) for i, each in enumerate(columns) if each.required or each.required_below)
        return cls(columns, tuple(schema), frozenset(schema.names), checked)


# By identity: a queue keeps one schema object, and hashing a schema takes longer than appending a row.
_plans: dict[int, tuple[weakref.ref[pa.Schema], _Plan]] = {}


def _plan_of(schema: pa.Schema) -> _Plan:
    known = _plans.get(id(schema))
    if known is not None and known[0]() is schema:
        return known[1]
    plan = _Plan.of(schema)
    key = id(schema)
    _plans[key] = (weakref.ref(schema, lambda _: _plans.pop(key, None)), plan)
    return plan


def _conform(source: pa.Table | pa.RecordBatch, plan: _Plan) -> list[pa.Array | pa.ChunkedArray]:
    try:
        places = match_names(source.schema.names, plan.fields, "")
    except Misfit as misfit:
        raise misfit.error() from None
    return [
        pa.nulls(source.num_rows, column.type)
        if place is None
        else _conform_column(source.column(place), column)
        for place, column in zip(places, plan.columns, strict=True)
    ]


def _conform_column(values: pa.Array | pa.ChunkedArray, column: _Column) -> pa.Array | pa.ChunkedArray:
    if same_type(values.type, column.type):
        return values
    try:
        chunks = [conform_array(chunk, column.type, column.name) for chunk in chunks_of(values)]
    except Misfit as misfit:
        if misfit.by_value:
            _name_row(misfit, values, column)
        raise misfit.error() from misfit.__cause__
    return pa.chunked_array(chunks, column.type) if isinstance(values, pa.ChunkedArray) else chunks[0]


def _name_row(misfit: Misfit, values: pa.Array | pa.ChunkedArray, column: _Column) -> None:
    def is_bad(start: int, end: int) -> bool:
        try:
            for chunk in chunks_of(values.slice(start, end - start)):
                conform_array(chunk, column.type, column.name)
        except Misfit:
            return True
        return False

    misfit.row = _first_row(len(values), is_bad)
    value = short(values[misfit.row].as_py())
    misfit.found = f"{values.type} {value}"
    misfit.message = f"the value {value} does not fit: {misfit.message}"


def _first_row(length: int, is_bad: Callable[[int, int], bool]) -> int:
    """Return the first bad row of ``length``, by bisection: ``is_bad(start, end)`` says whether a range has
    a bad one.
    """
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(low, middle) else (middle, high)
    return low


# Rows as Python objects.


def _from_mappings(rows: Iterable[object], plan: _Plan, schema: pa.Schema) -> pa.Table:
    try:
        mappings = _with_known_keys(_as_mappings(rows), plan)
        arrays = [_array(mappings, column) for column in plan.columns]
    except Misfit as misfit:
        raise misfit.error() from misfit.__cause__
    table = pa.Table.from_arrays(arrays, schema=schema)
    for place, column in plan.checked_for_nulls:
        if column.required_below:
            _check_column(table.column(place), column)
    return table


def _as_mappings(rows: object) -> list[Mapping[str, object]]:
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise SchemaMismatch(
            f"Rows are a table, a record batch or an iterable of mappings, not one {type(rows).__name__}; "
            "put it in a list.",
            found=type(rows).__name__,
        )
    listed = list(rows)
    if set(map(type, listed)) <= {dict}:
        return listed
    return [_as_mapping(row, number) for number, row in enumerate(listed)]


def _as_mapping(row: object, number: int) -> Mapping[str, object]:
    mapping = as_mapping(row)
    if mapping is None:
        found = f"{type(row).__name__} {short(row)}"
        message = f"a row has to be a mapping of column names to values, not the {found}; pass dicts."
        raise Misfit(message, "", "a mapping", found, row=number)
    return mapping


def _with_known_keys(mappings: list[Mapping[str, object]], plan: _Plan) -> list[Mapping[str, object]]:
    if set().union(*mappings) <= plan.names:
        return mappings
    return [_renamed(mapping, number, plan) for number, mapping in enumerate(mappings)]


def _renamed(mapping: Mapping[str, object], number: int, plan: _Plan) -> Mapping[str, object]:
    if mapping.keys() <= plan.names:
        return mapping
    keys = list(mapping)
    try:
        places = match_names([str(key) for key in keys], plan.fields, "")
    except Misfit as unmatched:
        unmatched.row = number
        raise
    columns = zip(places, plan.columns, strict=True)
    return {column.name: mapping[keys[place]] for place, column in columns if place is not None}


def _array(mappings: list[Mapping[str, object]], column: _Column) -> pa.Array:
    name = column.name
    values: Sequence[object] = [mapping.get(name) for mapping in mappings]
    kinds = set(map(type, values))
    if column.required and _NOTHING in kinds:
        raise _null_misfit(name, next(i for i, value in enumerate(values) if value is None))
    try:
        return pa.array(column.coder.values(values, kinds), column.type)
    except (Misfit, *_CONVERSION_ERRORS):
        raise _first_misfit(values, column) from None


def _first_misfit(values: Sequence[object], column: _Column) -> Misfit:
    for row, value in enumerate(values):
        found = _misfit_of(value, column)
        if found is not None:
            found.row = row
            return found
    message = (
        f"column {in_quotes(column.name)} cannot be built as {column.type}; append fewer rows at a time."
    )
    return Misfit(message, column.name, column.type, "values that fit one by one")


def _misfit_of(value: object, column: _Column) -> Misfit | None:
    try:
        pa.array(column.coder.values([value]), column.type)
    except Misfit as found:
        return found
    except _CONVERSION_ERRORS as error:
        reason = str(error).strip().rstrip(".")
        reason = reason[:1].lower() + reason[1:]
        return misfit(value, column.type, column.name, reason, "change the value or the schema")
    return None


# Nulls where the schema takes none, in nested values too: Arrow itself does not check.


def _check_nulls(source: pa.Table | pa.RecordBatch, plan: _Plan) -> None:
    for place, column in plan.checked_for_nulls:
        values = source.column(place)
        if column.required_below or values.null_count:
            _check_column(values, column)


def _check_column(values: pa.Array | pa.ChunkedArray, column: _Column) -> None:
    start = 0
    for chunk in chunks_of(values):
        if _null_path(chunk, column.field, column.name) is not None:
            _refuse_null(chunk, column, start)
        start += len(chunk)


def _refuse_null(chunk: pa.Array, column: _Column, start: int) -> NoReturn:
    def is_bad(first: int, end: int) -> bool:
        return _null_path(chunk.slice(first, end - first), column.field, column.name) is not None

    row = _first_row(len(chunk), is_bad)
    path = _null_path(chunk.slice(row, 1), column.field, column.name) or column.name
    raise _null_misfit(path, start + row).error()


def _null_misfit(path: str, row: int) -> Misfit:
    message = (
        f"column {in_quotes(path)} takes no nulls and has one here; fill it, or declare the column nullable."
    )
    return Misfit(message, path, "not null", "null", row=row)


def _forbids_nulls_below(field: pa.Field) -> bool:
    """Return whether something in a field's nested values takes no nulls; Arrow itself checks the keys of
    maps.
    """
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
