"""``penstock queue export``: the rows of a queue in a table of a lake."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands.queue import QueueName
from penstock.cli.commands.queue_rows import group as group
from penstock.cli.commands.shared import Run, argument, command, option, until_signal
from penstock.cli.units import counted


@command(
    group,
    "export",
    "penstock queue export orders delta:///lake",
    "penstock queue export orders iceberg:prod --table shop.orders --follow --every 300",
)
def export(
    run: Run,
    name: QueueName,
    target: Annotated[
        str, argument("TARGET", "delta:///folder, delta:s3://bucket/folder, or iceberg:CATALOG.")
    ],
    table: Annotated[
        str | None,
        option(
            "--table", "NAME", "The table's name, for Iceberg with its namespace; by default the queue's."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Export new rows as they arrive, until Ctrl-C or SIGTERM.")
    ] = False,
    every: Annotated[
        float,
        option(
            "--every",
            "SECONDS",
            "With --follow: the longest time until a row is in the table.",
            min=0,
            max=86_400,
        ),
    ] = 60.0,
    metadata_columns: Annotated[
        bool,
        typer.Option(
            "--metadata-columns",
            help="Add _queue, _generation, _partition, _row_index and _timestamp to the table.",
        ),
    ] = False,
    consumer: Annotated[
        str | None,
        option("--consumer", "NAME", "The consumer, which is created; by default named after the table."),
    ] = None,
) -> None:
    """Copy a queue to a Delta or Iceberg table, exactly once.

    The table is created if it does not exist, and gets the columns that are added to the queue later. Each
    commit records which rows the table has, so the command can safely be killed, repeated and run twice at
    once. Rows that are not in the table yet are not trimmed from the queue.
    """
    from datetime import timedelta

    from penstock.export.export import QueueExport

    exporting = QueueExport(
        name, run.url, target, table=table, consumer=consumer, metadata_columns=metadata_columns
    )
    if follow:
        with until_signal(exporting.stop):
            run.output.note(f"exporting queue {name} until Ctrl-C")
            status = exporting.follow(every=timedelta(seconds=every))
    else:
        status = exporting.run()
    text = f"exported {counted(status.rows, 'row')} of queue {name!r} in {counted(status.commits, 'commit')}"
    data = {"queue": name, "table": exporting.table, "rows": status.rows, "commits": status.commits}
    run.output.done(text, data)
