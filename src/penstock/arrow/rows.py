"""Rows of any shape into tables of the queue's canonical schema, without loss and without a copy where none is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import pyarrow as pa

from penstock.arrow.casts import Misfit, conform_array, match_names, same_type
from penstock.arrow.nulls import chunks_of, first_row, null_path
from penstock.arrow.plans import Column, Plan, plan_of
from penstock.arrow.pyrows import arrays_from_rows, null_misfit
from penstock.arrow.pyvalues import short


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
