"""``penstock pump``: changes of a PostgreSQL publication in queues, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands.shared import (
    MOST_LISTED,
    Run,
    YesOption,
    argument,
    command,
    note_missing,
    option,
    until_signal,
)
from penstock.cli.output import Column
from penstock.cli.units import age_text
from penstock.errors import InvalidInputError, PumpNotFoundError

if TYPE_CHECKING:
    from penstock.json_text import Json
    from penstock.store.database import Transaction
    from penstock.store.records.pumps import PumpRecord

group = typer.Typer(
    help="Bring changes of PostgreSQL tables into queues, without Spark.", no_args_is_help=True
)


def _backfill_text(backfill: Json) -> str:
    expected, left = backfill["expected_rows"], backfill["seconds_left"]
    about = f" of about {expected:,}" if expected else ""
    ends = "" if left is None else f", about {age_text(left)} left"
    return f"{backfill['table']}: {backfill['rows']:,}{about} rows{ends}"


def _age_or_blank(seconds: float | None) -> str:
    return "" if seconds is None else age_text(seconds)


_COLUMNS = (
    Column("pump", "pump"),
    Column("state", "state"),
    Column("commit", "commit", right=True),
    Column("finalized_until", "all commits before", lambda moment: moment or "", right=True),
    Column("alive_seconds", "last sign of life", _age_or_blank, right=True),
    Column("feed", "feed"),
    Column("queues", "queues", lambda queues: ", ".join(queues)),
    Column("backfills", "backfills", lambda backfills: ", ".join(map(_backfill_text, backfills))),
    Column("recovery", "recovery", lambda recovery: recovery or ""),
)


@command(
    group,
    "run",
    "penstock pump run 'postgresql://app@db/shop?publication=orders'",
    "penstock pump run 'postgresql://app@db/shop?publication=orders' --prefix shop. --partitions 4",
)
def run_pump(
    run: Run,
    feed: Annotated[
        str,
        argument(
            "FEED", "postgresql://…?publication=NAME, and slot=NAME if it is not penstock_ and that name."
        ),
    ],
    queue: Annotated[
        str | None,
        option("--queue", "QUEUE", "One queue for all tables; by default, each table has a queue."),
    ] = None,
    prefix: Annotated[str, option("--prefix", "TEXT", "What the names of the queues begin with.")] = "",
    schema_changes: Annotated[
        str,
        option(
            "--schema-changes",
            "POLICY",
            "refuse tables that get or lose columns, and new tables; evolve: add new columns to the queue, "
            "leave those that are gone empty, and read new tables too; ignore: leave out what is new.",
        ),
    ] = "refuse",
    partitions: Annotated[
        int, option("--partitions", "N", "Partitions of the queues that are created.", min=1, max=10_000)
    ] = 1,
    name: Annotated[
        str | None, option("--name", "NAME", "The pump's name in the store; by default that of the slot.")
    ] = None,
) -> None:
    """Append the changes of the tables of a publication to queues, commit by commit, until Ctrl-C or SIGTERM.

    The first run creates the store, the queues and the slot, and copies the rows that are there. Several
    processes may be started with the same name: one of them works, and another takes over when it ends. A
    second signal ends it at once, which loses nothing either.
    """
    from penstock.pump.pump import Pump

    pump = Pump(
        feed,
        run.url,
        queue=queue,
        prefix=prefix,
        schema_changes=schema_changes,
        partitions=partitions,
        name=name,
    )

    with until_signal(pump.stop):
        run.output.note(f"pump {pump.name} starts")
        pump.run()
    run.output.note(f"pump {pump.name} has stopped")


@command(group, "list", "penstock pump list", "penstock pump list --json")
def list_pumps(run: Run) -> None:
    """List the pumps of a store.

    "state" is running, stopped, or silent: its process has given no sign of life for 6 seconds. Every commit
    up to "commit" is in the queues, and so is every one before the server's time in "all commits before",
    which is blank during a recovery and while the rows of a new table are read.
    "backfills" has the tables whose rows are being read, and how many of
    them are in the queue. "recovery" is `asked for` until the pump starts, or `reading` while rows are
    read again and deleted ones are looked for.
    """
    from penstock.store.records import pumps
    from penstock.ui.unreadable import Unreadable

    def read(tx: Transaction) -> tuple[int, list[PumpRecord]]:
        return tx.now(), pumps.list_pumps(tx)

    with run.connect() as store:
        now, found = store.database.run(read, write=False)
    unreadable = Unreadable()
    rows = unreadable.each(
        found[:MOST_LISTED], lambda pump: _row(pump, now), lambda pump: f"pump {pump.name!r}"
    )
    note_missing(run.output, unreadable, max(len(found) - MOST_LISTED, 0), "pumps", "the first ones")
    run.output.table("pumps", _COLUMNS, rows)


def _row(pump: PumpRecord, now: int) -> Json:
    from penstock.pump.backfill_records import backfills_of
    from penstock.pump.recovery_records import RecoveryRequest, recoveries_of

    alive = pump.is_alive(now)
    is_asked = RecoveryRequest.of(pump.name, pump.state) is not None
    recoveries, backfills = recoveries_of(pump.name, pump.state), backfills_of(pump.name, pump.state)
    return {
        "pump": pump.name,
        "state": "running" if alive else "silent" if pump.owner else "stopped",
        "commit": pump.position.version,
        "finalized_until": _finalized(
            pump, bool(recoveries) or any(not each.again for each in backfills.values())
        ),
        "alive_seconds": max(now - pump.alive_at, 0) / 1e6 if pump.owner else None,
        "feed": pump.state.get("feed"),
        "queues": sorted(pump.state.get("queues", {}).values()),
        "backfills": [
            {
                "table": table,
                "rows": backfill.rows,
                "expected_rows": backfill.expected or None,
                "seconds_left": backfill.seconds_left(now),
            }
            for table, backfill in sorted(backfills.items())
        ],
        "recovery": "asked for" if is_asked else "reading" if recoveries else None,
        "version_offset": pump.state.get("offset", 0),
    }


def _finalized(pump: PumpRecord, lacks_rows: bool) -> str | None:
    """Return the time before which all commits are in the queues, unless some lack rows from before."""
    from penstock.instants import moment_of, moment_text

    micros = pump.position.timestamp
    return None if lacks_rows or not micros else moment_text(moment_of(micros), "milliseconds")


@command(group, "backfill", "penstock pump backfill penstock_orders public.orders")
def backfill(
    run: Run,
    name: Annotated[str, argument("PUMP", "The pump's name.")],
    table: Annotated[str, argument("TABLE", "The table, with its schema.")],
) -> None:
    """Have a pump read all rows of one of its tables again, and append them as updates.

    The pump begins within a few seconds, or when it is started. `penstock pump list` shows how far it is.
    """
    from penstock.pump.backfill_records import ask_for_backfill

    with run.connect() as store:
        is_asked = ask_for_backfill(store, name, table)
    what = "will read all rows of" if is_asked else "has not read all rows yet of"
    run.output.done(f"pump {name} {what} {table}", {"pump": name, "table": table})


@command(group, "recover", "penstock pump recover penstock_orders --yes")
def recover(
    run: Run,
    name: Annotated[str, argument("PUMP", "The pump's name.")],
    force: Annotated[bool, typer.Option("--force", help="Recover even if the pump can resume.")] = False,
    server: Annotated[
        str | None,
        option("--server", "ID", "The system identifier of the server that has taken the other one's place."),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Have a pump that cannot resume create a new slot, and read all rows of its tables again.

    For a slot that is lost, and for a server that was upgraded, restored or replaced. The queues stay: they
    get the rows as updates, and then deletes of the rows that are gone. The command only leaves a request:
    the pump recovers when it starts next. A pump that can resume drops the request, unless it was forced.
    """
    from penstock.pump.recovery_records import ask_for_recovery

    run.confirm(
        f"Pump {name!r} will drop its slot, read all rows of its tables again, and delete in its queues "
        "those that its source does not have. Continue?",
        yes,
    )
    with run.connect() as store:
        ask_for_recovery(store, name, force=force, server=server)
    what = "" if force else ", unless it can resume"
    run.output.done(f"pump {name} will recover when it runs{what}", {"pump": name, "force": force})


@command(group, "remove", "penstock pump remove penstock_orders --yes")
def remove_pump(
    run: Run, name: Annotated[str, argument("PUMP", "The pump's name.")], yes: YesOption = False
) -> None:
    """Forget a pump that does not run. Its queues and its slot stay. Drop the slot, which retains WAL."""
    from penstock.store.records import pumps

    run.confirm(f"Forget how far pump {name!r} is? A new one needs other queues.", yes)

    def remove(tx: Transaction) -> None:
        found = pumps.find_pump(tx, name)
        if found is None:
            raise PumpNotFoundError(f"there is no pump {name!r}: `penstock pump list` lists them", pump=name)
        if found.is_alive(tx.now()):
            raise InvalidInputError(f"pump {name!r} runs: stop it first", pump=name)
        pumps.delete_pump(tx, name)

    with run.connect() as store:
        store.database.run(remove, idempotent=True)
    run.output.done(f"pump {name} is removed", {"pump": name})
