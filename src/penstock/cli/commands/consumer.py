"""``penstock consumer``."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.arguments import in_quotes
from penstock.cli.commands.queue import QueueName
from penstock.cli.commands.shared import (
    MOST_LISTED,
    Run,
    YesOption,
    argument,
    command,
    note_missing,
    option,
)
from penstock.cli.output import Column, Section, values_of
from penstock.cli.units import age_text, count_text, counted, size_text
from penstock.errors import (
    ConsumerNotFoundError,
    InvalidNameError,
    InvalidPositionError,
    NotRegisteredError,
    QueueNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from penstock.json_text import parse_json_object

if TYPE_CHECKING:
    from penstock.json_text import Json
    from penstock.queue.consumer import Lag
    from penstock.queue.store import Store
    from penstock.store.database import Row, Transaction
    from penstock.ui.unreadable import Unreadable

group = typer.Typer(help="Create, inspect and move consumers.", no_args_is_help=True)

ConsumerName = Annotated[str, argument("CONSUMER", "The consumer's name.")]
_POSITION_HELP = "earliest, latest, a time with its zone, or row indexes."


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
    """Return a position as the consumers' API takes it."""
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
    try:
        indexes = {int(partition): index for partition, index in parse_json_object(text).items()}
    except ValueError:
        indexes = {}
    if not indexes or any(type(index) is not int or index < 0 for index in indexes.values()):
        raise InvalidPositionError(
            f'row indexes by partition look like \'{{"0": 5, "1": 7}}\', not {in_quotes(text)}', value=text
        )
    return indexes


def _offsets_text(offsets: dict[int, int]) -> str:
    text = ", ".join(f"{partition}: {index}" for partition, index in list(offsets.items())[:8])
    return "{" + text + (", …}" if len(offsets) > 8 else "}")


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
    from penstock.store.records.consumers import outline_registrations, owner_name
    from penstock.ui.unreadable import Unreadable

    with run.connect() as store:

        def read(tx: Transaction) -> tuple[list[Row], list[str], set[str]]:
            rows = outline_registrations(tx, MOST_LISTED)
            locks = [owner_name(store.uuid, row.consumer, row.queue_id) for row in rows]
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
    note_missing(run.output, Unreadable(), _left_out(listed), "consumers", "the first ones by name")
    run.output.table("consumers", _LIST_COLUMNS, rows)


def _left_out(rows: list[Row]) -> int:
    return int(rows[0].total) - len(rows) if rows else 0


_LAG_COLUMNS = (
    Column("consumer", "consumer"),
    Column("queue", "queue"),
    Column("rows", "rows", count_text, right=True),
    Column("bytes", "size", size_text, right=True),
    Column("seconds", "oldest", age_text, right=True),
)
_PARTITION_LAG_COLUMNS = (
    Column("partition", "partition", count_text, right=True),
    Column("offset", "offset", count_text, right=True),
    Column("next_index", "next", count_text, right=True),
    *_LAG_COLUMNS[2:],
)


@command(group, "lag", "penstock consumer lag", "penstock consumer lag billing orders --json")
def lag(
    run: Run,
    consumer: Annotated[str | None, argument("CONSUMER", "Only this consumer.")] = None,
    queue: Annotated[str | None, argument("QUEUE", "Only this queue.")] = None,
) -> None:
    """Show the number, size and age of the unprocessed rows.

    "oldest" is the age of the oldest of them. With a consumer and a queue, each partition has a row: "offset"
    is the index of the first row that the consumer has not processed, and "next" the index that the next row
    to be appended will get.

    Without a consumer the list has the first 5,000 rows by name, and a note says how many are left out.
    """
    from penstock.store.records.consumers import outline_registrations
    from penstock.ui.unreadable import Unreadable

    unreadable, left_out = Unreadable(), 0
    with run.connect() as store:
        if consumer is not None and queue is not None:
            data = _lag_data(consumer, queue, store.consumer(consumer).lag(queue))
            run.output.describe({"lags": [data]}, _lag_sections(data))
            return
        if consumer is not None:
            lags = _lags(store, store.consumer(consumer).name, unreadable)
        else:
            listed = store.database.run(lambda tx: outline_registrations(tx, MOST_LISTED), write=False)
            lags, more = _all_lags(store, listed, unreadable)
            left_out = _left_out(listed) + more
    note_missing(run.output, unreadable, left_out, "consumers", "the first ones by name")
    run.output.table("lags", _LAG_COLUMNS, lags)


def _all_lags(store: Store, listed: list[Row], unreadable: Unreadable) -> tuple[list[Json], int]:
    """Return the lags of registrations, and how many of them were left out since they have too many
    partitions in all.
    """
    from penstock.ui.reading import MOST_PARTITIONS
    from penstock.ui.unreadable import named

    lags: list[Json] = []
    partitions = left_out = 0
    for row in listed:
        if row.queue is None:
            continue
        if partitions >= MOST_PARTITIONS:
            left_out += 1
            continue
        try:
            data = _lag_data(row.consumer, row.queue, store.consumer(row.consumer).lag(row.queue))
        except (QueueNotFoundError, ConsumerNotFoundError, NotRegisteredError):
            # Dropped since it was listed.
            continue
        except StoreUnavailableError:
            raise
        except (InvalidNameError, StoreError) as error:
            # Others may have written a name that no consumer can have, and any offset.
            unreadable.add(named("consumer", row.consumer), error)
        else:
            lags.append(data)
            partitions += len(data["partitions"])
    return lags, left_out


def _lags(store: Store, name: str, unreadable: Unreadable) -> list[Json]:
    from penstock.ui.unreadable import named

    consumer, lags = store.consumer(name), []
    for queue in consumer.queues():
        try:
            lags.append(_lag_data(name, queue, consumer.lag(queue)))
        except QueueNotFoundError:
            # Dropped since it was listed.
            continue
        except StoreUnavailableError:
            raise
        except StoreError as error:
            unreadable.add(named("queue", queue), error)
    return lags


def _lag_data(consumer: str, queue: str, lag: Lag) -> Json:
    return {
        "consumer": consumer,
        "queue": queue,
        "rows": lag.rows,
        "bytes": lag.bytes,
        "seconds": round(lag.seconds, 3),
        "partitions": [
            {**values_of(part, _PARTITION_LAG_COLUMNS), "seconds": round(part.seconds, 3)}
            for part in lag.partitions
        ],
    }


def _lag_sections(lag: Json) -> list[Section]:
    behind = "nothing: it has processed all rows"
    if lag["rows"]:
        size, age = size_text(lag["bytes"]), age_text(lag["seconds"])
        behind = f"{counted(lag['rows'], 'row')}, {size}, the oldest {age} old"
    pairs = [("consumer", lag["consumer"]), ("queue", lag["queue"]), ("behind", behind)]
    return [Section("", pairs), Section("", columns=_PARTITION_LAG_COLUMNS, rows=lag["partitions"])]


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
        moved = store.consumer(consumer)
        before = moved.offsets(queue)
        after = moved.seek(queue, to=position, dry_run=dry_run)
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
    run.output.describe(data, [Section(title, columns=_SEEK_COLUMNS, rows=moves)])


@command(group, "drop", "penstock consumer drop billing --yes")
def drop(run: Run, name: ConsumerName, yes: YesOption = False) -> None:
    """Drop a consumer with all its offsets. Asks for confirmation."""
    with run.connect() as store:
        queues = store.consumer(name).queues()
        run.confirm(f"Drop consumer {name!r} with its offsets on {counted(len(queues), 'queue')}?", yes)
        store.drop_consumer(name)
    run.output.done(f"dropped consumer {name!r}", {"consumer": name, "queues": queues})
