"""``penstock modes preview``: what each output mode emits, micro-batch by micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.arguments import in_quotes
from penstock.cli.commands.modes import DelayOption, EventTimeOption, SchemaOption, event_time_of
from penstock.cli.commands.shared import Run, command
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.modes.previewing.micro_batches import MicroBatch, ModePreview
    from penstock.modes.previewing.result import Preview


FunctionArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        show_default=False,
        help="A function of a streaming DataFrame that returns another; job:totals is totals in job.py, here or where Python "
        "looks.",
    ),
]


def add_to(group: typer.Typer) -> None:
    command(
        group,
        "preview",
        examples=[
            "penstock modes preview job:totals events.jsonl --event-time ts --delay '10 minutes'",
            "penstock modes preview job:totals events.jsonl --batch-rows 2 --mode append --mode update",
            "penstock modes preview job:totals events.jsonl --picture modes.svg",
        ],
    )(preview)


def preview(
    run: Run,
    function: FunctionArgument,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="A few rows as JSON lines (.gz, .bz2, .zst too); an empty line ends a micro-batch. - is a pipe.",
        ),
    ],
    event_time: EventTimeOption = None,
    delay: DelayOption = None,
    schema: SchemaOption = None,
    batch_rows: Annotated[
        int | None,
        typer.Option(
            "--batch-rows", metavar="ROWS", min=1, show_default=False, help="So many rows a micro-batch."
        ),
    ] = None,
    batch_column: Annotated[
        str | None,
        typer.Option(
            "--batch-column",
            metavar="COLUMN",
            show_default=False,
            help="A micro-batch ends where this column's value changes.",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            metavar="MODE",
            show_default=False,
            help="append, update or complete; can be repeated. All by default.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", show_default=False, help="Write a picture in SVG as well."),
    ] = None,
) -> None:
    """Run a function over a few small micro-batches, and show what each output mode emits, and when.

    Nothing is written but the picture. Spark runs on this machine; --debug shows its log. Without --schema the columns are those of the rows, of
    which times with a time zone are timestamps and those without one are timestamp_ntz.
    """
    from penstock.cli.imported import imported, takes_session, working_directory_first
    from penstock.cli.load.micro_batches import Cutting, micro_batches
    from penstock.cli.output.protocol import Section
    from penstock.cli.spark_sessions import session_of_command, sparks_errors_in_one_line

    time = event_time_of(event_time, delay)
    with working_directory_first(), sparks_errors_in_one_line():
        transform = imported(function)
        if takes_session(transform):
            raise InvalidInput(
                f"{in_quotes(function)} takes a Spark session: a preview gives a function its input, so that it needs one of "
                "a DataFrame"
            )
        batches = micro_batches(file, schema, event_time, Cutting(batch_rows, batch_column))
        with session_of_command(debug=run.debug) as spark:
            from penstock.modes.checking.report import MODES
            from penstock.modes.previewing.preview import preview as previewed

            found = previewed(spark, transform, batches, event_time=time, modes=mode or MODES)
    from penstock.modes.previewing.text import zone_note

    if picture is not None:
        _write(found, picture)
    sections = [_section(each, found.time_zone) for each in found.modes]
    note = zone_note(found.modes, found.time_zone)
    run.output.describe(_preview_data(found), [*sections, *([Section(note)] if note else [])])


def _write(found: Preview, path: Path) -> None:
    try:
        found.picture(path)
    except OSError as error:
        raise InvalidInput(
            f"cannot write {in_quotes(str(path))}: {error.strerror or error}",
            condition="FILE_UNWRITABLE",
            file=str(path),
        ) from error


def _section(mode: ModePreview, time_zone: str) -> Any:
    from penstock.cli.output.protocol import Column, Section
    from penstock.modes.previewing.text import RIGHT, grid, heading

    if mode.refusal is not None:
        return Section(heading(mode))
    found = grid(mode, time_zone)
    columns = [Column(str(place), title, right=place in RIGHT) for place, title in enumerate(found.titles)]
    rows = [{str(place): cell for place, cell in enumerate(line)} for line in found.lines]
    return Section(heading(mode), columns=columns, rows=rows)


def _preview_data(found: Preview) -> dict[str, Any]:
    return {"modes": [_mode_data(mode) for mode in found.modes], "time_zone": found.time_zone}


def _mode_data(mode: ModePreview) -> dict[str, Any]:
    refusal = mode.refusal
    return {
        "mode": mode.mode,
        "allowed": mode.allowed,
        "condition": None if refusal is None else refusal.condition,
        "reason": None if refusal is None else refusal.message,
        "cut": mode.is_cut,
        "batches": [_batch_data(batch) for batch in mode.batches],
    }


def _batch_data(batch: MicroBatch) -> dict[str, Any]:
    from penstock.cli.load.wire import plain_rows
    from penstock.instants import moment_text

    return {
        "batch": batch.batch,
        "kind": batch.kind,
        "input_rows": batch.input_rows,
        "watermark": moment_text(batch.watermark),
        "state_rows": batch.state_rows,
        "removed_rows": batch.removed_rows,
        "dropped_rows": batch.dropped_rows,
        "emitted": plain_rows(batch.emitted),
    }
