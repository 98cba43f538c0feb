"""``penstock checkpoint``: the contents of a streaming query's checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands.shared import Run, argument, command, option
from penstock.cli.output import Column, Section, as_json_text
from penstock.cli.spark_programs import command_session

group = typer.Typer(
    help="Show what a streaming query's checkpoint holds.",
    no_args_is_help=True,
)

PathArgument = Annotated[
    str, argument("PATH", "The query's checkpointLocation: a folder, or the URL of one.")
]


@command(
    group,
    "show",
    "penstock checkpoint show checkpoints/totals",
    "penstock checkpoint show checkpoints/totals --json | jq '.operators[] | {name, rows}'",
)
def show(
    run: Run,
    path: PathArgument,
    count_rows: Annotated[
        bool,
        typer.Option(
            "--count-rows/--no-count-rows",
            help="Whether to start Spark, which reads the state to count its rows.",
        ),
    ] = True,
) -> None:
    """Show the batches, watermark, offsets and stateful operators.

    Works for micro-batch and continuous queries, while they run and after a crash. Starts no query and writes
    nothing.
    """
    from penstock.state.showing import blocks
    from penstock.state.showing import show as read_checkpoint

    contents = read_checkpoint(None, path)
    if count_rows and contents.operators:
        with command_session(debug=run.debug) as spark:
            contents = read_checkpoint(spark, path)
    sections = [
        Section.of_cells(block.title, block.titles, block.lines, right=block.right, pairs=block.pairs)
        for block in blocks(contents)
    ]
    run.output.describe(contents.to_dict(), sections)


@command(
    group,
    "state",
    "penstock checkpoint state checkpoints/totals",
    "penstock checkpoint state checkpoints/joined --part left -n 100 --json",
    "penstock checkpoint state checkpoints/counts --part count --batch 41",
)
def state(
    run: Run,
    path: PathArgument,
    operator: Annotated[int, option("--operator", "ID", "The id of the stateful operator.", min=0)] = 0,
    part: Annotated[
        str | None,
        option(
            "--part",
            "NAME",
            "For a join: left or right. For a transformWithState: a state variable, or timers.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        option("--batch", "ID", "The state after this batch; by default the last committed one.", min=0),
    ] = None,
    limit: Annotated[int, option("--limit", "ROWS", "How many rows to show at most.", "-n", min=0)] = 20,
) -> None:
    """Show the rows of a query's state. It starts Spark.

    With --json the output is one document, whose "more" says whether the state has more rows.
    """
    from penstock.cli.load.wire import plain_rows
    from penstock.state.showing import show as read_checkpoint

    # Report a missing checkpoint before Spark starts.
    read_checkpoint(None, path)
    with command_session(debug=run.debug) as spark:
        from penstock.state.reading import first_rows_of_state

        state_rows = first_rows_of_state(spark, path, operator, part=part, batch=batch, rows=limit + 1)
        rows = plain_rows(state_rows)
    rows, more = rows[:limit], len(rows) > limit
    columns = [Column(name, name, as_json_text) for name in state_rows.column_names]
    data = {"operator": operator, "rows": rows, "more": more}
    run.output.describe(data, [Section("", columns=columns, rows=rows)])
    if more and not run.json:
        run.output.note(f"the state has more than these {limit} rows: raise --limit to see them")
