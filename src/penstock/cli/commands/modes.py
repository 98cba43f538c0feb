"""``penstock modes``: what output modes do with a query."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.arguments import in_quotes
from penstock.cli.commands.shared import FAILED, Run, argument, command, option
from penstock.cli.output import Section
from penstock.cli.spark_programs import (
    command_session,
    import_function,
    takes_session,
    working_directory_first,
)
from penstock.errors import InvalidInputError
from penstock.instants import moment_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.json_text import Json
    from penstock.modes.checking.report import ModeReport
    from penstock.modes.previewing.micro_batches import MicroBatch, ModePreview

group = typer.Typer(help="Predict what a query does in each output mode.", no_args_is_help=True)

SchemaOption = Annotated[str | None, option("--schema", "DDL", "The input's columns, in Spark's DDL.")]
EventTimeOption = Annotated[
    str | None,
    option("--event-time", "COLUMN", "Pass the function its input with a watermark on this column."),
]
DelayOption = Annotated[
    str | None, option("--delay", "INTERVAL", "How late rows may be: '10 minutes'. [0 seconds]")
]


@command(
    group,
    "check",
    "penstock modes check job:totals --schema 'ts timestamp, k string' --event-time ts --delay '10 minutes'",
    "penstock modes check job:whole_query --sink delta --trigger availableNow",
    "penstock modes check job:totals --schema 'id bigint' --json | jq '.modes[] | select(.safe) | .mode'",
)
def check(
    run: Run,
    function: Annotated[
        str,
        argument(
            "MODULE:FUNCTION",
            "A function of a streaming DataFrame that returns another, or of a Spark session "
            "called spark that returns one; job:totals is totals in job.py, in the working directory "
            "or on Python's path.",
        ),
    ],
    schema: SchemaOption = None,
    event_time: EventTimeOption = None,
    delay: DelayOption = None,
    sink: Annotated[
        str | None,
        option("--sink", "FORMAT", "The sink: parquet, delta, kafka, foreachBatch, penstock …"),
    ] = None,
    trigger: Annotated[
        str | None,
        option(
            "--trigger",
            "NAME[=VALUE]",
            "As in Spark: processingTime='10 seconds', availableNow, once, continuous='1 second', "
            "realTime='5 seconds'.",
        ),
    ] = None,
) -> None:
    """Report the problems of a query in each output mode.

    For each mode: whether Spark accepts it, whether it is safe, what it emits, and how to fix problems. The
    query is not started, but the module is imported, which runs its top-level code: start queries under
    if __name__ == "__main__". The exit code is 1 if no mode is both allowed and safe.
    """
    watermark = _watermark(event_time, delay)
    with working_directory_first():
        build = import_function(function)
        takes_spark = takes_session(build)
        if takes_spark and (schema is not None or watermark is not None):
            raise InvalidInputError(
                f"{in_quotes(function)} takes a Spark session and makes its own input: leave out "
                "--schema and --event-time",
                condition="INVALID_INPUT.FUNCTION_PARAMETERS",
            )
        if not takes_spark and schema is None:
            raise InvalidInputError(
                f"{in_quotes(function)} takes a DataFrame: give its columns with --schema. If it takes "
                "a session, call that parameter spark",
                condition="INVALID_INPUT.FUNCTION_PARAMETERS",
            )
        with command_session(debug=run.debug) as spark:
            from penstock.modes.checking.check import check as check_modes

            frame = build(spark) if takes_spark else build(_input(spark, schema or "", watermark))
            report = check_modes(frame, sink, _trigger(trigger))
    data = {
        "modes": [_report_data(mode) for mode in report.modes],
        "sink": report.sink,
        "trigger": report.trigger,
        "source": report.source,
        "not_run": list(report.not_run),
    }
    run.output.done(str(report), data)
    if not any(mode.safe for mode in report.modes):
        raise typer.Exit(FAILED)


def _watermark(column: str | None, delay: str | None) -> tuple[str, str] | None:
    if column is None:
        if delay is not None:
            raise InvalidInputError("--delay belongs to a watermark: give its column with --event-time")
        return None
    return column, delay or "0 seconds"


def _input(spark: SparkSession, ddl: str, watermark: tuple[str, str] | None) -> DataFrame:
    """Return a streaming DataFrame with these columns, of a source that allows every trigger."""
    from pyspark.sql import functions

    from penstock.arrow.schema import canonical_schema
    from penstock.cli.ddl import parse_ddl
    from penstock.spark.schemas import to_struct

    columns = to_struct(canonical_schema(parse_ddl(ddl)))
    frame = spark.readStream.format("rate").load()
    empty = frame.select(*(functions.lit(None).cast(field.dataType).alias(field.name) for field in columns))
    return empty if watermark is None else empty.withWatermark(*watermark)


def _trigger(text: str | None) -> dict[str, str | bool] | None:
    if text is None:
        return None
    name, _, value = text.partition("=")
    return {name.strip(): value.strip() or True}


def _report_data(mode: ModeReport) -> Json:
    return {
        "mode": mode.mode,
        "allowed": mode.allowed,
        "safe": mode.safe,
        "emits": None if mode.emits is None else str(mode.emits),
        "problems": [{**asdict(problem), "page": problem.page} for problem in mode.problems],
    }


@command(
    group,
    "preview",
    "penstock modes preview job:totals events.jsonl --event-time ts --delay '10 minutes'",
    "penstock modes preview job:totals events.jsonl --batch-rows 2 --mode append --mode update",
    "penstock modes preview job:totals events.jsonl --picture modes.svg",
)
def preview(
    run: Run,
    function: Annotated[
        str,
        argument(
            "MODULE:FUNCTION",
            "A function of a streaming DataFrame that returns another; job:totals is totals in "
            "job.py, in the working directory or on Python's path.",
        ),
    ],
    file: Annotated[
        str,
        argument(
            "FILE",
            "A few rows as JSON lines (also .gz, .bz2 or .zst), or - for standard input. An empty line ends "
            "a micro-batch.",
        ),
    ],
    event_time: EventTimeOption = None,
    delay: DelayOption = None,
    schema: SchemaOption = None,
    batch_rows: Annotated[
        int | None, option("--batch-rows", "ROWS", "End a micro-batch after this many rows.", min=1)
    ] = None,
    batch_column: Annotated[
        str | None, option("--batch-column", "COLUMN", "End a micro-batch where this column's value changes.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        option("--mode", "MODE", "append, update or complete; can be repeated. All by default."),
    ] = None,
    picture: Annotated[Path | None, option("--picture", "FILE", "Also write a picture in SVG.")] = None,
) -> None:
    """Run a query on a few rows, and show what each output mode emits.

    Nothing is written except the picture. Importing the module runs its top-level code: start queries under
    if __name__ == "__main__". Spark runs on this machine; --debug shows its log. Without --schema, the
    columns are those of the rows; times with a time zone become timestamp, and others timestamp_ntz.
    """
    from penstock.cli.load.micro_batches import micro_batches

    watermark = _watermark(event_time, delay)
    with working_directory_first():
        transform = import_function(function)
        if takes_session(transform):
            raise InvalidInputError(
                f"{in_quotes(function)} takes a Spark session: a preview passes a function its input, "
                "so it needs one that takes a DataFrame",
                condition="INVALID_INPUT.FUNCTION_PARAMETERS",
            )
        batches = micro_batches(file, schema, event_time, batch_rows=batch_rows, batch_column=batch_column)
        with command_session(debug=run.debug) as spark:
            from penstock.modes.checking.report import MODES
            from penstock.modes.previewing.preview import preview as run_preview

            result = run_preview(spark, transform, batches, event_time=watermark, modes=mode or MODES)
    from penstock.modes.previewing.text import zone_note

    if picture is not None:
        try:
            result.picture(picture)
        except OSError as error:
            raise InvalidInputError(
                f"cannot write {in_quotes(str(picture))}: {error.strerror or error}",
                condition="FILE_UNWRITABLE",
                file=str(picture),
            ) from error
    sections = [_preview_section(mode_preview, result.time_zone) for mode_preview in result.modes]
    if note := zone_note(result.modes, result.time_zone):
        sections.append(Section(note))
    data = {
        "modes": [_preview_data(mode_preview) for mode_preview in result.modes],
        "time_zone": result.time_zone,
    }
    run.output.describe(data, sections)


def _preview_section(mode: ModePreview, time_zone: str) -> Section:
    from penstock.modes.previewing.text import RIGHT_ALIGNED, grid, heading

    if mode.refusal is not None:
        return Section(heading(mode))
    titles, *lines = grid(mode, time_zone)
    return Section.of_cells(heading(mode), titles, lines, right=RIGHT_ALIGNED)


def _preview_data(mode: ModePreview) -> Json:
    refusal = mode.refusal
    return {
        "mode": mode.mode,
        "allowed": mode.allowed,
        "condition": None if refusal is None else refusal.condition,
        "reason": None if refusal is None else refusal.message,
        "cut": mode.is_cut,
        "batches": [_batch_data(batch) for batch in mode.batches],
    }


def _batch_data(batch: MicroBatch) -> Json:
    from penstock.cli.load.wire import plain_rows

    names = ("batch", "kind", "input_rows", "watermark", "state_rows", "removed_rows", "dropped_rows")
    cells = {name: getattr(batch, name) for name in names}
    return {**cells, "watermark": moment_text(batch.watermark), "emitted": plain_rows(batch.emitted)}
