"""Where a consumer starts or goes, in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.arguments import in_quotes
from penstock.cli.commands.queue import QueueName
from penstock.cli.commands.shared import Run, YesOption, command
from penstock.cli.output.protocol import Column, Section
from penstock.cli.units import age_text, count_text, counted, size_text
from penstock.errors import InvalidPosition, QueueNotFound

if TYPE_CHECKING:
    from penstock.queue.consumer import Lag
    from penstock.queue.store import Store
    from penstock.store.database import Transaction
    from penstock.store.records.consumers import Registration


FORMS = (
    "earliest, latest, a time such as 2024-01-31T12:00:00Z, or row indexes by partition such as '{\"0\": 5}'"
)


def parse_position(text: str) -> str | datetime | dict[int, int]:
    """Return a position as the consumers' API takes it.

    Raises
    ------
    InvalidPosition
        It is none of the four forms, or a time without a zone.
    """
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    if text.lstrip().startswith("{"):
        return _indexes(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidPosition(f"a position is {FORMS}; not {in_quotes(text)}", value=text) from None
    if time.tzinfo is None:
        zoned = time.isoformat()
        raise InvalidPosition(
            f"{in_quotes(text)} has no time zone: write {zoned}Z or {zoned}+02:00", value=text
        )
    return time


def _indexes(text: str) -> dict[int, int]:
    try:
        found: Any = json.loads(text)
        indexes = {int(partition): index for partition, index in found.items()}
    except (ValueError, RecursionError):
        indexes = {-1: -1}
    if not indexes or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in indexes.values()):
        raise InvalidPosition(
            f'row indexes by partition look like \'{{"0": 5, "1": 7}}\', not {in_quotes(text)}', value=text
        )
    return indexes


# ---- consumer_commands: ``penstock consumer``.

group = typer.Typer(
    help="Make consumers, see how far behind they are, move them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ConsumerName = Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.")]


@command(group, "create", examples=["penstock consumer create billing"])
def create(run: Run, name: ConsumerName) -> None:
    """Create a consumer; register it on queues next."""
    with run.connect() as store:
        store.create_consumer(name)
    run.output.done(f"created consumer {name!r}", {"consumer": name})


@command(
    group,
    "register",
    examples=[
        "penstock consumer register billing orders --vital",
        "penstock consumer register billing orders --start 2024-01-31T00:00:00Z",
        """penstock consumer register billing orders --start '{"0": 5, "1": 7}'""",
    ],
)
def register(
    run: Run,
    consumer: ConsumerName,
    queue: QueueName,
    vital: Annotated[
        bool | None,
        typer.Option(
            "--vital/--no-vital",
            show_default=False,
            help="Trimming waits for this consumer, or not (the default of a new one).",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--start", metavar="POSITION", help="earliest, latest, a time with its zone, or row indexes."
        ),
    ] = "earliest",
) -> None:
    """Register a consumer on a queue. One that is registered keeps its offsets; only --vital or --no-vital changes it."""
    position = parse_position(start)
    with run.connect() as store:
        found = store.consumer(consumer)
        found.register(queue, vital=vital, start=position)
        offsets = found.offsets(queue)
        is_vital = found.registration(queue).vital
    kind = "vital consumer" if is_vital else "consumer"
    data = {"consumer": consumer, "queue": queue, "vital": is_vital, "offsets": _by_text(offsets)}
    run.output.done(f"{kind} {consumer!r} is registered on queue {queue!r}, at {_shown(offsets)}", data)


def _by_text(offsets: dict[int, int]) -> dict[str, int]:
    return {str(partition): index for partition, index in offsets.items()}


def _shown(offsets: dict[int, int]) -> str:
    text = ", ".join(f"{partition}: {index}" for partition, index in list(offsets.items())[:8])
    return "{" + text + (", …}" if len(offsets) > 8 else "}")


@command(group, "unregister", examples=["penstock consumer unregister billing orders"])
def unregister(run: Run, consumer: ConsumerName, queue: QueueName, yes: YesOption = False) -> None:
    """Forget a consumer's offsets on a queue. Asks first."""
    with run.connect() as store:
        found = store.consumer(consumer)
        found.registration(queue)
        run.confirm(f"Forget the offsets of consumer {consumer!r} on queue {queue!r}?", yes)
        found.unregister(queue)
    run.output.done(
        f"consumer {consumer!r} is not registered on queue {queue!r} any more",
        {"consumer": consumer, "queue": queue},
    )


def _yes_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


_LIST_COLUMNS = (
    Column("consumer", "consumer"),
    Column("queue", "queue"),
    Column("vital", "vital", _yes_no),
    Column("live", "query runs", _yes_no),
    Column("app_id", "app"),
)


@command(group, "list", examples=["penstock consumer list --json"])
def list_consumers(run: Run) -> None:
    """List the consumers and the queues that they are registered on."""
    with run.connect() as store:
        registrations = store.registrations()
        live = _live(store, registrations)
        rows = [_registration(each, alive) for each, alive in zip(registrations, live, strict=True)]
        registered = {each.consumer for each in registrations}
        nothing = {"queue": None, "vital": None, "live": None, "app_id": None}
        rows += [{"consumer": name, **nothing} for name in store.consumers() if name not in registered]
    rows.sort(key=lambda row: (row["consumer"], row["queue"] or ""))
    run.output.table("consumers", _LIST_COLUMNS, rows)


def _registration(registration: Registration, live: bool) -> dict[str, Any]:
    return {
        "consumer": registration.consumer,
        "queue": registration.queue,
        "vital": registration.vital,
        "live": live,
        "app_id": registration.app_id,
    }


def _live(store: Store, registrations: Sequence[Registration]) -> list[bool]:
    """Whether a running query reads through each of them."""

    def work(tx: Transaction) -> list[bool]:
        return [tx.owner_alive(registration.lock_name(store.uuid)) for registration in registrations]

    return store.database.run(work, write=False)


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


@command(group, "lag", examples=["penstock consumer lag", "penstock consumer lag billing orders --json"])
def lag(
    run: Run,
    consumer: Annotated[
        str | None, typer.Argument(metavar="[CONSUMER]", show_default=False, help="One consumer alone.")
    ] = None,
    queue: Annotated[
        str | None, typer.Argument(metavar="[QUEUE]", show_default=False, help="One queue alone.")
    ] = None,
) -> None:
    """Show how far consumers are behind: rows, their size, and the age of the oldest of them."""
    with run.connect() as store:
        if consumer is not None and queue is not None:
            found = _lag(consumer, queue, store.consumer(consumer).lag(queue))
            run.output.describe({"lags": [found]}, _lag_sections(found))
            return
        names = store.consumers() if consumer is None else [store.consumer(consumer).name]
        lags = [found for name in names for found in _lags(store, name)]
    run.output.table("lags", _LAG_COLUMNS, lags)


def _lags(store: Store, name: str) -> list[dict[str, Any]]:
    consumer, found = store.consumer(name), []
    for queue in consumer.queues():
        try:
            found.append(_lag(name, queue, consumer.lag(queue)))
        except QueueNotFound:
            continue
    return found


def _lag(consumer: str, queue: str, lag: Lag) -> dict[str, Any]:
    return {
        "consumer": consumer,
        "queue": queue,
        "rows": lag.rows,
        "bytes": lag.bytes,
        "seconds": round(lag.seconds, 3),
        "partitions": [
            {
                "partition": each.partition,
                "offset": each.offset,
                "next_index": each.next_index,
                "rows": each.rows,
                "bytes": each.bytes,
                "seconds": round(each.seconds, 3),
            }
            for each in lag.partitions
        ],
    }


def _lag_sections(found: dict[str, Any]) -> list[Section]:
    text = f"{counted(found['rows'], 'row')}, {size_text(found['bytes'])}, the oldest {age_text(found['seconds'])} old"
    pairs = [("consumer", found["consumer"]), ("queue", found["queue"]), ("behind", text)]
    return [Section("", pairs), Section("", columns=_PARTITION_LAG_COLUMNS, rows=found["partitions"])]


_SEEK_COLUMNS = (
    Column("partition", "partition", count_text, right=True),
    Column("from", "from", count_text, right=True),
    Column("to", "to", count_text, right=True),
    Column("rows", "rows", lambda rows: f"{rows:+,}" if rows else "0", right=True),
)


@command(
    group,
    "seek",
    examples=[
        "penstock consumer seek billing orders --to earliest --dry-run",
        "penstock consumer seek billing orders --to 2024-01-31T00:00:00Z",
        """penstock consumer seek billing orders --to '{"0": 5}'""",
    ],
)
def seek(
    run: Run,
    consumer: ConsumerName,
    queue: QueueName,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="POSITION", help="earliest, latest, a time with its zone, or row indexes."
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", show_default=False, help="Only show where it would go.")
    ] = False,
) -> None:
    """Move a consumer to another position; with row indexes, the other partitions stay where they are.

    Refused while a running query reads through the consumer. Checkpoints of queries from before are turned away afterwards.
    """
    position = parse_position(to)
    with run.connect() as store:
        found = store.consumer(consumer)
        before = found.offsets(queue)
        after = found.seek(queue, to=position, dry_run=dry_run)
    moves = [
        {
            "partition": partition,
            "from": before.get(partition, 0),
            "to": index,
            "rows": index - before.get(partition, 0),
        }
        for partition, index in after.items()
    ]
    title = f"consumer {consumer!r} {'would go' if dry_run else 'went'} on queue {queue!r}"
    data = {"consumer": consumer, "queue": queue, "dry_run": dry_run, "partitions": moves}
    run.output.describe(data, [Section(title, columns=_SEEK_COLUMNS, rows=moves)])


@command(group, "drop", examples=["penstock consumer drop billing --yes"])
def drop(run: Run, name: ConsumerName, yes: YesOption = False) -> None:
    """Drop a consumer with all its offsets. Asks first."""
    with run.connect() as store:
        queues = store.consumer(name).queues()
        run.confirm(f"Drop consumer {name!r} with its offsets on {counted(len(queues), 'queue')}?", yes)
        store.drop_consumer(name)
    run.output.done(f"dropped consumer {name!r}", {"consumer": name, "queues": queues})
