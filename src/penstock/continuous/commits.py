"""Epochs in the ledger of a store: each is in its sink as a whole and once, with the consumer's move."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.commit.batch import commit_batch
from penstock.commit.microbatch import BatchCommit, Target
from penstock.commit.offsets import QueueOffset
from penstock.continuous.epochs import Epoch
from penstock.queue.opened import open_store
from penstock.store import ledger

T = TypeVar("T")


@dataclass(frozen=True)
class Commits:
    """What a query commits to a store.

    Parameters
    ----------
    query_id
        The id in its checkpoint.
    app_id
        Its identity in the ledger.
    rebind
        Whether it may take a consumer over from another checkpoint.
    """

    url: str = field(repr=False)
    query_id: str
    app_id: str
    rebind: bool

    def commit(self, target: Target[T], epoch: Epoch, offset: Any) -> T | None:
        """Make an epoch visible; what its target says of it, or None when it was before."""
        store = open_store(self.url)
        return commit_batch(store.database, store.uuid, self._batch(target, epoch, offset))

    def settled(self, target: Target[Any], number: int, offset: Any) -> bool:
        """Whether an epoch is in."""
        batch = self._batch(target, Epoch(number, {}, {}, 0, 0), offset)
        store = open_store(self.url)
        if store.database.run(lambda tx: ledger.find(tx, batch.key), write=False) is None:
            return False
        # It is a replay, which sees whether the epoch is the same one.
        commit_batch(store.database, store.uuid, batch)
        return True

    def _batch(self, target: Target[T], epoch: Epoch, offset: Any) -> BatchCommit[T]:
        ours = QueueOffset.of(offset)
        return BatchCommit(
            sink=target,
            app_id=self.app_id,
            batch_id=epoch.number,
            rows=epoch.rows_out,
            origin=self.query_id,
            sources=[] if ours is None else [ours],
            others=[offset] if ours is None else [],
            attempts=epoch.attempts,
            rebind=self.rebind,
        )
