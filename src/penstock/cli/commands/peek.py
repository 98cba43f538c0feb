"""``penstock queue peek`` and ``tail``: rows on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands.queue import PartitionOption, QueueName, check_partition
from penstock.cli.commands.shared import Run, command
from penstock.cli.following import output_is_closed
from penstock.cli.output.protocol import RowPrinter
from penstock.errors import DataLost, InvalidInput, InvalidPosition

if TYPE_CHECKING:
    from penstock.queue.info import PartitionInfo
    from penstock.queue.queue import Queue

_BLOCK_ROWS = 1000
_GLANCE_SECONDS = 1.0

RowsOption = Annotated[
    int, typer.Option("--rows", "-n", metavar="ROWS", min=0, help="How many, over all partitions.")
]
TailRowsOption = Annotated[
    int, typer.Option("--rows", "-n", metavar="ROWS", min=0, help="How many of each partition.")
]
ColumnsOption = Annotated[
    str, typer.Option("--columns", metavar="COLUMNS", show_default=False, help="These columns alone: a,b.")
]
IndexOption = Annotated[
    bool, typer.Option("--with-index", show_default=False, help="With --json: add _partition and _row_index.")
]


def add_to(group: typer.Typer) -> None:
    command(
        group,
        "peek",
        examples=[
            "penstock queue peek orders -n 5",
            "penstock queue peek orders --partition 2 --from 1000 --json",
        ],
    )(peek)
    command(
        group,
        "tail",
        examples=["penstock queue tail orders", "penstock queue tail orders --follow --json | jq .amount"],
    )(tail)


def peek(
    run: Run,
    name: QueueName,
    partition: PartitionOption = None,
    start: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="INDEX",
            show_default=False,
            help="The row index to start at; by default the oldest row's.",
        ),
    ] = None,
    rows: RowsOption = 10,
    columns: ColumnsOption = "",
    with_index: IndexOption = False,
) -> None:
    """Show rows from the start of a queue, or from an index; nothing is consumed.

    Without --partition the partitions come one after the other. With --json each row is a line that `put` reads.
    """
    with run.connect() as store:
        queue = store.queue(name)
        view = _View(run, queue, columns, with_index)
        parts = _chosen(queue, partition)
        if start is not None and len(parts) > 1:
            raise InvalidInput(
                f"a row index belongs to a partition: say which of the {len(parts)} with --partition"
            )
        left = rows
        for part in parts:
            first = part.first_index if start is None else start
            if first > part.next_index:
                raise InvalidPosition(
                    f"partition {part.partition} of queue {name!r} has rows {part.first_index} to {part.next_index}: "
                    f"there is no row {first}",
                    partition=part.partition,
                )
            left -= view.show(part.partition, first, min(part.next_index, first + left))


def tail(
    run: Run,
    name: QueueName,
    rows: TailRowsOption = 10,
    partition: PartitionOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", show_default=False, help="Go on with new rows until Ctrl-C.")
    ] = False,
    columns: ColumnsOption = "",
    with_index: IndexOption = False,
) -> None:
    """Show the newest rows of each partition, and with --follow those that come; nothing is consumed."""
    with run.connect() as store:
        queue = store.queue(name)
        view = _View(run, queue, columns, with_index)
        stands: dict[int, int] = {}
        for part in _chosen(queue, partition):
            view.show(part.partition, max(part.first_index, part.next_index - rows), part.next_index)
            stands[part.partition] = part.next_index
        if follow:
            _follow(view, queue, partition, stands)


def _chosen(queue: Queue, partition: int | None) -> list[PartitionInfo]:
    parts = queue.info().partitions
    if partition is None:
        return list(parts)
    check_partition(queue.name, len(parts), partition)
    return [parts[partition]]


class _View:
    """Rows of a queue on their way to the output."""

    def __init__(self, run: Run, queue: Queue, columns: str, with_index: bool) -> None:
        self._run = run
        self._queue = queue
        self._columns = _column_names(queue, columns)
        self._print: RowPrinter = run.output.row_printer(self._columns, with_index=with_index)
        self.shown = 0

    def show(self, partition: int, start: int, end: int) -> int:
        """Print rows [start, end), as many at a time as fit in memory; how many there were."""
        from penstock.cli.load.wire import plain_rows

        for first in range(start, end, _BLOCK_ROWS):
            stop = min(first + _BLOCK_ROWS, end)
            table = self._queue.read(partition, first, stop, columns=self._columns)
            self._print(partition, first, plain_rows(table))
        self.shown += end - start
        return end - start

    def show_or_skip(self, partition: int, start: int, end: int) -> None:
        """As :meth:`show`, but rows that were trimmed meanwhile are noted and passed over."""
        position = start
        while position < end:
            stop = min(position + _BLOCK_ROWS, end)
            try:
                self.show(partition, position, stop)
            except DataLost:
                first = self._queue.info().partitions[partition].first_index
                if first <= position:
                    raise
                stop = min(first, end)
                where = f"rows [{position}, {stop}) of queue {self._queue.name!r}, partition {partition}"
                self._run.output.note(f"warning: {where}, have been trimmed")
            position = stop


def _column_names(queue: Queue, wanted: str) -> list[str]:
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in queue.schema.names:
            from penstock.arguments import did_you_mean, in_quotes

            hint = did_you_mean(name, queue.schema.names)
            raise InvalidInput(
                f"queue {in_quotes(queue.name)} has no column {in_quotes(name)}.{hint}", column=name
            )
    return names or list(queue.schema.names)


def _follow(view: _View, queue: Queue, partition: int | None, stands: dict[int, int]) -> None:
    with queue.watch(None if partition is None else [partition]) as watch:
        while not output_is_closed(0):
            # Partitions that are new, and an output that nobody reads any more, wake nobody.
            watch.wait(stands, _GLANCE_SECONDS)
            _show_new(view, _chosen(queue, partition), stands)


def _show_new(view: _View, parts: list[PartitionInfo], stands: dict[int, int]) -> None:
    for part in parts:
        # A partition that was added meanwhile is shown from its start.
        start = stands.get(part.partition, 0)
        if part.next_index > start:
            view.show_or_skip(part.partition, max(start, part.first_index), part.next_index)
        stands[part.partition] = part.next_index
