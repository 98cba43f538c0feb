"""Load a whole input into one table of the queue's schema, or report the rows that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa

from penstock.cli.load.csv import CsvRows, read_header
from penstock.cli.load.json_lines import JsonLines
from penstock.cli.load.rows import Record, Refused, RowFormat, RowProblem, RowsRejected
from penstock.cli.load.source import Source

BLOCK_BYTES = 8 << 20
COUNTED_ERRORS = 1000


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
    """Read all rows of an input; ``nulls`` are the texts that stand for a null in a CSV.

    The table, of the size of the rows in Arrow, is held in memory; the text is held a block at a time.
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
    count = 0
    for data, first_line in _blocks(source, rows, line, block_bytes):
        table, bad = _sift(rows, data, COUNTED_ERRORS - count)
        for record in bad[: shown_errors - len(problems)]:
            problems.append(replace(rows.explain(record), line=first_line + record.line))
        count += len(bad)
        if count == 0:
            tables.append(table)
        on_bytes(len(data))
        if count == COUNTED_ERRORS:
            break
    if count:
        raise RowsRejected.of(queue, problems, count, more=count == COUNTED_ERRORS)
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _blocks(source: Source, rows: RowFormat, line: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of whole rows, each with the 1-based line on which it starts."""
    pending = b""
    # Read twice as much as long as no row ends, so that a giant row is not copied over and over.
    while more := source.read(max(size, len(pending))):
        pending += more
        end = rows.cut(pending)
        if end:
            yield pending[:end], line
            line += pending.count(b"\n", 0, end)
            pending = pending[end:]
    if pending:
        yield pending, line


def _sift(rows: RowFormat, data: bytes, limit: int) -> tuple[pa.Table, list[Record]]:
    """Return the rows of a block, or at most ``limit`` records that do not fit.

    Bad rows are found by bisecting with the reader that reads good rows, so that both agree on which rows
    fit.
    """
    try:
        return rows.parse(data), []
    except Refused:
        records = rows.records(data)
    table: pa.Table = pa.table({})
    bad: list[Record] = []
    todo = [records]
    while todo and len(bad) < limit:
        part = todo.pop()
        ready = [record.ready for record in part if record.ready is not None]
        with suppress(Refused):
            if len(ready) == len(part):
                table = rows.parse_ready(b"".join(ready))
                continue
        if len(part) == 1:
            bad.append(part[0])
        else:
            middle = len(part) // 2
            todo += [part[middle:], part[:middle]]
    return table, bad
