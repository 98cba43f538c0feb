"""A micro-batch that is ready to commit, and the interface of its target."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.commit.offsets import QueueOffset
from penstock.store import staging
from penstock.store.database import Transaction
from penstock.store.log.partition_log import Appended
from penstock.store.log.written import TaskSegments
from penstock.store.records.catalog import QueueRecord, queue_sink
from penstock.store.records.ledger import LedgerKey

T = TypeVar("T")


class Target(ABC, Generic[T]):
    """The target of a micro-batch: makes staged rows visible, or drops them.

    ``str(target)`` is its name in messages, such as ``queue 'big'``.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The target's name, as users know it."""

    @property
    @abstractmethod
    def ledger_name(self) -> str:
        """The target's name in the ledger."""

    def prepare(self, tx: Transaction, batch: BatchCommit[T]) -> None:
        """Do any lengthy preparation for ``publish``. By default there is none.

        The protocol calls this in the same transaction before it locks anything, even if the micro-batch is
        already committed.
        """

    @abstractmethod
    def publish(self, tx: Transaction, batch: BatchCommit[T]) -> T:
        """Make the rows that acknowledged attempts staged visible, and drop everything else that was staged
        for micro-batches up to this one.

        The protocol calls this in the transaction that moves the consumers and inserts the ledger entry.
        """

    @abstractmethod
    def discard(self, tx: Transaction, batch: BatchCommit[T]) -> None:
        """Drop everything that was staged for micro-batches up to this one, which is already committed."""


@dataclass(frozen=True)
class BatchCommit(Generic[T]):
    """A micro-batch whose tasks have finished."""

    sink: Target[T]
    app_id: str
    batch_id: int
    rows: int
    origin: str = ""
    """The id of the checkpoint. Another checkpoint with the same app id has its own batch ids."""
    sources: Sequence[QueueOffset] = ()
    """The range that the micro-batch reads from each queue."""
    others: Sequence[object] = ()
    """The offsets of other sources, in any form."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """The number of segments or rows that each acknowledged attempt staged. The target decides which of the
    two it counts.
    """
    written: Sequence[TaskSegments] | None = None
    """The segments that each acknowledged task has written without using the database, in the order of the
    tasks. None if the tasks staged or appended their rows.
    """
    tasks: Mapping[int, int] | None = None
    """The number of rows of each task, if the tasks appended directly; None if they staged their rows."""
    stateful: bool = False
    """Whether the query keeps state, which a different checkpoint would lack."""
    rebind: bool = False
    """Whether a stateful query may take over a consumer from another checkpoint anyway."""
    new_sink: bool = False
    """Whether the sink may lack commits of the query although the checkpoint is not new."""
    logged: str | None = None
    """The offset that the checkpoint logs for the micro-batch, if the checkpoint is written after this commit
    or may be lost. None if the micro-batch has several offsets.
    """

    @property
    def key(self) -> LedgerKey:
        return LedgerKey(self.sink.ledger_name, self.app_id, self.batch_id)

    def ranges(self) -> str:
        """The micro-batch's input, as the ledger records it."""
        lines = sorted([*source.identity, list(source.start), list(source.end)] for source in self.sources)
        return json.dumps([self.origin, lines, *([_digest(self.others)] if self.others else [])])


def _digest(others: Sequence[object]) -> str:
    """Return a digest of offsets. Only their equality matters, and some sources write long offsets."""
    texts = sorted(json.dumps(other, sort_keys=True) for other in others)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@dataclass(frozen=True)
class QueueTarget(Target[Appended]):
    """A queue as the target of micro-batches. Staged segments are appended in the order of the tasks."""

    record: QueueRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def ledger_name(self) -> str:
        return queue_sink(self.record)

    def __str__(self) -> str:
        return f"queue {self.record.name!r}"

    def publish(self, tx: Transaction, batch: BatchCommit[Appended]) -> Appended:
        if batch.written is not None:
            return staging.publish_written(tx, self.record, batch.app_id, batch.batch_id, batch.written)
        return staging.promote(tx, self.record, batch.app_id, batch.batch_id, batch.attempts)

    def discard(self, tx: Transaction, batch: BatchCommit[Appended]) -> None:
        staging.discard(tx, self.record, batch.app_id, batch.batch_id)
