"""Loading an input into a table with the queue's schema, or reporting rows that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from penstock.cli.load.csv import CsvRows, read_header
from penstock.cli.load.json_lines import JsonLines
from penstock.cli.load.rows import BlockRefused, Record, RowFormat, RowProblem, RowsRejected
from penstock.cli.load.source import Source

BLOCK_BYTES = 8 << 20
MAX_COUNTED_ERRORS = 1000


def load(
    source: Source,
    queue: str,
    schema: pa.Schema,
    on_bytes: Callable[[int], None] = lambda size: None,
    *,
    format: str = "auto",
    delimiter: str | None = None,
    nulls: Sequence[str] = ("",),
    shown_errors: int = 10,
    block_bytes: int = BLOCK_BYTES,
) -> pa.Table:
    """Read all rows of an input; ``nulls`` are the texts that represent null in CSV.

    The table is kept in memory. The text is read one block at a time.
    """
    rows: RowFormat
    line = 1
    if source.format(format) == "jsonl":
        rows = JsonLines(schema)
    else:
        delimiter = delimiter or source.delimiter()
        header, lines = read_header(source, delimiter)
        if not header:
            return schema.empty_table()
        rows, line = CsvRows(schema, header, delimiter=delimiter, nulls=nulls), 1 + lines
    tables: list[pa.Table] = []
    problems: list[RowProblem] = []
    error_count = 0
    for data, first_line in _blocks(source, rows, line, block_bytes):
        table, rejected = _find_rejected(rows, data, MAX_COUNTED_ERRORS - error_count)
        for record in rejected[: shown_errors - len(problems)]:
            problems.append(replace(rows.explain(record), line=first_line + record.line))
        error_count += len(rejected)
        if error_count == 0:
            tables.append(table)
        on_bytes(len(data))
        if error_count == MAX_COUNTED_ERRORS:
            break
    if error_count:
        raise RowsRejected.of(queue, problems, error_count, more=error_count == MAX_COUNTED_ERRORS)
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _blocks(source: Source, rows: RowFormat, line: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of whole rows, each with the 1-based line on which it starts."""
    pending = b""
    # Double the amount while no row ends, so that a very long row is not copied repeatedly.
    while chunk := source.read(max(size, len(pending))):
        pending += chunk
        end = rows.end_of_rows(pending)
        if end:
            yield pending[:end], line
            line += pending.count(b"\n", 0, end)
            pending = pending[end:]
    if pending:
        yield pending, line


def _find_rejected(rows: RowFormat, data: bytes, limit: int) -> tuple[pa.Table, list[Record]]:
    """Return the rows of a block, or at most ``limit`` records that do not fit.

    Rejected rows are found by bisection with the same reader that reads valid rows, so that both agree.
    """
    try:
        return rows.parse(data), []
    except BlockRefused:
        records = rows.records(data)
    table: pa.Table = pa.table({})
    rejected: list[Record] = []
    pending = [records]
    while pending and len(rejected) < limit:
        group = pending.pop()
        prepared = [record.prepared for record in group if record.prepared is not None]
        with suppress(BlockRefused):
            if len(prepared) == len(group):
                table = rows.parse_prepared(b"".join(prepared))
                continue
        if len(group) == 1:
            rejected.append(group[0])
        else:
            middle = len(group) // 2
            pending += [group[middle:], group[:middle]]
    return table, rejected
