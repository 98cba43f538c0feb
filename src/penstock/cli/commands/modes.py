"""``penstock modes``: what output modes do with a query, on the screen."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.arguments import in_quotes
from penstock.cli.boundary import FAILED
from penstock.cli.commands.shared import Run, command
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.modes.checking.report import ModeReport, Report

group = typer.Typer(help="Know what an output mode does, before a query starts.", no_args_is_help=True)

SchemaOption = Annotated[
    str | None,
    typer.Option("--schema", metavar="DDL", show_default=False, help="The input's columns, in Spark's DDL."),
]
EventTimeOption = Annotated[
    str | None,
    typer.Option(
        "--event-time",
        metavar="COLUMN",
        show_default=False,
        help="Give the function its input with a watermark on this column.",
    ),
]
DelayOption = Annotated[
    str | None,
    typer.Option(
        "--delay",
        metavar="INTERVAL",
        show_default=False,
        help="How late rows may come: '10 minutes'. [0 seconds]",
    ),
]


@command(
    group,
    "check",
    examples=[
        "penstock modes check job:totals --schema 'ts timestamp, key string' --event-time ts --delay '10 minutes'",
        "penstock modes check job:whole_query --sink delta --trigger availableNow",
        "penstock modes check job:totals --schema 'id bigint' --json | jq '.modes[] | select(.safe) | .mode'",
    ],
)
def check(
    run: Run,
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            show_default=False,
            help="A function of a streaming DataFrame that returns another, or of a Spark session called spark that returns one; "
            "job:totals is totals in job.py, here or where Python looks.",
        ),
    ],
    schema: SchemaOption = None,
    event_time: EventTimeOption = None,
    delay: DelayOption = None,
    sink: Annotated[
        str | None,
        typer.Option(
            "--sink",
            metavar="FORMAT",
            show_default=False,
            help="Where the rows would go: parquet, delta, kafka, foreachBatch, penstock …",
        ),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option(
            "--trigger",
            metavar="NAME[=VALUE]",
            show_default=False,
            help="As in Spark: processingTime='10 seconds', availableNow, once, continuous='1 second', realTime='5 seconds'.",
        ),
    ] = None,
) -> None:
    """Say of each output mode whether Spark takes it and it is safe, what it emits, and what is wrong, with the way out.

    Nothing is started. The exit code is 1 when no mode is both allowed and safe.
    """
    from penstock.cli.imported import imported, takes_session, working_directory_first
    from penstock.cli.spark_sessions import session_of_command, sparks_errors_in_one_line

    time, when = event_time_of(event_time, delay), _trigger(trigger)
    with working_directory_first(), sparks_errors_in_one_line():
        build = imported(function)
        of_session = takes_session(build)
        _check_options(function, of_session, schema, time)
        with session_of_command(debug=run.debug) as spark:
            from penstock.modes.checking.check import check as checked

            frame = build(spark) if of_session else build(_input(spark, schema or "", time))
            report = checked(frame, sink, when)
    run.output.done(str(report), _report_data(report))
    if not any(mode.safe for mode in report.modes):
        raise typer.Exit(FAILED)


def _check_options(function: str, of_session: bool, schema: str | None, time: object) -> None:
    if of_session and (schema is not None or time is not None):
        raise InvalidInput(
            f"{in_quotes(function)} takes a Spark session and makes its own input: leave out --schema and --event-time"
        )
    if not of_session and schema is None:
        raise InvalidInput(
            f"{in_quotes(function)} takes a DataFrame: say its columns with --schema; a function of a session is one whose "
            "parameter is called spark"
        )


def _input(spark: SparkSession, ddl: str, time: tuple[str, str] | None) -> DataFrame:
    """A streaming DataFrame with these columns, of a source that every trigger takes; it is never read."""
    from pyspark.sql import functions

    from penstock.arrow.schema import canonical_schema
    from penstock.cli.ddl import parse_ddl
    from penstock.spark.schemas import to_struct

    columns = to_struct(canonical_schema(parse_ddl(ddl)))
    frame = spark.readStream.format("rate").load()
    empty = frame.select(*(functions.lit(None).cast(each.dataType).alias(each.name) for each in columns))
    return empty if time is None else empty.withWatermark(*time)


def _trigger(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    name, _, value = text.partition("=")
    return {name.strip(): value.strip() or True}


def event_time_of(column: str | None, delay: str | None) -> tuple[str, str] | None:
    """The watermark that --event-time and --delay ask for.

    Raises
    ------
    InvalidInput
        When there is a delay of nothing.
    """
    if column is None:
        if delay is not None:
            raise InvalidInput("--delay is that of a watermark: say its column with --event-time")
        return None
    return column, delay or "0 seconds"


def _report_data(report: Report) -> dict[str, Any]:
    return {
        "modes": [_mode_data(mode) for mode in report.modes],
        "sink": report.sink,
        "trigger": report.trigger,
        "source": report.source,
        "not_run": list(report.not_run),
    }


def _mode_data(mode: ModeReport) -> dict[str, Any]:
    return {
        "mode": mode.mode,
        "allowed": mode.allowed,
        "safe": mode.safe,
        "emits": None if mode.emits is None else str(mode.emits),
        "problems": [{**asdict(problem), "page": problem.page} for problem in mode.problems],
    }
