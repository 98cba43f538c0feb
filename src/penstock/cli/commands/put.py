"""``penstock queue put``: rows from text into a queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.arguments import in_quotes
from penstock.cli.commands.queue import QueueName, check_partition
from penstock.cli.commands.shared import Run, command
from penstock.cli.units import counted
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.queue.producer import Producer
    from penstock.queue.queue import AppendResult, Queue


_MEASURED_ROWS = 10_000


class Format(StrEnum):
    AUTO = "auto"
    JSONL = "jsonl"
    CSV = "csv"


def add_to(group: typer.Typer) -> None:
    command(
        group,
        "put",
        examples=[
            "penstock queue put orders orders.jsonl",
            "penstock queue put flights flights.csv.gz --null NA --batch-rows 100000",
            "zcat events.gz | penstock queue put events --format jsonl --session events-2024-01-31",
        ],
    )(put)


def put(
    run: Run,
    name: QueueName,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file (.gz, .bz2, .zst too), or - to read a pipe.")
    ] = "-",
    format: Annotated[
        Format,
        typer.Option("--format", help="auto goes by the file's ending, or else by its first character."),
    ] = Format.AUTO,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition", metavar="NUMBER", show_default=False, help="Where the rows go; by default by key."
        ),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            show_default=False,
            help="A name for ONE input: as many of its first rows as the session has appended are skipped; they are "
            "counted, not compared.",
        ),
    ] = None,
    batch_rows: Annotated[
        int | None,
        typer.Option(
            "--batch-rows",
            metavar="ROWS",
            min=1,
            show_default=False,
            help="Append so many rows at a time, not all at once.",
        ),
    ] = None,
    null: Annotated[
        list[str] | None,
        typer.Option(
            "--null",
            metavar="TEXT",
            show_default=False,
            help="A field of a CSV that is null, besides an empty one.",
        ),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            "--delimiter",
            metavar="CHARACTER",
            show_default=False,
            help="Between a CSV's fields; , by default.",
        ),
    ] = None,
    max_errors: Annotated[
        int, typer.Option("--max-errors", metavar="NUMBER", min=0, help="Bad rows to show.")
    ] = 10,
) -> None:
    """Append the rows of a file or a pipe: JSON lines, or CSV whose first line names the columns.

    All rows are read and checked before the first is appended. If one does not fit the queue's schema, the bad lines are
    listed and nothing is appended. Then all rows become visible at once, as one append; they are held in memory for that.
    With --batch-rows it is several appends, each of them whole or not there.

    With --session a repeat is harmless: the store remembers how many rows of the input it has, and skips so many. A session
    stands for one input, to whose end rows may be added: rows are counted, not compared, so that another input under the same
    name loses its first rows.

    In JSON and CSV, timestamps are ISO 8601 with a zone, binaries are base64. In a CSV a field that holds nothing is null (so is
    an empty line where there is one column alone), "" is the empty text, and nested values are written as JSON.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise InvalidInput(f"--delimiter is one ASCII character, not {in_quotes(delimiter)}", value=delimiter)
    with run.connect() as store:
        queue = store.queue(name)
        started = time.perf_counter()
        if partition is not None:
            # Fail before a long input is read, not after.
            check_partition(queue.name, queue.partitions, partition)
        rows = _read(run, queue, file, format, delimiter, ["", *(null or [])], max_errors)
        producer = None if session is None else store.producer(queue.name, session)
        # A sequence number is the index of an append's last row in the input: what was appended is known to the row,
        # however the repeat is cut into appends.
        before = 0 if producer is None else producer.sequence + 1
        appends = _append(run, queue, rows, before, producer, partition, batch_rows)
        seconds = time.perf_counter() - started
    skipped = min(before, rows.num_rows)
    told = f"; {_told_skipped(skipped, session, before)}" if skipped else ""
    _report(run, name, appends, skipped, told, seconds)


def _read(
    run: Run,
    queue: Queue,
    file: str,
    format: Format,
    delimiter: str | None,
    nulls: list[str],
    shown: int,
) -> pa.Table:
    from penstock.cli.load.load import Intake, load
    from penstock.cli.load.source import open_source

    if file == "-" and sys.stdin is not None and sys.stdin.isatty():
        run.output.note("reading rows from the terminal; Ctrl-D ends them")
    intake = Intake(format.value, delimiter, nulls, shown)
    with open_source(file) as source, run.output.progress("reading", source.size) as advance:
        return load(source, queue.name, queue.schema, intake, advance)


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
        for start, batch in _batches(rows, first, batch_rows):
            results.append(_append_one(queue, producer, batch, start + batch.num_rows - 1, partition))
            advance(batch.nbytes)
    return results


def _append_one(
    queue: Queue, producer: Producer | None, rows: pa.Table, sequence: int, partition: int | None
) -> AppendResult:
    if producer is None:
        return queue.append(rows, partition)
    return producer.append(rows, sequence, partition=partition)


def _batches(rows: pa.Table, first: int, size: int | None) -> Iterator[tuple[int, pa.Table]]:
    whole = max(rows.num_rows, 1)
    step = min(size or whole, whole)
    for start in range(first, rows.num_rows, step):
        yield start, rows.slice(start, step)


def _told_skipped(rows: int, session: str | None, before: int) -> str:
    which = "the first row" if rows == 1 else f"the first {counted(rows, 'row')}"
    had = counted(before, "row")
    return f"skipped {which}: session {session!r} has appended {had} already, which are counted, not compared"


def _report(
    run: Run, name: str, appends: list[AppendResult], skipped: int, told: str, seconds: float
) -> None:
    added = sum(append.rows for append in appends)
    speed = f" in {seconds:.1f} s ({added / seconds:,.0f} rows/s)" if added >= _MEASURED_ROWS else ""
    data: dict[str, Any] = {
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
    if not added and not skipped:
        run.output.note("there were no rows in the input")
    run.output.done(f"appended {counted(added, 'row')} to queue {name!r}{speed}{told}", data)
