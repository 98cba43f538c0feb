"""A file of JSON lines as micro-batches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import canonical_schema
from penstock.cli.ddl import parse_ddl
from penstock.cli.load.load import Intake, load
from penstock.cli.load.rejected import RowsRejected
from penstock.cli.load.schemas import infer_schema
from penstock.cli.load.source import Source, open_source
from penstock.cli.units import counted
from penstock.errors import InvalidInput


@dataclass(frozen=True)
class Cutting:
    """Where micro-batches end: at empty lines, unless one of these is given."""

    rows: int | None = None
    """After so many rows."""
    column: str | None = None
    """Where this column's value changes."""


def micro_batches(path: str, ddl: str | None, event_time: str | None, cutting: Cutting) -> list[pa.Table]:
    """Read a file, or standard input for ``-``.

    Parameters
    ----------
    ddl
        The schema; that of the rows when None.
    event_time
        A column that holds times, even where they would be taken for text.

    Raises
    ------
    InvalidInput
        The file cannot be read, or nothing is in it.
    RowsRejected
        Rows do not fit the schema.
    """
    with open_source(path) as source:
        name, data = source.name, b"".join(_blocks(source))
    table = _rows(name, data, _schemas(path, ddl, event_time))
    if table.num_rows == 0:
        raise InvalidInput(f"there are no rows in {in_quotes(name)}", file=name)
    ends = _ends(table, data, cutting)
    return [table.slice(start, end - start) for start, end in pairwise([0, *ends])]


def _blocks(source: Source) -> Iterator[bytes]:
    while data := source.read(1 << 20):
        yield data


def _schemas(path: str, ddl: str | None, event_time: str | None) -> list[pa.Schema]:
    """The schemas that may be meant: what looks like a time may have a time zone or not."""
    if ddl is not None:
        return [canonical_schema(parse_ddl(ddl))]
    if path == "-":
        raise InvalidInput("the schema of standard input has to be said: add --schema")
    found = infer_schema(Path(path))
    if event_time is not None and event_time not in found.names:
        raise InvalidInput(
            f"no row has a column {in_quotes(event_time)}.{did_you_mean(event_time, found.names)}",
            column=event_time,
        )
    times = {
        field.name
        for field in found
        if pat.is_timestamp(field.type) or (field.name == event_time and pat.is_string(field.type))
    }
    kinds = [pa.timestamp("us", "UTC"), pa.timestamp("us")] if times else [None]
    return [
        pa.schema([field.with_type(kind) if field.name in times else field for field in found])
        for kind in kinds
    ]


def _rows(name: str, data: bytes, schemas: list[pa.Schema]) -> pa.Table:
    for schema in schemas:
        try:
            return load(
                Source(name, io.BytesIO(data), len(data)), name, schema, Intake("jsonl"), lambda size: None
            )
        except RowsRejected as error:
            rejected = error
    about = {key: value for key, value in rejected.parameters.items() if key != "queue"}
    count = int(about["count"])
    raise RowsRejected(
        f"{counted(count, 'row')} of {in_quotes(name)} {'does' if count == 1 else 'do'} not fit the schema; nothing was run",
        file=name,
        **about,
    )


def _ends(table: pa.Table, data: bytes, cutting: Cutting) -> list[int]:
    if cutting.rows is not None and cutting.column is not None:
        raise InvalidInput("say where micro-batches end once: with --batch-rows or with --batch-column")
    if cutting.rows is not None:
        return [*range(cutting.rows, table.num_rows, cutting.rows), table.num_rows]
    if cutting.column is not None:
        return [*_changes(table, cutting.column), table.num_rows]
    return list(accumulate(_blocks_of_lines(data)))


def _changes(table: pa.Table, name: str) -> list[int]:
    """The rows whose value in a column is another than in the row before."""
    if name not in table.column_names:
        raise InvalidInput(
            f"--batch-column {in_quotes(name)} is no column of the rows.{did_you_mean(name, table.column_names)}",
            column=name,
        )
    codes = table.column(name).combine_chunks().dictionary_encode("encode").indices
    if len(codes) < 2:
        return []
    changed = pc.not_equal(codes.slice(1), codes.slice(0, len(codes) - 1))
    return [int(row) + 1 for row in pc.indices_nonzero(changed).to_pylist()]


def _blocks_of_lines(data: bytes) -> Iterator[int]:
    """The number of rows in each run of lines that are not empty."""
    rows = 0
    for line in data.split(b"\n"):
        if line.strip():
            rows += 1
        elif rows:
            yield rows
            rows = 0
    if rows:
        yield rows
