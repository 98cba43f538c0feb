"""What appending needs to know about a schema, worked out once for each schema object."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa

from penstock.arguments import in_quotes
from penstock.arrow.casts import Misfit, conform_array, match_names, same_type
from penstock.arrow.nulls import chunks_of, first_row, forbids_nulls, null_path
from penstock.arrow.python_values import Coder, as_mapping, coder_of, misfit, short
from penstock.errors import SchemaMismatch


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the schema.

    Parameters
    ----------
    name, type
        As in the schema.
    field
        The schema's field.
    required
        Whether it takes no nulls.
    required_below
        Whether something in its nested values takes no nulls.
    coder
        Brings Python values into what Arrow converts without loss.
    """

    name: str
    type: pa.DataType
    field: pa.Field
    required: bool
    required_below: bool
    coder: Coder


@dataclass(frozen=True, slots=True)
class Plan:
    """A schema and what was worked out from it."""

    columns: tuple[Column, ...]
    fields: tuple[pa.Field, ...]
    names: frozenset[str]
    guarded: tuple[tuple[int, Column], ...]


# By identity: a queue keeps one schema object, and hashing a schema costs more than appending a row.
_plans: dict[int, tuple[weakref.ref[pa.Schema], Plan]] = {}


def plan_of(schema: pa.Schema) -> Plan:
    """Return the plan of a canonical schema, from memory when this very object was seen before."""
    known = _plans.get(id(schema))
    if known is not None and known[0]() is schema:
        return known[1]
    plan = _plan(schema)
    key = id(schema)
    _plans[key] = (weakref.ref(schema, lambda _: _plans.pop(key, None)), plan)
    return plan


def _plan(schema: pa.Schema) -> Plan:
    columns = tuple(
        Column(
            name=field.name,
            type=field.type,
            field=field,
            required=not field.nullable,
            required_below=forbids_nulls(field, below_only=True),
            coder=coder_of(field.type, field.name),
        )
        for field in schema
    )
    guarded = tuple((i, each) for i, each in enumerate(columns) if each.required or each.required_below)
    return Plan(columns, tuple(schema), frozenset(schema.names), guarded)


# ---- pyrows: Dicts into Arrow columns. The one place where rows are Python objects, because that is what the caller has.

_NOTHING = type(None)
# What Arrow's conversion raises for a value that it cannot take.
_CONVERSION_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def arrays_from_rows(rows: Iterable[Any], plan: Plan) -> list[pa.Array]:
    """Return one array for each column of the schema.

    Parameters
    ----------
    rows
        Mappings of column name to value; a missing key is a null.
    plan
        What is known of the schema.

    Raises
    ------
    Misfit
        A row is no mapping, has an unknown key, lacks a value where a column takes no nulls, or has a value that does not
        fit; with the row's number.
    SchemaMismatch
        ``rows`` is not an iterable of rows at all.
    """
    mappings = _with_known_keys(_as_mappings(rows), plan)
    return [_array(mappings, column) for column in plan.columns]


def _as_mappings(rows: Iterable[Any]) -> list[Mapping[str, Any]]:
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise SchemaMismatch(
            f"Rows are a table, a record batch or an iterable of mappings, not one {type(rows).__name__}; put it in a list.",
            found=type(rows).__name__,
        )
    listed = list(rows)
    if set(map(type, listed)) <= {dict}:
        return listed
    return [_as_mapping(row, number) for number, row in enumerate(listed)]


def _as_mapping(row: Any, number: int) -> Mapping[str, Any]:
    mapping = as_mapping(row)
    if mapping is None:
        found = f"{type(row).__name__} {short(row)}"
        message = f"a row has to be a mapping of column names to values, not the {found}; pass dicts."
        raise Misfit(message, "", "a mapping", found, row=number)
    return mapping


def _with_known_keys(mappings: list[Mapping[str, Any]], plan: Plan) -> list[Mapping[str, Any]]:
    if set().union(*mappings) <= plan.names:
        return mappings
    return [_renamed(mapping, number, plan) for number, mapping in enumerate(mappings)]


def _renamed(mapping: Mapping[str, Any], number: int, plan: Plan) -> Mapping[str, Any]:
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


def _array(mappings: list[Mapping[str, Any]], column: Column) -> pa.Array:
    name = column.name
    values: Sequence[Any] = [mapping.get(name) for mapping in mappings]
    kinds = set(map(type, values))
    if column.required and _NOTHING in kinds:
        raise null_misfit(name, next(i for i, value in enumerate(values) if value is None))
    try:
        return pa.array(column.coder.values(values, kinds), column.type)
    except (Misfit, *_CONVERSION_ERRORS):
        raise _first_misfit(values, column) from None


def _first_misfit(values: Sequence[Any], column: Column) -> Misfit:
    for row, value in enumerate(values):
        found = _misfit_of(value, column)
        if found is not None:
            found.row = row
            return found
    message = (
        f"column {in_quotes(column.name)} cannot be built as {column.type}; append fewer rows at a time."
    )
    return Misfit(message, column.name, column.type, "values that fit one by one")


def _misfit_of(value: Any, column: Column) -> Misfit | None:
    try:
        pa.array(column.coder.values([value]), column.type)
    except Misfit as found:
        return found
    except _CONVERSION_ERRORS as error:
        return misfit(value, column.type, column.name, _reason(error), "change the value or the schema")
    return None


def _reason(error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    return text[:1].lower() + text[1:]


def null_misfit(path: str, row: int) -> Misfit:
    """Return the error for a null where the schema takes none."""
    message = (
        f"column {in_quotes(path)} takes no nulls and has one here; fill it, or declare the column nullable."
    )
    return Misfit(message, path, "not null", "null", row=row)


# ---- rows: Rows of any shape into tables of the queue's canonical schema, without loss and without a copy where none is needed.


def to_table(rows: pa.Table | pa.RecordBatch | Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return the rows as a table of exactly the schema, or say why they do not fit.

    Columns are matched by name, in any order; without case where no name matches exactly. A missing column is filled with
    nulls if it takes any. Values are cast only where that loses nothing.

    Parameters
    ----------
    rows
        A table, a record batch, anything that exports an Arrow stream (a pandas or polars data frame), or an iterable of
        mappings, one for each row. No rows give an empty table. A table of the very schema is returned as it is.
    schema
        The queue's canonical schema. Pass the same object each time: what is worked out from it is remembered.

    Raises
    ------
    SchemaMismatch
        A column is unknown, missing, or of a type that cannot be cast without loss; a value does not fit; or there is a
        null where the schema takes none. ``parameters`` has ``column``, ``expected``, ``found`` and, where there is one,
        the 0-based ``row``.
    """
    plan = plan_of(schema)
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
        Rows; the fields' declared nullability does not matter, only the nulls that are there.
    schema
        The queue's canonical schema.

    Raises
    ------
    SchemaMismatch
        As ``to_table``.
    """
    plan = plan_of(schema)
    if not batch.schema.equals(schema, check_metadata=True):
        batch = pa.RecordBatch.from_arrays(_conform(batch, plan), schema=schema)
    _check_nulls(batch, plan)
    return batch


def _from_mappings(rows: Any, plan: Plan, schema: pa.Schema) -> pa.Table:
    try:
        arrays = arrays_from_rows(rows, plan)
    except Misfit as misfit:
        raise misfit.error() from misfit.__cause__
    table = pa.Table.from_arrays(arrays, schema=schema)
    for place, column in plan.guarded:
        if column.required_below:
            _check_column(table.column(place), column)
    return table


def _conform(source: Any, plan: Plan) -> list[Any]:
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


def _conform_column(found: Any, column: Column) -> Any:
    if same_type(found.type, column.type):
        return found
    try:
        chunks = [conform_array(chunk, column.type, column.name) for chunk in chunks_of(found)]
    except Misfit as misfit:
        if misfit.by_value:
            _point_out(misfit, found, column)
        raise misfit.error() from misfit.__cause__
    return pa.chunked_array(chunks, column.type) if isinstance(found, pa.ChunkedArray) else chunks[0]


def _point_out(misfit: Misfit, found: Any, column: Column) -> None:
    def is_bad(start: int, end: int) -> bool:
        try:
            for chunk in chunks_of(found.slice(start, end - start)):
                conform_array(chunk, column.type, column.name)
        except Misfit:
            return True
        return False

    misfit.row = first_row(len(found), is_bad)
    misfit.found = f"{found.type} {short(found[misfit.row].as_py())}"
    misfit.message = f"the value {short(found[misfit.row].as_py())} does not fit: {misfit.message}"


def _check_nulls(source: Any, plan: Plan) -> None:
    for place, column in plan.guarded:
        found = source.column(place)
        if column.required_below or found.null_count:
            _check_column(found, column)


def _check_column(found: Any, column: Column) -> None:
    start = 0
    for chunk in chunks_of(found):
        if null_path(chunk, column.field, column.name) is not None:
            _refuse_null(chunk, column, start)
        start += len(chunk)


def _refuse_null(chunk: pa.Array, column: Column, start: int) -> NoReturn:
    def is_bad(first: int, end: int) -> bool:
        return null_path(chunk.slice(first, end - first), column.field, column.name) is not None

    row = first_row(len(chunk), is_bad)
    path = null_path(chunk.slice(row, 1), column.field, column.name) or column.name
    raise null_misfit(path, start + row).error()
