"""``penstock consumer``."""

from __future__ import annotations

import json
import re
import shlex
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.arguments import in_quotes
from penstock.cli.commands.queue import QueueName
from penstock.cli.commands.shared import (
    MAX_LISTED,
    Run,
    YesOption,
    argument,
    command,
    note_missing,
    option,
)
from penstock.cli.output import Column, Section
from penstock.cli.units import count_text, counted
from penstock.errors import InvalidPositionError
from penstock.json_text import parse_json_object

if TYPE_CHECKING:
    from penstock.json_text import Json
    from penstock.store.database import Row, Transaction

group = typer.Typer(help="Create, inspect and move consumers.", no_args_is_help=True)

ConsumerName = Annotated[str, argument("CONSUMER", "The consumer's name.")]
_POSITION_HELP = "earliest, latest, a time with its zone, or row indexes."
_MAX_OFFSETS = 100


@command(group, "create", "penstock consumer create billing")
def create(run: Run, name: ConsumerName) -> None:
    """Create a consumer, to register on queues."""
    with run.connect() as store:
        store.create_consumer(name)
    run.output.done(f"created consumer {name!r}", {"consumer": name})


@command(
    group,
    "register",
    "penstock consumer register billing orders --vital",
    "penstock consumer register billing orders --start 2024-01-31T00:00:00Z",
    """penstock consumer register billing orders --start '{"0": 5, "1": 7}'""",
)
def register(
    run: Run,
    consumer: ConsumerName,
    queue: QueueName,
    vital: Annotated[
        bool | None,
        typer.Option(
            "--vital/--no-vital",
            help="Whether rows are kept until this consumer has processed them. New ones are not vital.",
        ),
    ] = None,
    start: Annotated[str, option("--start", "POSITION", _POSITION_HELP)] = "earliest",
) -> None:
    """Register a consumer on a queue.

    If it is registered already, its offsets stay, and only --vital or --no-vital applies.
    """
    position = parse_position(start)
    with run.connect() as store:
        registered = store.consumer(consumer)
        registered.register(queue, vital=vital, start=position)
        offsets = registered.offsets(queue)
        is_vital = registered.registration(queue).vital
    kind = "vital consumer" if is_vital else "consumer"
    offsets_json = {str(partition): index for partition, index in offsets.items()}
    data = {"consumer": consumer, "queue": queue, "vital": is_vital, "offsets": offsets_json}
    run.output.done(
        f"{kind} {consumer!r} is registered on queue {queue!r}, at {_offsets_text(offsets)}", data
    )


def parse_position(text: str) -> str | datetime | dict[int, int]:
    """Parse a position for the API of consumers."""
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    if text.lstrip().startswith("{"):
        return _parse_indexes(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidPositionError(
            "a position is earliest, latest, a time such as 2024-01-31T12:00:00Z, or row indexes by "
            f"partition such as '{{\"0\": 5}}'; not {in_quotes(text)}",
            value=text,
        ) from None
    if time.tzinfo is None:
        zoned = time.isoformat()
        raise InvalidPositionError(
            f"{in_quotes(text)} has no time zone: write {zoned}Z or {zoned}+02:00",
            condition="INVALID_POSITION.NO_TIME_ZONE",
            value=text,
        )
    return time


def _parse_indexes(text: str) -> dict[int, int]:
    # Also accept Python's form, which errors of a query have.
    quoted = re.sub(r"([{,]\s*)(\d+)(\s*:)", r'\1"\2"\3', text)
    try:
        indexes = {int(partition): index for partition, index in parse_json_object(quoted).items()}
    except ValueError:
        indexes = {}
    if not indexes or any(type(index) is not int or index < 0 for index in indexes.values()):
        raise InvalidPositionError(
            f'row indexes by partition look like \'{{"0": 5, "1": 7}}\', not {in_quotes(text)}', value=text
        )
    return indexes


def _position_text(offsets: dict[int, int]) -> str:
    """Format offsets for --to and --start."""
    return json.dumps({str(partition): index for partition, index in offsets.items()})


def _offsets_text(offsets: dict[int, int]) -> str:
    """Format offsets for a message; only the first ones if there are many."""
    text = _position_text(dict(list(offsets.items())[:_MAX_OFFSETS]))
    missing = len(offsets) - _MAX_OFFSETS
    return f"{text} and {counted(missing, 'more partition')}: --json has all" if missing > 0 else text


@command(group, "unregister", "penstock consumer unregister billing orders")
def unregister(run: Run, consumer: ConsumerName, queue: QueueName, yes: YesOption = False) -> None:
    """Unregister a consumer from a queue. Its offsets are lost. Asks for confirmation."""
    with run.connect() as store:
        registered = store.consumer(consumer)
        registered.registration(queue)
        run.confirm(f"Forget the offsets of consumer {consumer!r} on queue {queue!r}?", yes)
        registered.unregister(queue)
    text = f"consumer {consumer!r} is no longer registered on queue {queue!r}"
    run.output.done(text, {"consumer": consumer, "queue": queue})


def _yes_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


_LIST_COLUMNS = (
    Column("consumer", "consumer"),
    Column("queue", "queue"),
    Column("vital", "vital", _yes_no),
    Column("live", "query runs", _yes_no),
    Column("app_id", "app"),
)


@command(group, "list", "penstock consumer list --json")
def list_consumers(run: Run) -> None:
    """List the consumers and the queues that they are registered on.

    "query runs" says whether a query that owns the consumer is running. "app" is the id of the query that was
    the last to commit with the consumer, if that query's sink is in this store: the query id that `penstock
    checkpoint show` prints. The list has the first 5,000 rows by name, and a note says how many are left out.
    """
    from penstock.store.records.consumers import owner_lock_name, summarize_registrations
    from penstock.ui.unreadable import UnreadableRecords

    with run.connect() as store:

        def read(tx: Transaction) -> tuple[list[Row], list[str], set[str]]:
            rows = summarize_registrations(tx, MAX_LISTED)
            locks = [owner_lock_name(store.uuid, row.consumer, row.queue_id) for row in rows]
            return rows, locks, tx.owners_alive(locks)

        listed, locks, alive = store.database.run(read, write=False)
    rows: list[Json] = [
        {
            "consumer": row.consumer,
            "queue": row.queue,
            "vital": None if row.queue is None else bool(row.vital),
            "live": None if row.queue is None else lock in alive,
            "app_id": row.app_id,
        }
        for row, lock in zip(listed, locks, strict=True)
    ]
    note_missing(
        run.output, UnreadableRecords(), omitted_registrations(listed), "consumers", "the first ones by name"
    )
    run.output.table("consumers", _LIST_COLUMNS, rows)


def omitted_registrations(rows: list[Row]) -> int:
    """Return how many registrations an outline of the first ones has left out."""
    return int(rows[0].total) - len(rows) if rows else 0


_SEEK_COLUMNS = (
    Column("partition", "partition", count_text, right=True),
    Column("from", "from", count_text, right=True),
    Column("to", "to", count_text, right=True),
    Column("rows", "rows", lambda rows: f"{rows:+,}" if rows else "0", right=True),
)


@command(
    group,
    "seek",
    "penstock consumer seek billing orders --to earliest --dry-run",
    "penstock consumer seek billing orders --to 2024-01-31T00:00:00Z",
    """penstock consumer seek billing orders --to '{"0": 5}'""",
)
def seek(
    run: Run,
    consumer: ConsumerName,
    queue: QueueName,
    to: Annotated[str, option("--to", "POSITION", _POSITION_HELP)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show where the consumer would go.")
    ] = False,
) -> None:
    """Move a consumer to another position.

    With row indexes, the other partitions stay where they are. Refused while a running query uses the
    consumer. Afterwards, its queries need new checkpoints.
    """
    position = parse_position(to)
    with run.connect() as store:
        seeking = store.consumer(consumer)
        before = seeking.offsets(queue)
        after = seeking.seek(queue, to=position, dry_run=dry_run)
    moves = [
        {
            "partition": partition,
            "from": before.get(partition, 0),
            "to": index,
            "rows": index - before.get(partition, 0),
        }
        for partition, index in after.items()
    ]
    title = f"consumer {consumer!r} {'would move' if dry_run else 'moved'} on queue {queue!r}"
    data = {"consumer": consumer, "queue": queue, "dry_run": dry_run, "partitions": moves}
    undo = [] if dry_run or before == after else [("to undo", _seek_command(consumer, queue, before))]
    run.output.describe(data, [Section(title, undo, _SEEK_COLUMNS, moves)])


def _seek_command(consumer: str, queue: str, offsets: dict[int, int]) -> str:
    words = ["penstock", "consumer", "seek", consumer, queue, "--to", _position_text(offsets)]
    return shlex.join(words)


@command(group, "drop", "penstock consumer drop billing --yes")
def drop(run: Run, name: ConsumerName, yes: YesOption = False) -> None:
    """Drop a consumer with all its offsets. Asks for confirmation."""
    with run.connect() as store:
        queues = store.consumer(name).queues()
        run.confirm(f"Drop consumer {name!r} with its offsets on {counted(len(queues), 'queue')}?", yes)
        store.drop_consumer(name)
    run.output.done(f"dropped consumer {name!r}", {"consumer": name, "queues": queues})
