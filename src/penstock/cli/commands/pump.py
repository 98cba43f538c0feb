"""``penstock pump``: changes of a PostgreSQL publication in queues, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands.shared import (
    MAX_LISTED,
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

group = typer.Typer(help="Copy changes from PostgreSQL into queues, without Spark.", no_args_is_help=True)


def _backfill_text(backfill: Json) -> str:
    expected, seconds_left = backfill["expected_rows"], backfill["seconds_left"]
    total = f" of about {expected:,}" if expected else ""
    remaining = "" if seconds_left is None else f", about {age_text(seconds_left)} left"
    return f"{backfill['table']}: {backfill['rows']:,}{total} rows{remaining}"


def _age_or_blank(seconds: float | None) -> str:
    return "" if seconds is None else age_text(seconds)


_COLUMNS = (
    Column("pump", "pump"),
    Column("state", "state"),
    Column("commit", "commit", right=True),
    Column("finalized_until", "all commits before", lambda moment: moment or "", right=True),
    Column("alive_seconds", "last heartbeat", _age_or_blank, right=True),
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
        argument("FEED", "postgresql://…?publication=NAME; add slot=NAME if the slot is not penstock_NAME."),
    ],
    queue: Annotated[
        str | None,
        option("--queue", "QUEUE", "One queue for all tables; by default, each table has a queue."),
    ] = None,
    prefix: Annotated[str, option("--prefix", "TEXT", "A prefix for the names of the queues.")] = "",
    schema_changes: Annotated[
        str,
        option(
            "--schema-changes",
            "POLICY",
            "When a table gets or loses columns or gets wider types, or the publication gets a table: refuse "
            "stops the pump; evolve changes the queue too, and reads the new table; ignore leaves out new "
            "columns and tables.",
        ),
    ] = "refuse",
    partitions: Annotated[
        int, option("--partitions", "N", "How many partitions the new queues have.", min=1, max=10_000)
    ] = 1,
    name: Annotated[
        str | None, option("--name", "NAME", "The pump's name in the store; by default that of the slot.")
    ] = None,
) -> None:
    """Copy the changes of a publication's tables into queues.

    It runs until Ctrl-C or SIGTERM; a second signal ends it at once, which loses nothing either. The first
    run creates the store, the queues and the slot, and copies the existing rows. You may start several
    processes with the same name: one of them works, and another takes over when it ends.
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

    "state" is running, stopped or silent (no heartbeat for 6 seconds). The queues have every commit up to
    "commit", and every one before the server's time in "all commits before", which is blank during a recovery
    and while a new table is backfilled. "backfills" has the tables that are being backfilled, with their
    progress. "recovery" is `requested` until the pump starts, then `reading` while it reads all rows again
    and looks for deleted ones.
    """
    from penstock.store.records import pumps
    from penstock.ui.unreadable import UnreadableRecords

    def read(tx: Transaction) -> tuple[int, list[PumpRecord]]:
        return tx.now(), pumps.list_pumps(tx)

    with run.connect() as store:
        now, all_pumps = store.database.run(read, write=False)
    unreadable = UnreadableRecords()
    rows = unreadable.build_rows(
        all_pumps[:MAX_LISTED], lambda pump: _row(pump, now), lambda pump: f"pump {pump.name!r}"
    )
    note_missing(run.output, unreadable, max(len(all_pumps) - MAX_LISTED, 0), "pumps", "the first ones")
    run.output.table("pumps", _COLUMNS, rows)


def _row(pump: PumpRecord, now: int) -> Json:
    from penstock.pump.backfill_records import backfills_of
    from penstock.pump.recovery_records import RecoveryRequest, recoveries_of

    alive = pump.is_alive(now)
    is_requested = RecoveryRequest.of(pump.name, pump.state) is not None
    recoveries, backfills = recoveries_of(pump.name, pump.state), backfills_of(pump.name, pump.state)
    return {
        "pump": pump.name,
        "state": "running" if alive else "silent" if pump.owner else "stopped",
        "commit": pump.position.version,
        "finalized_until": _finalized(
            pump, bool(recoveries) or any(not progress.again for progress in backfills.values())
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
        "recovery": "requested" if is_requested else "reading" if recoveries else None,
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
    """Read a table again, and append its rows as updates.

    A running pump begins within a few seconds, others when they are started. `penstock pump list` shows the
    progress.
    """
    from penstock.pump.backfill_records import request_backfill

    with run.connect() as store:
        is_requested = request_backfill(store, name, table)
    text = f"will backfill {table}" if is_requested else f"is already backfilling {table}"
    run.output.done(f"pump {name} {text}", {"pump": name, "table": table})


@command(group, "recover", "penstock pump recover penstock_orders --yes")
def recover(
    run: Run,
    name: Annotated[str, argument("PUMP", "The pump's name.")],
    force: Annotated[bool, typer.Option("--force", help="Recover even if the pump can resume.")] = False,
    server: Annotated[
        str | None,
        option(
            "--server",
            "ID",
            "The system identifier of the new server, if the pump is to read from another one.",
        ),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Recover a pump that cannot resume, with a new slot.

    Use it when the slot was lost, or the server was upgraded, restored or replaced. The queues are kept: they
    get all rows again as updates, and then deletes of rows that no longer exist. The command records a
    request, which the pump carries out when it next starts. A pump that can resume drops the request, unless
    --force was used.
    """
    from penstock.pump.recovery_records import request_recovery

    run.confirm(
        f"Pump {name!r} will drop its slot, read all rows of its tables again, and append deletes of rows "
        "that its source no longer has. Continue?",
        yes,
    )
    with run.connect() as store:
        request_recovery(store, name, force=force, server=server)
    suffix = "" if force else ", unless it can resume"
    run.output.done(f"pump {name} will recover when it runs{suffix}", {"pump": name, "force": force})


@command(group, "remove", "penstock pump remove penstock_orders --yes")
def remove_pump(
    run: Run, name: Annotated[str, argument("PUMP", "The pump's name.")], yes: YesOption = False
) -> None:
    """Remove a stopped pump from the store.

    Its queues and its slot stay: drop the slot, which retains WAL.
    """
    from penstock.store.records import pumps

    run.confirm(f"Delete the position of pump {name!r}? A new pump needs other queues.", yes)

    def remove(tx: Transaction) -> None:
        pump = pumps.find_pump(tx, name)
        if pump is None:
            raise PumpNotFoundError(f"there is no pump {name!r}: `penstock pump list` lists them", pump=name)
        if pump.is_alive(tx.now()):
            raise InvalidInputError(f"pump {name!r} is running: stop it first", pump=name)
        pumps.delete_pump(tx, name)

    with run.connect() as store:
        store.database.run(remove, idempotent=True)
    run.output.done(f"pump {name} is removed", {"pump": name})
