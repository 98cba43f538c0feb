"""``penstock queue put``, ``peek`` and ``tail``: the rows of a queue."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.arguments import did_you_mean, in_quotes
from penstock.cli.commands.queue import PartitionOption, QueueName, check_partition, split_names
from penstock.cli.commands.queue import group as group
from penstock.cli.commands.shared import Run, argument, command, option
from penstock.cli.output import Column, as_json_text, output_is_closed
from penstock.cli.units import counted
from penstock.errors import DataLostError, InvalidInputError, InvalidPositionError

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.json_text import Json
    from penstock.queue.appends import AppendResult
    from penstock.queue.info import PartitionInfo
    from penstock.queue.producer import Producer
    from penstock.queue.queue import Queue

_MEASURED_ROWS = 10_000
"""The number of rows from which the speed is reported."""
_BLOCK_ROWS = 1000
_BLOCK_BYTES = 16 << 20
_CHECK_SECONDS = 1.0
_INDEX_COLUMNS = (
    Column("_partition", "partition", as_json_text),
    Column("_row_index", "index", as_json_text),
)


class Format(StrEnum):
    AUTO = "auto"
    JSONL = "jsonl"
    CSV = "csv"


@command(
    group,
    "put",
    "penstock queue put orders orders.jsonl",
    "penstock queue put flights flights.csv.gz --null NA --batch-rows 100000",
    "zcat events.gz | penstock queue put events --format jsonl --session events-2024-01-31",
)
def put(
    run: Run,
    name: QueueName,
    file: Annotated[str, argument("FILE", "A file (also .gz, .bz2 or .zst), or - for standard input.")] = "-",
    format: Annotated[
        Format,
        typer.Option("--format", help="auto: by the file's extension, or else its first character."),
    ] = Format.AUTO,
    partition: Annotated[
        int | None,
        option("--partition", "NUMBER", "The partition to append to; by default, the key decides."),
    ] = None,
    session: Annotated[
        str | None,
        option(
            "--session",
            "NAME",
            "A name for this one input, which makes the command safe to repeat: rows that the session "
            "has already appended are skipped. They are counted, not compared.",
        ),
    ] = None,
    batch_rows: Annotated[
        int | None,
        option("--batch-rows", "ROWS", "Append this many rows at a time, instead of all at once.", min=1),
    ] = None,
    null: Annotated[
        list[str] | None,
        option("--null", "TEXT", "A CSV value to read as NULL, in addition to an empty field."),
    ] = None,
    delimiter: Annotated[
        str | None, option("--delimiter", "CHARACTER", "The delimiter of a CSV; a comma by default.")
    ] = None,
    max_errors: Annotated[
        int, option("--max-errors", "NUMBER", "How many bad rows to list at most.", min=0)
    ] = 10,
) -> None:
    """Append rows from a file or a pipe, as JSON lines or CSV.

    The first line of a CSV names the columns. All rows are read and checked before the first is appended. If
    some do not fit the queue's schema, they are listed and nothing is appended. Otherwise all rows become
    visible at once, as one append, for which they are held in memory. With --batch-rows there are several
    appends, each of them atomic.

    With --session the command is safe to repeat: the store records how many rows of the input it has, and
    skips that many. Use a session for one input only; rows may be added at its end. Rows are counted, not
    compared, so of another input with the same session the first rows would be skipped.

    In JSON and CSV, timestamps are ISO 8601 with a time zone, and binary values are base64. In a CSV an empty
    field is NULL (so is an empty line if there is only one column), "" is the empty string, and nested values
    are JSON.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise InvalidInputError(
            f"--delimiter is one ASCII character, not {in_quotes(delimiter)}", value=delimiter
        )
    with run.connect() as store:
        queue = store.queue(name)
        started = time.perf_counter()
        if partition is not None:
            # Fail before a long input is read, not after.
            check_partition(queue.name, queue.partitions, partition)
        rows = _read(run, queue, file, format, delimiter, ["", *(null or [])], max_errors)
        producer = None if session is None else store.producer(queue.name, session)
        # A sequence number is the input's index of an append's last row. So it is known exactly which rows
        # have been appended, however a repeat is cut into appends.
        before = 0 if producer is None else producer.sequence + 1
        appends = _append(run, queue, rows, before, producer, partition, batch_rows)
        seconds = time.perf_counter() - started
    skipped = min(before, rows.num_rows)
    added = sum(append.rows for append in appends)
    if not added and not skipped:
        run.output.note("the input has no rows")
    text = f"appended {counted(added, 'row')} to queue {name!r}"
    if added >= _MEASURED_ROWS:
        text += f" in {seconds:.1f} s ({added / seconds:,.0f} rows/s)"
    if skipped:
        first = "the first row" if skipped == 1 else f"the first {counted(skipped, 'row')}"
        text += (
            f"; skipped {first}: session {session!r} has already appended {counted(before, 'row')}, "
            "which are counted, not compared"
        )
    run.output.done(text, _put_data(name, appends, added, skipped, seconds))


def _read(
    run: Run, queue: Queue, file: str, format: Format, delimiter: str | None, nulls: list[str], shown: int
) -> pa.Table:
    from penstock.cli.load.load import load
    from penstock.cli.load.source import open_source

    if file == "-" and sys.stdin is not None and sys.stdin.isatty():
        run.output.note("reading rows from the terminal; Ctrl-D ends them")
    with open_source(file) as source, run.output.progress("reading", source.size) as advance:
        return load(
            source,
            queue.name,
            queue.schema,
            advance,
            format=format.value,
            delimiter=delimiter,
            nulls=nulls,
            shown_errors=shown,
        )


def _append(
    run: Run,
    queue: Queue,
    rows: pa.Table,
    first: int,
    producer: Producer | None,
    partition: int | None,
    batch_rows: int | None,
) -> list[AppendResult]:
    results = []
    with run.output.progress("appending", rows.nbytes) as advance:
        row_count = max(rows.num_rows, 1)
        step = min(batch_rows or row_count, row_count)
        for start in range(first, rows.num_rows, step):
            batch = rows.slice(start, step)
            if producer is None:
                results.append(queue.append(batch, partition))
            else:
                results.append(producer.append(batch, start + batch.num_rows - 1, partition=partition))
            advance(batch.nbytes)
    return results


def _put_data(name: str, appends: list[AppendResult], added: int, skipped: int, seconds: float) -> Json:
    return {
        "queue": name,
        "rows": added,
        "skipped_rows": skipped,
        "appends": [
            [
                {"partition": partition, "first_index": first, "end_index": end}
                for partition, (first, end) in sorted(append.ranges.items())
            ]
            for append in appends
        ],
        "seconds": round(seconds, 3),
    }


ColumnsOption = Annotated[str | None, option("--columns", "COLUMNS", "Only these columns: a,b.")]
IndexOption = Annotated[
    bool, typer.Option("--with-index", help="With --json: add _partition and _row_index.")
]


@command(
    group,
    "peek",
    "penstock queue peek orders -n 5",
    "penstock queue peek orders --partition 2 --from 1000 --json",
)
def peek(
    run: Run,
    name: QueueName,
    partition: PartitionOption = None,
    start: Annotated[
        int | None, option("--from", "INDEX", "The row index to start at; by default that of the oldest row.")
    ] = None,
    rows: Annotated[
        int, option("--rows", "ROWS", "How many rows to show, of all partitions together.", "-n", min=0)
    ] = 10,
    columns: ColumnsOption = None,
    with_index: IndexOption = False,
) -> None:
    """Show the oldest rows of a queue, or those from an index on.

    Nothing is consumed. Without --partition, the partitions follow one another. With --json each row is a
    line that `put` can read.
    """
    with run.connect() as store:
        queue = store.queue(name)
        printer = QueuePrinter(run, queue, columns, with_index)
        parts = _partitions(queue, partition)
        if start is not None and len(parts) > 1:
            raise InvalidInputError(
                f"a row index belongs to a partition: choose one of the {len(parts)} with --partition"
            )
        remaining = rows
        for part in parts:
            first = part.first_index if start is None else start
            if first > part.next_index:
                raise InvalidPositionError(
                    f"partition {part.partition} of queue {name!r} has rows {part.first_index} to "
                    f"{part.next_index}, and no row {first}",
                    condition="INVALID_POSITION.PAST_END",
                    partition=part.partition,
                )
            stop = min(part.next_index, first + remaining)
            printer.show(part.partition, first, stop)
            remaining -= stop - first


@command(
    group,
    "tail",
    "penstock queue tail orders",
    "penstock queue tail orders --follow --json | jq .amount",
)
def tail(
    run: Run,
    name: QueueName,
    rows: Annotated[
        int, option("--rows", "ROWS", "How many rows to show of each partition.", "-n", min=0)
    ] = 10,
    partition: PartitionOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing new rows until Ctrl-C.")
    ] = False,
    columns: ColumnsOption = None,
    with_index: IndexOption = False,
) -> None:
    """Show the newest rows of each partition.

    With --follow, also new ones as they arrive. Nothing is consumed.
    """
    with run.connect() as store:
        queue = store.queue(name)
        printer = QueuePrinter(run, queue, columns, with_index)
        for part in _partitions(queue, partition):
            printer.show(part.partition, max(part.first_index, part.next_index - rows), part.next_index)
        if follow:
            with queue.watch(None if partition is None else [partition]) as watch:
                while not output_is_closed(0):
                    # A new partition, or the end of the output's reader, does not wake the watch.
                    watch.wait(printer.next_indexes, _CHECK_SECONDS)
                    printer.show_new(_partitions(queue, partition))


def _partitions(queue: Queue, partition: int | None) -> list[PartitionInfo]:
    parts = queue.info().partitions
    if partition is None:
        return list(parts)
    check_partition(queue.name, len(parts), partition)
    return [parts[partition]]


class QueuePrinter:
    """Printer of a queue's rows, which records the index after the last printed row of each partition."""

    def __init__(self, run: Run, queue: Queue, columns: str | None, with_index: bool) -> None:
        names = queue.schema.names
        for name in split_names(columns):
            if name not in names:
                raise InvalidInputError(
                    f"queue {in_quotes(queue.name)} has no column "
                    f"{in_quotes(name)}.{did_you_mean(name, names)}",
                    condition="INVALID_INPUT.UNKNOWN_COLUMN",
                    column=name,
                )
        self._names = split_names(columns) or list(names)
        self._output, self._queue = run.output, queue
        self._with_index = with_index or not run.json
        value_columns = [Column(name, name, as_json_text) for name in self._names]
        self._print = run.output.row_printer([*_INDEX_COLUMNS, *value_columns])
        self.next_indexes: dict[int, int] = {}

    def show(self, partition: int, start: int, end: int) -> None:
        """Print rows [start, end) in blocks."""
        from penstock.cli.load.wire import plain_rows

        first = start
        while first < end:
            stop = min(first + _BLOCK_ROWS, end)
            block = self._queue.read(partition, first, stop, columns=self._names, max_bytes=_BLOCK_BYTES)
            rows = plain_rows(block)
            if self._with_index:
                rows = [
                    {**row, "_partition": partition, "_row_index": index}
                    for index, row in enumerate(rows, first)
                ]
            self._print(rows)
            first += block.num_rows
        self.next_indexes[partition] = end

    def show_new(self, parts: list[PartitionInfo]) -> None:
        """Print rows that were not shown yet, including all rows of partitions that were added meanwhile."""
        for part in parts:
            start = max(self.next_indexes.get(part.partition, 0), part.first_index)
            if part.next_index > start:
                self._show_or_skip(part.partition, start, part.next_index)
            self.next_indexes[part.partition] = part.next_index

    def _show_or_skip(self, partition: int, start: int, end: int) -> None:
        """Print rows; rows that are trimmed meanwhile are skipped with a note."""
        position = start
        while position < end:
            stop = min(position + _BLOCK_ROWS, end)
            try:
                self.show(partition, position, stop)
            except DataLostError:
                first = self._queue.info().partitions[partition].first_index
                if first <= position:
                    raise
                stop = min(first, end)
                where = f"rows [{position}, {stop}) of queue {self._queue.name!r}, partition {partition}"
                self._output.note(f"warning: {where}, have been trimmed")
            position = stop
