"""Commits of epochs through the ledger of a store.

One transaction makes an epoch visible, exactly once, and moves the consumer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.commit.micro_batch import BatchCommit, Target
from penstock.commit.offsets import QueueOffset
from penstock.commit.protocol import commit_batch, record_batch
from penstock.continuous.connectors.protocol import Epoch, SinkDriver, SinkEpoch
from penstock.errors import CheckpointMismatchError
from penstock.json_text import JsonValue, parse_record
from penstock.queue.store import open_store
from penstock.store.database import Transaction
from penstock.store.records import ledger
from penstock.store.records.ledger import LedgerEntry, LedgerKey

T = TypeVar("T")


@dataclass(frozen=True)
class LedgerCommits:
    """Commits of a query's epochs to a store; the ``app_id`` identifies the query in the ledger."""

    url: str = field(repr=False)
    query_id: str
    app_id: str
    rebind: bool
    new_sink: bool

    def commit(self, target: Target[T], epoch: Epoch, offset: JsonValue) -> T | None:
        """Make an epoch visible; return the target's result, or None if the ledger already had the epoch."""
        queue_offset = QueueOffset.of(offset)
        store = open_store(self.url)
        return commit_batch(
            store.database,
            BatchCommit(
                sink=target,
                app_id=self.app_id,
                batch_id=epoch.number,
                rows=epoch.rows_out,
                origin=self.query_id,
                sources=[] if queue_offset is None else [queue_offset],
                others=[offset] if queue_offset is None else [],
                attempts=epoch.attempts,
                rebind=self.rebind,
                new_sink=self.new_sink,
                logged=json.dumps(offset),
            ),
        )

    def record(self, ledger_name: str, epoch: Epoch, offset: JsonValue) -> None:
        """Record an epoch whose rows are already visible."""
        record_batch(
            open_store(self.url).database,
            LedgerKey(ledger_name, self.app_id, epoch.number),
            self.query_id,
            epoch.rows_out,
            new_sink=self.new_sink,
            logged=json.dumps(offset),
        )

    def newest(self, ledger_name: str) -> SinkEpoch:
        """Return the query's last epoch in the ledger."""

        def last_two(tx: Transaction) -> tuple[LedgerEntry | None, LedgerEntry | None]:
            entry = ledger.newest_entry(tx, ledger_name, self.app_id)
            return entry, entry and ledger.newest_entry(tx, ledger_name, self.app_id, entry.batch_id)

        entry, previous = open_store(self.url).database.run(last_two, write=False)
        if entry is None:
            return SinkEpoch(-1)
        record_name = f"the ledger of {ledger_name}"
        query_id, *covered = parse_record(entry.ranges, record_name, list)
        if query_id != self.query_id:
            raise CheckpointMismatchError(
                f"app {self.app_id!r} has written to {ledger_name} from another checkpoint before: a new "
                "checkpoint needs a new appId (leave the option out to get one)",
                condition="CHECKPOINT_MISMATCH.OTHER_CHECKPOINT",
                app_id=self.app_id,
            )
        return SinkEpoch(
            entry.batch_id,
            _logged_offset(entry, record_name),
            entry.rows,
            _logged_offset(previous, record_name)
            if previous and previous.batch_id == entry.batch_id - 1
            else None,
            identifies_rows=covered != [[]],
        )


class LedgerSinkDriver(SinkDriver):
    """Driver side of a sink whose store has a ledger.

    With exactly_once, one transaction commits an epoch's rows and enters the epoch, with its offset, in the
    ledger. Otherwise the rows are already visible, and only the epoch is entered.
    """

    exactly_once: bool
    commits: LedgerCommits

    @property
    def visible_when_written(self) -> bool:
        return not self.exactly_once

    @property
    def records_offsets(self) -> bool:
        return self.exactly_once

    @property
    def allows_new_sink(self) -> bool:
        return self.commits.new_sink


def _logged_offset(entry: LedgerEntry, record_name: str) -> JsonValue:
    return None if entry.logged is None else parse_record(entry.logged, record_name)
