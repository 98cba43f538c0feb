"""Planning which tables a pump reads and into which queues: for new pumps, and for newly published tables."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace

from penstock.arguments import in_quotes
from penstock.errors import (
    CheckpointMismatchError,
    FeedUnavailableError,
    InvalidInputError,
    condition_of,
)
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.catalog import Table, Tables, check_names, published, require_no_store
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.key_order import KeyOrder
from penstock.feeds.postgres.publication import PublicationState, state_of
from penstock.feeds.postgres.table_chunks import require_backfills
from penstock.feeds.postgres.table_readers import ALL, EVOLVE, tables_by_queue
from penstock.instants import now_micros
from penstock.pump.backfill_records import TableBackfill
from penstock.pump.plan import PumpPlan
from penstock.pump.targets import QueueSettings, create_queues, queue_names
from penstock.queue.store import Store
from penstock.store.database import Transaction
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpPosition, PumpRecord

log = logging.getLogger("penstock.pump")


@dataclass(frozen=True)
class PumpSettings:
    """Settings of a pump: its source, and where it appends."""

    name: str
    feed: PostgresFeed
    url: str
    """The URL of the store."""
    together: str | None
    """The queue for all tables; None if each has its own."""
    prefix: str
    schema_changes: str
    """One of ``table_readers.CHANGES``."""
    queues: QueueSettings


@dataclass
class Planner:
    """Planner of a pump, for the process that owns the pump."""

    settings: PumpSettings
    store: Store
    owner: str
    feed: OpenPostgresFeed
    skipped: dict[int, str] = field(default_factory=dict)
    """New tables that cannot be backfilled: the version stamp of each definition by object id."""

    def plan(self) -> tuple[PumpPlan, PumpPosition]:
        """Return the plan and the position of the pump; create queues that do not exist."""
        record = self.store.database.run(
            lambda tx: pumps.require_owned(tx, self.settings.name, self.owner), idempotent=True
        )
        if not record.state:
            return self._new_plan(record)
        plan = self._stored_plan(record)
        if not record.position.part_rows:
            # In a partly appended transaction, the position counts rows of the tables that were read so far.
            plan = self._with_new_tables(plan)
        return plan, record.position

    def _stored_plan(self, record: PumpRecord) -> PumpPlan:
        plan, identity = PumpPlan.from_json(record.name, record.state), self.feed.identity()
        require_same_source(plan, self.settings, identity)
        if plan.feed != identity:
            raise other_server(plan, self.settings, identity)
        return plan

    def _new_plan(self, record: PumpRecord) -> tuple[PumpPlan, PumpPosition]:
        """Create the slot and the queues, and then store the plan."""
        settings, feed = self.settings, self.feed
        identity = feed.describe().identity
        names = self._queue_names(feed.known_tables())
        position = PumpPosition(feed.prepare(), 0)
        tables, publication = feed.known_tables(), PublicationState.from_json(feed.stream_start())
        self._create_queues(names, tables)
        plan = PumpPlan(identity, settings.together, settings.prefix, names, tables, publication, {})
        state = json.dumps(plan.to_json())

        def store_plan(tx: Transaction) -> None:
            pumps.move_pump(tx, record.name, self.owner, record.position, position)
            pumps.set_pump_state(tx, record.name, self.owner, state)

        self.store.database.run(store_plan, idempotent=True)
        return plan, position

    def _with_new_tables(self, plan: PumpPlan) -> PumpPlan:
        """Add tables that are new in the publication, with a backfill of each."""
        settings, server = self.settings, self.feed.server
        if settings.schema_changes != EVOLVE or plan.together is not None or plan.tables.chosen:
            return plan
        tables_before = plan.tables
        # Read the state first, so that later changes are found by the next comparison.
        current = state_of(server, settings.feed.publication, tables_before)
        tables, domains = published(server, settings.feed.publication)
        new = [
            table
            for table in tables
            if table.relation.oid not in tables_before.by_oid
            and table.name not in tables_before.by_name
            and current.names.get(table.relation.oid) == table.name
        ]
        require_no_store(server, settings.feed.publication, new)
        if new:
            require_backfills(server, settings.feed.publication)
        new = [table for table in new if self._can_be_read(table, current)]
        if not new:
            return plan
        extended = self._with_added(plan.tables, new, domains)
        state = plan.publication.with_tables([table.name for table in new], current)
        queue_names = {**plan.queues, **self._queue_names(extended)}
        self._create_queues(queue_names, replace(extended, tables=extended.tables[-len(new) :]))
        started = now_micros()
        backfills = {
            **plan.backfills,
            **{table.name: TableBackfill(None, 0, 0, started, again=False) for table in new},
        }
        plan = replace(plan, queues=queue_names, tables=extended, publication=state, backfills=backfills)
        self.store.database.run(lambda tx: self._store_plan(tx, plan), idempotent=True)
        return plan

    def _can_be_read(self, table: Table, current: PublicationState) -> bool:
        """Return whether a new table can be read in the order of its key; otherwise it is skipped."""
        try:
            KeyOrder.of(self.feed.server, table)
        except FeedUnavailableError as error:
            self.skipped[table.relation.oid] = current.stamps.get(table.name, "")
            log.warning(
                "pump %s skips a new table: %s",
                self.settings.name,
                error,
                extra={
                    "action": "table_left_out",
                    "pump": self.settings.name,
                    "table": table.name,
                    "error": condition_of(error),
                },
            )
            return False
        return True

    def _with_added(self, known: Tables, new: list[Table], domains: dict[int, tuple[int, int]]) -> Tables:
        """Return table definitions with new tables added."""
        tables = replace(
            known, tables=(*known.tables, *new), several=True, domains={**known.domains, **domains}
        )
        for plan in tables_by_queue(tables, together=False).values():
            check_names(self.feed.server, plan)
        return tables.reading_as(self.feed.server, self.settings.feed.types or {})

    def _store_plan(self, tx: Transaction, plan: PumpPlan) -> None:
        state = pumps.require_owned(tx, self.settings.name, self.owner).state
        # A backfill may have been requested since the plan was read.
        backfills = {**plan.to_json()["backfills"], **state.get("backfills", {})}
        new_state = json.dumps(state | plan.to_json() | {"backfills": backfills})
        pumps.set_pump_state(tx, self.settings.name, self.owner, new_state)

    def _create_queues(self, names: dict[str, str], tables: Tables) -> None:
        plans = tables_by_queue(tables, self.settings.together is not None)
        create_queues(self.store, names, plans, self.settings.url, self.settings.queues)

    def _queue_names(self, tables: Tables) -> dict[str, str]:
        """Return the queue of each table; refuse two tables with the same queue."""
        settings = self.settings
        if settings.together is not None:
            return {ALL: settings.together}
        names = queue_names(tables_by_queue(tables, together=False), settings.prefix)
        by_queue: dict[str, str] = {}
        for table, queue in names.items():
            other = by_queue.setdefault(queue, table)
            if other != table:
                raise InvalidInputError(
                    f"the tables {in_quotes(other)} and {in_quotes(table)} would have the same queue, "
                    f"{in_quotes(queue)}: read them with two pumps, each with tables=[…] and its own slot "
                    "and prefix",
                    condition="INVALID_INPUT.QUEUE_OF_TWO_TABLES",
                    queue=queue,
                )
        return names


def require_same_source(plan: PumpPlan, settings: PumpSettings, identity: str) -> None:
    """Refuse settings whose feed or queues differ from the plan; the server of the feed is not compared."""
    names = set(tables_by_queue(plan.tables, settings.together is not None))
    is_same_layout = plan.together == settings.together and plan.prefix == settings.prefix
    if (
        _without_server(plan.feed) == _without_server(identity)
        and is_same_layout
        and names <= set(plan.queues)
    ):
        return
    raise CheckpointMismatchError(
        f"the pump {settings.name!r} copies {plan.feed} into {plan.queue_list()}: start it with the same "
        "feed, queue and prefix, or give this one another name",
        condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
        pump=settings.name,
    )


def server_of(identity: str) -> str:
    """Return the server's system identifier, which is part of a feed's identity."""
    return identity.partition("/")[0].rpartition(":")[2]


def other_server(plan: PumpPlan, settings: PumpSettings, identity: str) -> CheckpointMismatchError:
    """Return the error for a server other than the one from which the pump has read."""
    before, now = server_of(plan.feed), server_of(identity)
    return CheckpointMismatchError(
        f"the pump {settings.name!r} has read from the server with the system identifier {before}, and "
        f"this server has {now}. Correct the URL; or if this server has replaced it, for example after an "
        f"upgrade, run `penstock pump recover {settings.name} --server {now}`: the pump then reads "
        "all rows again, and deletes the rows that this server does not have",
        condition="CHECKPOINT_MISMATCH.OTHER_SERVER",
        pump=settings.name,
        before=before,
        now=now,
    )


def _without_server(identity: str) -> str:
    return identity.partition("/")[2]
