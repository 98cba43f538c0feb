"""A queue as the target of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.commit.micro_batch import BatchCommit, Target, sink_name
from penstock.store import staging
from penstock.store.database import Transaction
from penstock.store.log.partition_log import Appended
from penstock.store.records.catalog import QueueRecord


@dataclass(frozen=True)
class QueueTarget(Target[Appended]):
    """Staged segments are appended to the queue, in the order of the tasks."""

    record: QueueRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def ledger_name(self) -> str:
        return sink_name(self.record)

    def __str__(self) -> str:
        return f"queue {self.record.name!r}"

    def publish(self, tx: Transaction, batch: BatchCommit[Appended]) -> Appended:
        return staging.promote(tx, self.record, batch.app_id, batch.batch_id, batch.attempts)

    def discard(self, tx: Transaction, batch: BatchCommit[Appended]) -> None:
        staging.discard(tx, self.record, batch.app_id, batch.batch_id)
