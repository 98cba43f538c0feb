"""Reading a file of JSON lines as micro-batches."""

from __future__ import annotations

import io
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.cli.ddl import parse_ddl
from penstock.cli.load.load import load
from penstock.cli.load.rows import RowsRejected
from penstock.cli.load.source import Source, infer_schema, open_source
from penstock.cli.units import counted
from penstock.errors import InvalidInputError


def micro_batches(
    path: str,
    ddl: str | None,
    event_time: str | None,
    *,
    batch_rows: int | None = None,
    batch_column: str | None = None,
) -> list[pa.Table]:
    """Read a file (or standard input for ``-``) as micro-batches, which end at empty lines by default."""
    with open_source(path) as source:
        name, data = source.name, b"".join(iter(lambda: source.read(1 << 20), b""))
    table = _load_rows(name, data, _candidate_schemas(path, ddl, event_time))
    if table.num_rows == 0:
        raise InvalidInputError(f"{in_quotes(name)} has no rows", file=name)
    ends = _batch_ends(table, data, batch_rows, batch_column)
    return [table.slice(start, end - start) for start, end in pairwise([0, *ends])]


def _candidate_schemas(path: str, ddl: str | None, event_time: str | None) -> list[pa.Schema]:
    """Return the possible schemas: times with or without a time zone."""
    if ddl is not None:
        return [canonical_schema(parse_ddl(ddl))]
    if path == "-":
        raise InvalidInputError("the schema of standard input cannot be inferred: add --schema")
    schema = infer_schema(Path(path))
    if event_time is not None and event_time not in schema.names:
        raise InvalidInputError(
            f"no row has a column {in_quotes(event_time)}.{did_you_mean(event_time, schema.names)}",
            condition="INVALID_INPUT.UNKNOWN_COLUMN",
            column=event_time,
        )
    time_columns = {
        field.name
        for field in schema
        if pat.is_timestamp(field.type) or (field.name == event_time and pat.is_string(field.type))
    }
    time_types = [pa.timestamp("us", "UTC"), pa.timestamp("us")] if time_columns else [None]
    return [
        pa.schema([field.with_type(time_type) if field.name in time_columns else field for field in schema])
        for time_type in time_types
    ]


def _load_rows(name: str, data: bytes, schemas: list[pa.Schema]) -> pa.Table:
    for schema in schemas:
        try:
            return load(Source(name, io.BytesIO(data), len(data)), name, schema, format="jsonl")
        except RowsRejected as error:
            rejected = error
    parameters = {key: value for key, value in rejected.parameters.items() if key != "queue"}
    count = int(parameters["count"])
    raise RowsRejected(
        f"{counted(count, 'row')} of {in_quotes(name)} {'does' if count == 1 else 'do'} not fit the "
        "schema; nothing was run",
        file=name,
        **parameters,
    )


def _batch_ends(table: pa.Table, data: bytes, rows: int | None, column: str | None) -> list[int]:
    if rows is not None and column is not None:
        raise InvalidInputError("micro-batches end by --batch-rows or by --batch-column: leave one out")
    if rows is not None:
        return [*range(rows, table.num_rows, rows), table.num_rows]
    if column is not None:
        return [*_value_changes(table, column), table.num_rows]
    lines = groupby(data.split(b"\n"), lambda line: bool(line.strip()))
    return list(accumulate(len(list(block)) for has_rows, block in lines if has_rows))


def _value_changes(table: pa.Table, name: str) -> list[int]:
    """Return the rows whose value in a column differs from the previous row."""
    if name not in table.column_names:
        raise InvalidInputError(
            f"the rows have no column {in_quotes(name)} for "
            f"--batch-column.{did_you_mean(name, table.column_names)}",
            condition="INVALID_INPUT.UNKNOWN_COLUMN",
            column=name,
        )
    codes = table.column(name).combine_chunks().dictionary_encode("encode").indices
    if len(codes) < 2:
        return []
    changed = pc.not_equal(codes.slice(1), codes.slice(0, len(codes) - 1))
    return [int(row) + 1 for row in pc.indices_nonzero(changed).to_pylist()]
