"""``penstock queue``: commands for queues, except those for rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.arguments import truncated
from penstock.cli.commands.shared import (
    MAX_LISTED,
    Run,
    YesOption,
    argument,
    command,
    note_missing,
    option,
)
from penstock.cli.output import MAX_CELL_CHARACTERS, Column, Section, column_values
from penstock.cli.units import age_text, count_text, counted, parse_age, parse_count, parse_size, size_text
from penstock.errors import InvalidInputError, PartitionNotFoundError
from penstock.instants import moment_of, moment_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.json_text import Json
    from penstock.queue.info import QueueInfo
    from penstock.queue.maintenance import Retention
    from penstock.store.records.catalog import QueueSummary
    from penstock.ui.reading import PartitionRow

group = typer.Typer(help="Create, fill and inspect queues.", no_args_is_help=True)

_MAX_NAMES = 100
QueueName = Annotated[str, argument("QUEUE", "The queue's name.")]
PartitionOption = Annotated[int | None, option("--partition", "NUMBER", "Only this partition.")]
KeepRows = Annotated[str | None, option("--retention-rows", "ROWS", "How many rows to keep: 1000000, 10M.")]
KeepAge = Annotated[str | None, option("--retention-age", "AGE", "How long to keep rows: 7d, 12h, 30min.")]
KeepBytes = Annotated[
    str | None, option("--retention-bytes", "SIZE", "How many bytes to keep: 10GB, 512MiB.")
]


def make_retention(rows: str | None, age: str | None, size: str | None) -> Retention:
    from penstock.queue.maintenance import Retention

    return Retention(
        rows=None if rows is None else parse_count(rows, "--retention-rows"),
        age=None if age is None else parse_age(age, "--retention-age"),
        bytes=None if size is None else parse_size(size, "--retention-bytes"),
    )


def check_partition(queue: str, partitions: int, partition: int) -> None:
    """Raise PartitionNotFoundError unless the queue has the partition."""
    if not 0 <= partition < partitions:
        raise PartitionNotFoundError(
            f"queue {queue!r} has partitions 0 to {partitions - 1}, not {partition}",
            queue=queue,
            partition=partition,
        )


@command(
    group,
    "create",
    "penstock queue create orders --schema 'id bigint not null, amount decimal(10,2), tags array<string>'",
    "penstock queue create orders --like orders.csv --partitions 4 --key customer_id",
    "penstock queue create logs --schema-file schema.json --retention-age 7d --retention-bytes 10GB",
)
def create(
    run: Run,
    name: QueueName,
    schema: Annotated[str | None, option("--schema", "DDL", "The columns, in Spark's DDL.")] = None,
    schema_file: Annotated[
        Path | None, option("--schema-file", "FILE", "A file with the schema, as Spark's JSON or as DDL.")
    ] = None,
    like: Annotated[
        Path | None,
        option("--like", "FILE", "Take the columns from a .csv, .jsonl, .parquet or .arrow file."),
    ] = None,
    partitions: Annotated[
        int, option("--partitions", "NUMBER", "How many partitions; rows keep their order within one.")
    ] = 1,
    key: Annotated[
        str | None,
        option("--key", "COLUMNS", "The key columns, a,b: rows with equal keys share a partition."),
    ] = None,
    retention_rows: KeepRows = None,
    retention_age: KeepAge = None,
    retention_bytes: KeepBytes = None,
    payloads: Annotated[
        str | None,
        option("--payloads", "URL", "Object storage for large appends: s3://bucket/prefix, or a folder."),
    ] = None,
) -> None:
    """Create a queue. The schema comes from one of --schema, --schema-file and --like.

    Retention applies to each partition, by the first limit that is exceeded. Without one, all rows are
    kept.
    """
    from penstock.cli.load.source import choose_schema

    columns = choose_schema(schema, schema_file, like)
    retention = make_retention(retention_rows, retention_age, retention_bytes)
    with run.connect() as store:
        queue = store.create_queue(
            name, columns, partitions=partitions, key=split_names(key), retention=retention, payloads=payloads
        )
        created = queue.info()
    contents = f"{counted(partitions, 'partition')} and {counted(len(columns), 'column')}"
    text = f"created queue {name!r} with {contents}"
    run.output.done(text, _details(created))


def split_names(names: str | None) -> list[str]:
    """Split names at their commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _retention_text(retention: Json) -> str:
    parts = [
        None if retention["rows"] is None else f"{retention['rows']:,} rows",
        None if retention["age_seconds"] is None else age_text(retention["age_seconds"]),
        None if retention["bytes"] is None else size_text(retention["bytes"]),
    ]
    return ", ".join(part for part in parts if part) or "everything"


def _time_text(time: str | None) -> str:
    return "" if time is None else time[:19].replace("T", " ") + "Z"


_SUMMARY_COLUMNS = (
    Column("name", "queue"),
    Column("partitions", "partitions", count_text, right=True),
    Column("rows", "rows", count_text, right=True),
    Column("bytes", "size", size_text, right=True),
    Column("key", "key", ", ".join),
    Column("retention", "keeps", _retention_text),
    Column("consumers", "consumers", count_text, right=True),
    Column("created_at", "created", _time_text),
)
_PARTITION_COLUMNS = (
    Column("partition", "partition", count_text, right=True),
    Column("first_index", "first", count_text, right=True),
    Column("next_index", "next", count_text, right=True),
    Column("rows", "rows", count_text, right=True),
    Column("bytes", "size", size_text, right=True),
    Column("segments", "segments", count_text, right=True),
    Column("last_append", "last append", _time_text),
)


def _summary(info: QueueInfo) -> Json:
    return {
        "name": info.name,
        "partitions": len(info.partitions),
        "rows": info.rows,
        "bytes": info.bytes,
        "key": list(info.key),
        "retention": _retention_json(info.retention),
        "consumers": len(info.consumers),
        "created_at": moment_text(info.created_at),
    }


def _retention_json(retention: Retention) -> Json:
    age = None if retention.age is None else retention.age.total_seconds()
    return {"rows": retention.rows, "age_seconds": age, "bytes": retention.bytes}


def _details(info: QueueInfo) -> Json:
    """Return everything about a queue, with the schema as Spark's JSON and as DDL."""
    from penstock.arrow.schema import spark_json
    from penstock.cli.ddl import schema_ddl

    return {
        **_summary(info),
        "schema": json.loads(spark_json(info.schema)),
        "ddl": ", ".join(schema_ddl(info.schema)),
        "consumers": list(info.consumers),
        "partitions": [
            {**column_values(part, _PARTITION_COLUMNS), "last_append": moment_text(part.last_append)}
            for part in info.partitions
        ],
    }


@command(group, "list", "penstock queue list --json")
def list_queues(run: Run) -> None:
    """List the queues.

    The list has the first 5,000 by name, and a note says how many are left out.
    """
    from penstock.ui.reading import read_queues
    from penstock.ui.unreadable import UnreadableRecords, record_name

    with run.connect() as store:
        state = store.database.run(lambda tx: read_queues(tx, MAX_LISTED), write=False)
    unreadable, partitions = UnreadableRecords(), state.partitions_by_queue()
    for error in state.unreadable:
        unreadable.add("a queue", error)
    rows = unreadable.build_rows(
        state.summaries,
        lambda outline: _outline(outline, partitions[outline.record.queue_id]),
        lambda outline: record_name("queue", outline.record.name),
    )
    note_missing(run.output, unreadable, state.omitted, "queues", "the first ones by name")
    run.output.table("queues", _SUMMARY_COLUMNS, rows)


def _outline(outline: QueueSummary, partitions: Sequence[PartitionRow]) -> Json:
    from penstock.queue.maintenance import Retention

    record = outline.record
    return {
        "name": record.name,
        "partitions": len(partitions),
        "rows": sum(row.next_index - row.first_index for row in partitions),
        "bytes": sum(row.bytes for row in partitions),
        "key": list(record.key),
        "retention": _retention_json(Retention.of(record.retention)),
        "consumers": outline.registrations,
        "created_at": moment_text(moment_of(record.created_at)),
    }


@command(group, "show", "penstock queue show orders")
def show(run: Run, name: QueueName) -> None:
    """Show a queue: its schema, partitions and consumers."""
    from penstock.cli.ddl import schema_ddl

    with run.connect() as store:
        info = store.queue(name).info()
    data = _details(info)
    pairs = [
        ("queue", info.name),
        ("created", _time_text(data["created_at"])),
        ("rows", count_text(info.rows)),
        ("size", size_text(info.bytes)),
        ("key", ", ".join(info.key) or "none: rows go to any partition"),
        ("keeps", _retention_text(data["retention"])),
        ("consumers", _names_text(info.consumers) or "none"),
        ("schema", "\n".join(schema_ddl(info.schema))),
    ]
    partitions = Section("", columns=_PARTITION_COLUMNS, rows=data["partitions"])
    run.output.describe(data, [Section("", pairs), partitions])


def _names_text(names: Sequence[str]) -> str:
    """Format names for users; only the first ones if there are many."""
    shown = [truncated(name, MAX_CELL_CHARACTERS) for name in names[:_MAX_NAMES]]
    omitted = len(names) - len(shown)
    return ", ".join([*shown, *([f"and {omitted:,} more"] if omitted else [])])


@command(
    group,
    "trim",
    "penstock queue trim orders",
    "penstock queue trim orders --partition 0 --before 120000",
)
def trim(
    run: Run,
    name: QueueName,
    before: Annotated[int | None, option("--before", "INDEX", "Drop the rows below this row index.")] = None,
    partition: PartitionOption = None,
) -> None:
    """Drop rows below --before, or those outside the retention.

    Rows that a vital consumer has not safely processed, or that the retention keeps, are never dropped.
    """
    with run.connect() as store:
        dropped = store.queue(name).trim(partition, before)
    text = f"dropped {counted(dropped, 'row')} of queue {name!r}"
    run.output.done(text, {"queue": name, "dropped_rows": dropped})


@command(
    group,
    "compact",
    "penstock queue compact orders",
    "penstock queue compact clicks --spark --master spark://host:7077",
)
def compact(
    run: Run,
    name: QueueName,
    in_spark: Annotated[
        bool, typer.Option("--spark", help="Compact in a Spark job, for a queue with many partitions.")
    ] = False,
    master: Annotated[
        str | None,
        option(
            "--master",
            "URL",
            "Spark's master; by default that of spark-submit, or all cores of this machine.",
        ),
    ] = None,
) -> None:
    """Compact the segments of small appends into larger ones."""
    if in_spark or master is not None:
        removed = _compact_in_spark(run, name, master)
    else:
        with run.connect() as store:
            removed = store.queue(name).compact()
    text = f"queue {name!r} has {counted(removed, 'segment')} fewer"
    run.output.done(text, {"queue": name, "removed_segments": removed})


def _compact_in_spark(run: Run, name: str, master: str | None) -> int:
    from penstock.cli.spark_programs import command_session
    from penstock.spark.compaction import compact as compact_in_spark

    # Before Spark starts, which takes seconds.
    with run.connect() as store:
        store.queue(name)
    with command_session(debug=run.debug, master=master) as spark:
        return compact_in_spark(spark, name, url=run.url)


@command(group, "grow", "penstock queue grow orders --by 4")
def grow(
    run: Run,
    name: QueueName,
    by: Annotated[int, option("--by", "NUMBER", "How many partitions to add.")] = 1,
) -> None:
    """Add partitions to a queue. Existing keys stay in their partitions; new keys spread over all."""
    with run.connect() as store:
        partitions = store.queue(name).add_partitions(by)
    text = f"queue {name!r} now has {counted(partitions, 'partition')}"
    run.output.done(text, {"queue": name, "partitions": partitions})


@command(group, "add-columns", "penstock queue add-columns orders 'discount decimal(10,2), note string'")
def add_columns(
    run: Run,
    name: QueueName,
    ddl: Annotated[str, argument("DDL", "The columns, in Spark's DDL; all nullable.")],
) -> None:
    """Add columns to a queue.

    They come last, and are NULL in existing rows. Producers and queries without them continue.

    Columns that the queue already has stay as they are, so the command is safe to repeat.
    """
    from penstock.arrow.schema import canonical_schema
    from penstock.cli.ddl import parse_ddl, schema_ddl

    new_columns = canonical_schema(parse_ddl(ddl))
    with run.connect() as store:
        queue = store.queue(name)
        before = len(queue.schema)
        columns = queue.add_columns(new_columns)
    added = columns.names[before:]
    text = f"queue {name!r} now has {counted(len(columns), 'column')}, {len(added) or 'none'} of them new"
    run.output.done(text, {"queue": name, "added": added, "ddl": ", ".join(schema_ddl(columns))})


@command(group, "widen-columns", "penstock queue widen-columns orders 'id bigint, amount decimal(18, 2)'")
def widen_columns(
    run: Run,
    name: QueueName,
    ddl: Annotated[str, argument("DDL", "Existing columns with their new types, in Spark's DDL.")],
) -> None:
    """Give columns wider types: a larger integer or float, or a decimal with more digits.

    Stored rows are read in the new type. Running queries continue until a value does not fit into the type
    that they know; started again, they have the new one. Repeating the command does no harm.
    """
    from penstock.arrow.schema import canonical_schema
    from penstock.cli.ddl import parse_ddl, schema_ddl

    new_types = canonical_schema(parse_ddl(ddl))
    with run.connect() as store:
        queue = store.queue(name)
        before = queue.schema
        columns = queue.widen_columns(new_types)
    widened = [field.name for field in columns if before.field(field.name).type != field.type]
    text = f"queue {name!r} has new types for {', '.join(widened) or 'none of its columns'}"
    run.output.done(text, {"queue": name, "widened": widened, "ddl": ", ".join(schema_ddl(columns))})


@command(
    group,
    "retention",
    "penstock queue retention orders --retention-age 30d",
    "penstock queue retention orders --keep-all",
)
def retention(
    run: Run,
    name: QueueName,
    retention_rows: KeepRows = None,
    retention_age: KeepAge = None,
    retention_bytes: KeepBytes = None,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep all rows.")] = False,
) -> None:
    """Set the retention of a queue; without an option, show it."""
    new_retention = make_retention(retention_rows, retention_age, retention_bytes)
    has_limit = any(bound is not None for bound in (retention_rows, retention_age, retention_bytes))
    if has_limit and keep_all:
        raise InvalidInputError("--keep-all keeps everything: leave out the other limits")
    with run.connect() as store:
        queue = store.queue(name)
        if has_limit or keep_all:
            queue.set_retention(new_retention)
        current = _retention_json(queue.info().retention)
    run.output.done(f"queue {name!r} keeps {_retention_text(current)}", {"queue": name, "retention": current})


@command(group, "drop", "penstock queue drop orders --yes")
def drop(
    run: Run,
    name: QueueName,
    yes: YesOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Drop it even if a vital consumer is registered on it.")
    ] = False,
) -> None:
    """Drop a queue, its rows and its consumers' offsets. Asks for confirmation."""
    with run.connect() as store:
        info = store.queue(name).info()
        run.confirm(f"Drop queue {name!r} with {counted(info.rows, 'row')} ({size_text(info.bytes)})?", yes)
        store.drop_queue(name, force=force)
    run.output.done(f"dropped queue {name!r}", {"queue": name, "dropped_rows": info.rows})
