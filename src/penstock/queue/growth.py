"""Adding partitions to a queue, in such a way that equal keys stay together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.arrow.key_hash import key_hash
from penstock.errors import InvalidInput
from penstock.queue.placement import Hashes, Home, home_of
from penstock.store.database import Database, Transaction
from penstock.store.log import partition_log
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import QueueRecord

MAX_PARTITIONS = 4096


def grow(database: Database, queue: QueueRecord, count: int) -> None:
    """Add ``count`` partitions; every consumer stands at the start of the new ones.

    The keys that are in the queue are read before anything is locked, and only those that came meanwhile under the locks,
    which hold up the queue's appends.

    Raises
    ------
    InvalidInput
        When the queue would have more partitions than it may.
    """
    seen, upto = _gather(database, queue, Hashes(), {}) if queue.key else (Hashes(), {})

    def work(tx: Transaction) -> None:
        current = catalog.find_queue(tx, queue.name, lock=True)
        if current.queue_id != queue.queue_id:
            raise catalog.dropped(queue)
        total = current.partitions + count
        if total > MAX_PARTITIONS:
            raise InvalidInput(
                f"a queue has {MAX_PARTITIONS} partitions at the most: {queue.name!r} has {current.partitions} and "
                f"cannot get {count} more"
            )
        registrations = consumers.lock_registrations(tx, current)
        catalog.lock_partitions(tx, current)
        if current.key:
            _remember(tx, current, _gather(_Inside(tx), current, seen.copy(), upto)[0])
        catalog.grow(tx, current, total)
        consumers.add_partition_positions(tx, registrations, current.partitions, total)

    database.run(work)


def _remember(tx: Transaction, queue: QueueRecord, seen: Hashes) -> None:
    home: Home = home_of(queue.partitions, [seen.distinct()])
    tx.run("insert_key_home", queue_id=queue.queue_id, partitions=home.partitions, hashes=home.bits)


def _gather(
    source: Any, queue: QueueRecord, seen: Hashes, upto: dict[int, int]
) -> tuple[Hashes, dict[int, int]]:
    """The hashes of the keys in rows from ``upto`` on, added to ``seen``; and where those rows end."""
    ends = dict(upto)
    for there in source.run(lambda tx: catalog.partitions(tx, queue), write=False):
        start = max(there.first_index, upto.get(there.partition, 0))
        ends[there.partition] = there.next_index
        chunks = partition_log.read(
            source, queue, there.partition, start, there.next_index, columns=queue.key, on_lost="skip"
        )
        for chunk in chunks:
            seen.add(key_hash(chunk.batch, queue.key))
    return seen, ends


class _Inside:
    """A database whose every run is the transaction in hand."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def run(self, work: Callable[[Transaction], Any], *, write: bool = True) -> Any:
        return work(self._tx)
