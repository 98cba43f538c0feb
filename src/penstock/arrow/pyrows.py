"""Dicts into Arrow columns. The one place where rows are Python objects, because that is what the caller has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.arrow.casts import Misfit, match_names
from penstock.arrow.plans import Column, Plan
from penstock.arrow.pyvalues import as_mapping, misfit, short
from penstock.errors import SchemaMismatch
from penstock.names import in_quotes

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
