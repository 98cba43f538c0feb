"""The recovery of a pump that cannot resume, since its slot or what it has read is gone.

The queues stay. A new slot is created, and every table is read again beside it, as updates at versions after
all that is in the queues (:mod:`penstock.pump.backfills`). Then the rows that were deleted meanwhile are
deleted in the queues (:mod:`penstock.pump.deletions`).

The store is switched to the new slot in one transaction. If the process dies before that, the next one begins
the recovery again, and drops the slot that is left, which has the pump's own name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import FeedUnavailableError, PenstockError, condition_of
from penstock.feeds.feed_writer import append_commits
from penstock.feeds.postgres import schema_changes
from penstock.feeds.postgres.catalog import BaseType, Table, Tables, published
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.key_order import KeyOrder
from penstock.feeds.postgres.publication import PublicationState, state_of
from penstock.feeds.postgres.table_chunks import require_backfills
from penstock.feeds.postgres.table_readers import TableReaders
from penstock.instants import now_micros
from penstock.json_text import Json
from penstock.pump.backfill_records import TableBackfill
from penstock.pump.plan import PumpPlan
from penstock.pump.planning import PumpSettings, other_server, require_same_source, server_of
from penstock.pump.recovery_records import RecoveryRequest, TableRecovery
from penstock.pump.targets import Continued, Stamps, Targets
from penstock.queue.store import Store
from penstock.store.database import Transaction
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpPosition, PumpRecord

log = logging.getLogger("penstock.pump")

_CANNOT_RESUME = (
    "CHECKPOINT_MISMATCH.OTHER_SERVER",
    "DATA_LOST.HISTORY_CHANGED",
    "DATA_LOST.SLOT",
    "DATA_LOST.SLOT_INVALIDATED",
    "FEED_UNAVAILABLE.SLOT_MISSING",
)
_FIRST_USER_TYPE = 16_384


@dataclass
class Recovery:
    """Recovers a pump on request, for the process that owns it."""

    settings: PumpSettings
    store: Store
    owner: str
    feed: OpenPostgresFeed
    application: str
    """The name under which the pump's processes receive from the server."""

    def request(self) -> RecoveryRequest | None:
        """Return the request for a recovery, if there is one."""
        record = self._record()
        return RecoveryRequest.of(record.name, record.state)

    def decline(self) -> None:
        """Forget a request, since the pump can resume."""
        self._change_state(RecoveryRequest.remove)
        log.warning(
            "pump %s resumes, and does not recover: `penstock pump recover %s --force` recovers it anyway",
            self.settings.name,
            self.settings.name,
            extra={"action": "recovery_declined", "pump": self.settings.name},
        )

    def handle(self, error: PenstockError) -> None:
        """Recover after an error that prevents the pump from resuming; without a request, raise the error."""
        condition = condition_of(error)
        if condition not in _CANNOT_RESUME:
            raise error
        if self.request() is None:
            raise self._explained(error, condition)
        self.run()

    def _explained(self, error: PenstockError, condition: str) -> PenstockError:
        if condition != "FEED_UNAVAILABLE.SLOT_MISSING":
            return error
        name, slot = self.settings.name, self.feed.slot.name
        return FeedUnavailableError(
            f"{self.feed.name}: the replication slot {slot!r} of pump {name!r} is gone, with changes that "
            f"it has not read. `penstock pump recover {name}` has the pump create a new slot and read all "
            "rows again",
            condition=condition,
            slot=slot,
            pump=name,
        )

    def run(self) -> None:
        """Recover, and have the next session read the tables again.

        Raises
        ------
        FeedUnavailableError
            When a table cannot be read again, or has changed in a way that its queue cannot follow. Nothing
            is changed then.
        """
        settings, record = self.settings, self._record()
        plan, identity = PumpPlan.from_json(record.name, record.state), self.feed.identity()
        require_same_source(plan, settings, identity)
        request = self.request()
        server = None if request is None else request.server
        if identity != plan.feed and server_of(identity) != server:
            raise other_server(plan, settings, identity)
        self.feed.slot.check_server()
        # Before anything is dropped, since it may refuse.
        self._current(plan, identity)
        # Once the slot is dropped, it may look as if the pump could resume.
        self._change_state(RecoveryRequest(now_micros(), force=True, server=server).enter)
        self.feed.server.fetch("end_reader", slot=settings.feed.slot, application=self.application)
        first = self.feed.snapshots.recreate_slot()
        # After the slot was created: what the new slot's log lacks was committed before the rows are read.
        tables, publication = self._current(plan, identity)
        plan = replace(plan, feed=identity, tables=tables, publication=publication)
        version = self._switch(record, plan, first)
        log.warning(
            "pump %s recovers: it continues with a new slot %s, and reads all rows of %s again, as commits "
            "after %d",
            settings.name,
            settings.feed.slot,
            ", ".join(sorted(plan.queues)),
            version,
            extra={"action": "recovery_started", "pump": settings.name, "version": version},
        )

    def _current(self, plan: PumpPlan, identity: str) -> tuple[Tables, PublicationState]:
        """Return the tables of a plan as they are now, and the state of the publication.

        Raises
        ------
        FeedUnavailableError
        """
        settings, server = self.settings, self.feed.server
        require_backfills(server, settings.feed.publication)
        now, domains = published(server, settings.feed.publication)
        tables = _as_now(self.feed.name, plan.tables, now, domains)
        self.feed.snapshots.require_trusted_functions(tables.tables)
        for table in tables.tables:
            KeyOrder.of(server, table)
        state = state_of(server, settings.feed.publication, tables)
        # On another server the object ids and the numbers of columns are others.
        known = state.with_dropped_columns(plan.publication) if identity == plan.feed else state
        readers = TableReaders(
            self.feed.settings, server, tables, known, together=False, changes=settings.schema_changes
        )
        readers.begin(0, 0)
        (end,) = server.fetch("position")
        for table in now:
            readers.wants(table.relation, int(end.position))
        return readers.tables, known

    def _switch(self, record: PumpRecord, plan: PumpPlan, first: int) -> int:
        """Have the store continue with a new slot, all at once; return the last commit from before it.

        A commit of which only some rows were appended is ended: what it lacks is read again.
        """
        targets = Targets.opened(self.store, plan.queues, plan.tables.by_name)
        before = record.position
        newest = self.store.database.run(targets.last_commit, write=False)
        last = max(before.version, before.part_version, newest)
        plan = replace(plan, offset=max(plan.offset, last + 1 - first))
        after = PumpPosition(first + plan.offset, before.timestamp)
        started = now_micros()
        names = plan.tables.by_name
        plan = replace(
            plan,
            backfills={name: TableBackfill(None, 0, 0, started, again=True) for name in names},
            recoveries={name: TableRecovery(after.version, is_read=False) for name in names},
        )

        def move(tx: Transaction) -> bool:
            if not pumps.move_pump(tx, record.name, self.owner, before, after):
                return False
            state = pumps.require_owned(tx, record.name, self.owner).state | plan.to_json()
            RecoveryRequest.remove(state)
            pumps.set_pump_state(tx, record.name, self.owner, json.dumps(state))
            return True

        part = Continued(before.part_version, before.timestamp) if before.part_rows else None
        rows = targets.rows({}, after.version, Stamps({}, before.timestamp), part)
        append_commits(self.store.database, rows, move)
        return after.version

    def _record(self) -> PumpRecord:
        return self.store.database.run(
            lambda tx: pumps.require_owned(tx, self.settings.name, self.owner), write=False
        )

    def _change_state(self, change: Callable[[Json], None]) -> None:
        def work(tx: Transaction) -> None:
            state = pumps.require_owned(tx, self.settings.name, self.owner).state
            change(state)
            pumps.set_pump_state(tx, self.settings.name, self.owner, json.dumps(state))

        self.store.database.run(work, idempotent=True)


def _as_now(name: str, planned: Tables, now: Sequence[Table], domains: dict[int, BaseType]) -> Tables:
    """Return planned tables with the object ids, and the row filters, that they have in the catalog now."""
    by_name = {table.name: table for table in now}
    tables = []
    for table in planned.tables:
        current = by_name.get(table.name)
        if current is None:
            raise schema_changes.removed_in_pump(name, table)
        if (current.keyed, set(current.key)) != (table.keyed, set(table.key)):
            raise schema_changes.key_changed(table, current.key).in_recovery(name)
        tables.append(_with_current_ids(table, current))
    return replace(planned, tables=tuple(tables), domains={**planned.domains, **domains})


def _with_current_ids(table: Table, current: Table) -> Table:
    """Return a planned table with the object ids of the current one and its types.

    Types that users have made, such as enums, are read as text, whatever their ids.
    """
    columns = dict(zip(current.relation.names, current.relation.columns, strict=True))
    made = {
        name: base
        for name, base in zip(current.relation.names, current.bases, strict=True)
        if base[0] >= _FIRST_USER_TYPE
    }
    planned = zip(table.relation.names, table.bases, strict=True)
    relation = replace(
        table.relation,
        oid=current.relation.oid,
        columns=tuple(columns.get(column.name, column) for column in table.relation.columns),
    )
    return replace(
        table,
        relation=relation,
        bases=tuple(made.get(name, base) if base[0] >= _FIRST_USER_TYPE else base for name, base in planned),
        filter=current.filter,
        partitioned=current.partitioned,
    )
