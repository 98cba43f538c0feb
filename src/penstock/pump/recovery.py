"""Recovery of a pump that cannot resume, because its slot or the log that it has read is gone.

The queues are kept. A new slot is created, and every table is reread, as updates with versions after all
commits in the queues (:mod:`penstock.pump.backfills`). Then rows that were deleted in the meantime are
deleted in the queues (:mod:`penstock.pump.deletions`).

One transaction switches the store to the new slot. If the process dies before it, the next process starts the
recovery again, and drops the slot that was left behind, which has the pump's slot name.
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
from penstock.pump.targets import CommitTimes, PartialCommit, Targets
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
    """Recovery of a pump on request, for the process that owns the pump."""

    settings: PumpSettings
    store: Store
    owner: str
    feed: OpenPostgresFeed
    application: str
    """The application name of the pump's processes on the server."""

    def request(self) -> RecoveryRequest | None:
        """Return the request for a recovery; None if there is none."""
        record = self._record()
        return RecoveryRequest.of(record.name, record.state)

    def decline(self) -> None:
        """Remove the request, because the pump can resume."""
        self._change_state(RecoveryRequest.remove)
        log.warning(
            "pump %s can resume, so it is not recovered: `penstock pump recover %s --force` does it anyway",
            self.settings.name,
            self.settings.name,
            extra={"action": "recovery_declined", "pump": self.settings.name},
        )

    def handle(self, error: PenstockError) -> None:
        """Recover from an error that prevents the pump from resuming; raise it if there is no request."""
        condition = condition_of(error)
        if condition not in _CANNOT_RESUME:
            raise error
        if self.request() is None:
            raise self._with_advice(error, condition)
        self.run()

    def _with_advice(self, error: PenstockError, condition: str) -> PenstockError:
        if condition != "FEED_UNAVAILABLE.SLOT_MISSING":
            return error
        name, slot = self.settings.name, self.feed.slot.name
        return FeedUnavailableError(
            f"{self.feed.name}: the replication slot {slot!r} of pump {name!r} is gone, with changes that "
            f"the pump has not read. Run `penstock pump recover {name}`: the pump then creates a new slot "
            "and reads all rows again",
            condition=condition,
            slot=slot,
            pump=name,
        )

    def run(self) -> None:
        """Switch to a new slot; the next session rereads the tables.

        Raises
        ------
        FeedUnavailableError
            When a table cannot be reread, or was changed in a way that its queue does not support. In this
            case nothing is changed.
        """
        settings, record = self.settings, self._record()
        plan, identity = PumpPlan.from_json(record.name, record.state), self.feed.identity()
        require_same_source(plan, settings, identity)
        request = self.request()
        server = None if request is None else request.server
        if identity != plan.feed and server_of(identity) != server:
            raise other_server(plan, settings, identity)
        self.feed.slot.check_server()
        # This may refuse the recovery, so it comes before anything is dropped.
        self._current_tables(plan, identity)
        # After the slot is dropped and recreated, the position may look as if the pump could resume.
        self._change_state(RecoveryRequest(now_micros(), force=True, server=server).store_in)
        self.feed.server.fetch("end_reader", slot=settings.feed.slot, application=self.application)
        first = self.feed.snapshots.recreate_slot()
        # Read the tables after the slot is created: changes that the slot does not have were committed
        # before.
        tables, publication = self._current_tables(plan, identity)
        plan = replace(plan, feed=identity, tables=tables, publication=publication)
        version = self._switch(record, plan, first)
        log.warning(
            "pump %s recovers: it continues with the new slot %s, and reads all rows of %s again, as commits "
            "after %d",
            settings.name,
            settings.feed.slot,
            ", ".join(sorted(plan.queues)),
            version,
            extra={"action": "recovery_started", "pump": settings.name, "version": version},
        )

    def _current_tables(self, plan: PumpPlan, identity: str) -> tuple[Tables, PublicationState]:
        """Return the current definitions of a plan's tables, and the state of the publication.

        Raises
        ------
        FeedUnavailableError
        """
        settings, server = self.settings, self.feed.server
        require_backfills(server, settings.feed.publication)
        published_tables, domains = published(server, settings.feed.publication)
        tables = _with_current_definitions(self.feed.name, plan.tables, published_tables, domains)
        self.feed.snapshots.require_trusted_functions(tables.tables)
        for table in tables.tables:
            KeyOrder.of(server, table)
        state = state_of(server, settings.feed.publication, tables)
        # On another server, object ids and column numbers are different.
        publication_state = state.with_dropped_columns(plan.publication) if identity == plan.feed else state
        readers = TableReaders(
            self.feed.settings,
            server,
            tables,
            publication_state,
            together=False,
            changes=settings.schema_changes,
        )
        readers.begin(0, 0)
        (end,) = server.fetch("position")
        for table in published_tables:
            readers.wants(table.relation, int(end.position))
        return readers.tables, publication_state

    def _switch(self, record: PumpRecord, plan: PumpPlan, first: int) -> int:
        """Switch the store to a new slot in one transaction; return the last commit from before the slot.

        A partly appended commit is ended, because its other rows are reread.
        """
        targets = Targets.opened(self.store, plan.queues, plan.tables.by_name)
        before = record.position
        newest = self.store.database.run(targets.last_commit, write=False)
        last = max(before.version, before.part_version, newest)
        plan = replace(plan, offset=max(plan.offset, last + 1 - first))
        after = PumpPosition(first + plan.offset, before.timestamp)
        started = now_micros()
        tables_by_name = plan.tables.by_name
        plan = replace(
            plan,
            backfills={name: TableBackfill(None, 0, 0, started, again=True) for name in tables_by_name},
            recoveries={name: TableRecovery(after.version, is_read=False) for name in tables_by_name},
        )

        def switch(tx: Transaction) -> bool:
            if not pumps.move_pump(tx, record.name, self.owner, before, after):
                return False
            state = pumps.require_owned(tx, record.name, self.owner).state | plan.to_json()
            RecoveryRequest.remove(state)
            pumps.set_pump_state(tx, record.name, self.owner, json.dumps(state))
            return True

        partial = PartialCommit(before.part_version, before.timestamp) if before.part_rows else None
        rows = targets.rows({}, after.version, CommitTimes({}, before.timestamp), partial)
        append_commits(self.store.database, rows, switch)
        return after.version

    def _record(self) -> PumpRecord:
        return self.store.database.run(
            lambda tx: pumps.require_owned(tx, self.settings.name, self.owner), write=False
        )

    def _change_state(self, change: Callable[[Json], None]) -> None:
        def update(tx: Transaction) -> None:
            state = pumps.require_owned(tx, self.settings.name, self.owner).state
            change(state)
            pumps.set_pump_state(tx, self.settings.name, self.owner, json.dumps(state))

        self.store.database.run(update, idempotent=True)


def _with_current_definitions(
    name: str, planned: Tables, published_tables: Sequence[Table], domains: dict[int, BaseType]
) -> Tables:
    """Return planned tables with their current object ids and row filters from the catalog."""
    by_name = {table.name: table for table in published_tables}
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
    """Return a planned table with the current object ids of the table and its types.

    User-defined types, such as enums, are read as text whatever their ids.
    """
    columns = dict(zip(current.relation.names, current.relation.columns, strict=True))
    user_types = {
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
        bases=tuple(
            user_types.get(name, base) if base[0] >= _FIRST_USER_TYPE else base for name, base in planned
        ),
        filter=current.filter,
        partitioned=current.partitioned,
    )
