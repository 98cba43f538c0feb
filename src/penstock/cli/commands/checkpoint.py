"""``penstock checkpoint``: what the checkpoint of a streaming query holds, on the screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.commands.shared import Run, command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.cli.output.protocol import Section
    from penstock.state.showing import CheckpointState

group = typer.Typer(
    help="See what a streaming query's checkpoint holds; the query is not started and nothing is written.",
    no_args_is_help=True,
)

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="The query's checkpointLocation: a folder, or the URL of one.",
    ),
]


@command(
    group,
    "show",
    examples=[
        "penstock checkpoint show checkpoints/totals",
        "penstock checkpoint show checkpoints/totals --json | jq '.operators[] | {name, rows}'",
    ],
)
def show(
    run: Run,
    path: PathArgument,
    count_rows: Annotated[
        bool,
        typer.Option(
            "--count-rows/--no-count-rows",
            show_default=False,
            help="Whether Spark reads the state, to count its rows and name its columns. [yes]",
        ),
    ] = True,
) -> None:
    """Show batches, watermarks and offsets, and the stateful operators with their rows and files.

    Micro-batches and continuous queries; whole checkpoints and those that a crash left.
    """
    from penstock.state.showing import show as look

    found = look(None, path)
    if count_rows and found.operators:
        with _spark(run) as spark:
            found = look(spark, path)
    run.output.describe(found.to_dict(), list(_sections(found)))


@command(
    group,
    "state",
    examples=[
        "penstock checkpoint state checkpoints/totals",
        "penstock checkpoint state checkpoints/joined --part left -n 100 --json",
        "penstock checkpoint state checkpoints/counts --part count --batch 41",
    ],
)
def state(
    run: Run,
    path: PathArgument,
    operator: Annotated[
        int, typer.Option("--operator", metavar="ID", min=0, help="Which stateful operator.")
    ] = 0,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="NAME",
            show_default=False,
            help="Of a join: left or right. Of a transformWithState: a variable, or timers.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            metavar="ID",
            min=0,
            show_default=False,
            help="As of the end of this batch; by default of the last committed one.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="ROWS", min=0, help="How many rows at most.")
    ] = 20,
) -> None:
    """Show rows of a query's state.

    With --json they are in one document, and "more" says whether there are more.
    """
    from penstock.cli.load.wire import plain_rows
    from penstock.cli.output.protocol import Column, Section
    from penstock.state.showing import show as look

    # What is not there is said before Spark starts.
    look(None, path)
    with _spark(run) as spark:
        from penstock.state.reading import read

        frame = read(spark, path, operator, part=part, batch=batch)
        found = plain_rows(frame.limit(limit + 1).toArrow())
    rows, more = found[:limit], len(found) > limit
    columns = [Column(name, name, text=_cell) for name in frame.columns]
    data = {"operator": operator, "rows": rows, "more": more}
    run.output.describe(data, [Section("", columns=columns, rows=rows)])
    if more and not run.json:
        run.output.note(f"there are more rows than these {limit}: --limit shows more of them")


@contextmanager
def _spark(run: Run) -> Iterator[SparkSession]:
    from penstock.cli.spark_sessions import session_of_command, sparks_errors_in_one_line

    with sparks_errors_in_one_line(), session_of_command(debug=run.debug) as spark:
        yield spark


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sections(found: CheckpointState) -> Iterator[Section]:
    from penstock.cli.output.protocol import Column, Section
    from penstock.state.showing import blocks

    for block in blocks(found):
        columns = [
            Column(str(place), title, right=place in block.right) for place, title in enumerate(block.titles)
        ]
        rows = [{str(place): cell for place, cell in enumerate(line)} for line in block.lines]
        yield Section(block.title, pairs=block.pairs, columns=columns, rows=rows)
