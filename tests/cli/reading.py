"""Reading rows from bytes, as the tests of both formats do."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa

from penstock.arrow.schema import canonical_schema
from penstock.cli.ddl import parse_ddl
from penstock.cli.load.load import load
from penstock.cli.load.rows import RowsRejected
from penstock.cli.load.source import Source
from penstock.cli.load.wire import plain_rows


def schema_of(ddl: str) -> pa.Schema:
    return canonical_schema(parse_ddl(ddl))


def read_table(schema: pa.Schema, data: bytes | str, **intake: Any) -> pa.Table:
    raw = data.encode() if isinstance(data, str) else data
    table = load(Source("input", io.BytesIO(raw), len(raw)), "q", schema, **intake)
    assert table.schema.equals(schema, check_metadata=True)
    table.validate(full=True)
    return table


def read_rows(ddl: str, data: bytes | str, **intake: Any) -> list[dict[str, Any]]:
    """The rows, as JSON would have them."""
    return plain_rows(read_table(schema_of(ddl), data, **intake))


def rejected(ddl: str, data: bytes | str, **intake: Any) -> RowsRejected:
    try:
        found = read_rows(ddl, data, **intake)
    except RowsRejected as error:
        return error
    raise AssertionError(f"all rows were taken: {found}")


def complaints(ddl: str, data: bytes | str, **intake: Any) -> list[str]:
    return rejected(ddl, data, **intake).details
