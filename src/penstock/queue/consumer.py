"""A consumer: where it stands on each queue, how far behind, and how it moves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from penstock.arguments import require
from penstock.errors import ConsumerInUse, InvalidInput, InvalidPosition, OffsetConflict, PartitionNotFound
from penstock.instants import micros_of
from penstock.queue.checks import check_name, check_whole_index, check_whole_partition
from penstock.queue.maintenance import Maintainer
from penstock.store.database import Database, Transaction
from penstock.store.log import partition_log
from penstock.store.log.trim import time_of
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.consumers import Registration

logger = logging.getLogger("penstock.queue")

PULL_ROWS = 10_000
_INDEXES_END = 2**63

Position = str | datetime | Mapping[int, int]


@dataclass(frozen=True)
class Pull:
    """Rows [start, end) that a consumer has yet to process; pass both to ``advance`` when it has."""

    table: pa.Table
    start: int
    end: int


@dataclass(frozen=True)
class PartitionLag:
    """How far a consumer is behind on one partition."""

    partition: int
    offset: int
    """The first row that it has not processed."""
    next_index: int
    """The index that the next row to be appended will have."""
    bytes: int
    """The compressed size of what is between, in whole segments."""
    seconds: float
    """The age of the oldest row between; 0 when there is none."""

    @property
    def rows(self) -> int:
        """Rows not processed yet."""
        return self.next_index - self.offset


@dataclass(frozen=True)
class Lag:
    """How far a consumer is behind on a queue."""

    partitions: tuple[PartitionLag, ...]

    @property
    def rows(self) -> int:
        """Rows not processed yet."""
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        """Their compressed size, in whole segments."""
        return sum(partition.bytes for partition in self.partitions)

    @property
    def seconds(self) -> float:
        """The age of the oldest of them; 0 when there are none."""
        return max((partition.seconds for partition in self.partitions), default=0.0)


class Consumer:
    """A named set of offsets, on any number of queues; get one from ``Store.consumer``."""

    def __init__(self, database: Database, store_uuid: str, name: str, maintainer: Maintainer) -> None:
        self._database = database
        self._store_uuid = store_uuid
        self._maintainer = maintainer
        self._pulled: dict[tuple[str, int], int] = {}
        """The generation of the registration that rows were pulled of, by queue and partition."""
        self.name = name

    def __repr__(self) -> str:
        return f"Consumer({self.name!r}, {self._database.url})"

    def register(self, queue: str, *, vital: bool | None = None, start: Position = "earliest") -> None:
        """Register on a queue; where it is registered already, the offsets stay and only a given ``vital`` changes.

        Parameters
        ----------
        queue
            The queue's name.
        vital
            Whether trimming waits for this consumer; by default not, or as it is registered already.
        start
            ``earliest``, ``latest``, a datetime with a time zone (the first row at or after it) or
            ``{partition: row index}``.
        """
        check_name("queue", queue)
        require("vital", vital, bool | None, "True or False")

        def work(tx: Transaction) -> None:
            record = catalog.find_queue(tx, queue)
            consumers.register(tx, self.name, record, vital=vital, start=_position(start))

        self._database.run(work, idempotent=True)
        logger.info(
            "consumer %r is registered on queue %r",
            self.name,
            queue,
            extra={"action": "consumer_registered", "consumer": self.name, "queue": queue},
        )

    def unregister(self, queue: str) -> None:
        """Forget the offsets on a queue.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        ConsumerInUse
            While a live query owns them.
        NotRegistered
        """

        def work(tx: Transaction) -> None:
            registration = self._find(tx, queue, lock=True)
            self._refuse_when_owned(tx, registration, "unregister")
            tx.run("delete_registration", **registration.keys)

        self._database.run(work)
        logger.info(
            "consumer %r is no longer registered on queue %r",
            self.name,
            queue,
            extra={"action": "consumer_unregistered", "consumer": self.name, "queue": queue},
        )

    def queues(self) -> list[str]:
        """The names of the queues that the consumer is registered on."""
        found = self._database.run(consumers.list_registrations, write=False)
        return [registration.queue for registration in found if registration.consumer == self.name]

    def registration(self, queue: str) -> Registration:
        """The registration as the store has it.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        NotRegistered
        """
        return self._registration(queue)

    def offsets(self, queue: str) -> dict[int, int]:
        """The first row index of each partition that has not been processed.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        NotRegistered
        """

        def work(tx: Transaction) -> list[int]:
            return consumers.read_offsets(tx, self._find(tx, queue))[0]

        return dict(enumerate(self._database.run(work, write=False)))

    def pull(self, queue: str, partition: int, *, max_rows: int = PULL_ROWS) -> Pull:
        """The next rows of a partition; the offset stays until :meth:`advance`.

        Parameters
        ----------
        queue
            The queue's name.
        partition
            The partition's number, from 0.
        max_rows
            How many rows at the most.

        Raises
        ------
        DataLost
            When they have been trimmed.
        NotRegistered, PartitionNotFound
        """
        if type(max_rows) is not int or max_rows < 1:
            raise InvalidInput(f"max_rows is 1 or more, not {max_rows!r}")
        check_whole_partition(partition)

        def work(tx: Transaction) -> tuple[int, QueueRecord, int, int]:
            registration = self._find(tx, queue)
            record = catalog.find_queue(tx, queue)
            offset = _at(registration, consumers.read_offsets(tx, registration)[0], partition)
            there = catalog.lock_partition(tx, record, partition)
            return registration.generation, record, offset, min(offset + max_rows, there.next_index)

        generation, record, start, end = self._database.run(work, write=False)
        self._pulled[queue, partition] = generation
        chunks = partition_log.read(self._database, record, partition, start, end)
        return Pull(
            pa.Table.from_batches([chunk.batch for chunk in chunks], schema=record.schema), start, end
        )

    def advance(self, queue: str, partition: int, *, old: int, new: int, connection: Any = None) -> None:
        """Move the offset of a partition from ``old`` to ``new``, by compare-and-set.

        Parameters
        ----------
        queue
            The queue's name.
        partition
            The partition's number, from 0.
        old, new
            Row indexes, as :meth:`pull` returned them.
        connection
            The caller's own connection: the move becomes part of its transaction.

        Raises
        ------
        OffsetConflict
            When the stored offset is not ``old``, or the consumer was sought elsewhere, or the queue made anew, since this object
            has pulled the rows.
        ConsumerInUse
            When a live query owns the consumer.
        InvalidPosition
            When ``new`` is before ``old`` or behind the newest row.
        """

        check_whole_partition(partition)
        check_whole_index(old, new)

        def work(tx: Transaction) -> QueueRecord | None:
            registration = self._find(tx, queue, lock=True)
            self._refuse_when_owned(tx, registration, "move")
            self._require_pulled(registration, partition)
            there = None
            if 0 <= partition < _INDEXES_END:
                there = tx.one("read_partition", queue_id=registration.queue_id, partition=partition)
            if there is None:
                raise _no_partition(registration, partition)
            if old < 0:
                raise InvalidPosition(f"a row index is 0 or more, not {old}: pass what pull returned")
            if not old <= new <= there.next_index:
                raise InvalidPosition(
                    f"an offset moves forward, to the newest row at most: from {old} it may go to "
                    f"{max(old, there.next_index)}, not {new}; use seek to go elsewhere"
                )
            consumers.advance(tx, registration, partition, old, new, safe=True)
            # Only a vital consumer was in the way of a trim.
            return catalog.find_queue(tx, queue) if registration.vital else None

        if connection is not None:
            with self._database.borrowed(connection) as tx:
                work(tx)
        elif (freed := self._database.run(work)) is not None:
            self._maintainer.after_change(freed, ())

    def seek(self, queue: str, *, to: Position, dry_run: bool = False) -> dict[int, int]:
        """Go elsewhere; the new offsets.

        Older checkpoints of queries that read through this consumer are turned away afterwards.

        Parameters
        ----------
        queue
            The queue's name.
        to
            ``earliest``, ``latest``, a datetime with a time zone, or ``{partition: row index}`` (the other
            partitions stay where they are).
        dry_run
            Only say where it would go.

        Raises
        ------
        ConsumerInUse
            While a live query owns the consumer.
        """

        def work(tx: Transaction) -> list[int]:
            registration = self._find(tx, queue, lock=True)
            record = catalog.find_queue(tx, queue)
            position = _position(to)
            if isinstance(position, Mapping):
                first = consumers.resolve(tx, record, "earliest")
                stands = consumers.read_offsets(tx, registration)[0]
                kept = {p: max(offset, first[p]) for p, offset in enumerate(stands)}
                position = kept | dict(position)
            offsets = consumers.resolve(tx, record, position)
            if not dry_run:
                self._refuse_when_owned(tx, registration, "seek")
                consumers.seek(tx, registration, offsets)
            return offsets

        offsets = dict(enumerate(self._database.run(work)))
        if not dry_run:
            logger.info(
                "consumer %r on queue %r is sought elsewhere",
                self.name,
                queue,
                extra={
                    "action": "consumer_sought",
                    "consumer": self.name,
                    "queue": queue,
                    "offsets": offsets,
                },
            )
        return offsets

    def lag(self, queue: str) -> Lag:
        """How far behind the consumer is, in rows, compressed bytes and seconds.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        NotRegistered
        """

        def work(tx: Transaction) -> Lag:
            registration = self._find(tx, queue)
            record = catalog.find_queue(tx, queue)
            offsets = consumers.read_offsets(tx, registration)[0]
            now = tx.now()
            return Lag(
                tuple(
                    _partition_lag(tx, record, there, offset, now)
                    for there, offset in zip(catalog.partitions(tx, record), offsets, strict=True)
                )
            )

        return self._database.run(work, write=False)

    def _registration(self, queue: str) -> Registration:
        return self._database.run(lambda tx: self._find(tx, queue), write=False)

    def _find(self, tx: Transaction, queue: str, *, lock: bool = False) -> Registration:
        return consumers.find_registration(tx, self.name, check_name("queue", queue), lock=lock)

    def _require_pulled(self, registration: Registration, partition: int) -> None:
        """Refuse to move over rows that are not those which were pulled, although their indexes are the same."""
        queue, generation = registration.queue, registration.generation
        if self._pulled.get((queue, partition), generation) != generation:
            raise OffsetConflict(
                f"consumer {self.name!r} was sought elsewhere on queue {queue!r}, or the queue was made anew, since the rows of "
                f"partition {partition} were pulled: pull again",
                consumer=self.name,
                queue=queue,
                partition=partition,
            )

    def _refuse_when_owned(self, tx: Transaction, registration: Registration, action: str) -> None:
        if tx.owner_alive(registration.lock_name(self._store_uuid)):
            raise ConsumerInUse(
                f"cannot {action} consumer {self.name!r} on queue {registration.queue!r}: a running query owns it; "
                "stop the query first",
                consumer=self.name,
                queue=registration.queue,
            )


def _partition_lag(
    tx: Transaction, record: QueueRecord, there: catalog.PartitionRecord, offset: int, now: int
) -> PartitionLag:
    where = {"queue_id": record.queue_id, "partition": there.partition}
    row_index = max(offset, there.first_index)
    size = int(tx.one("bytes_after", row_index=row_index, **where).bytes)
    since = time_of(tx, record, there.partition, row_index)
    seconds = 0.0 if since is None else max(0.0, (now - since) / 1e6)
    return PartitionLag(there.partition, offset, there.next_index, size, seconds)


def _at(registration: Registration, offsets: list[int], partition: int) -> int:
    if not 0 <= partition < len(offsets):
        raise _no_partition(registration, partition)
    return offsets[partition]


def _no_partition(registration: Registration, partition: int) -> PartitionNotFound:
    return PartitionNotFound(
        f"queue {registration.queue!r} has no partition {partition}", partition=partition
    )


def _position(position: Position) -> consumers.Position:
    if isinstance(position, datetime):
        if position.tzinfo is None:
            raise InvalidPosition(f"{position!r} has no time zone: say which, such as tzinfo=datetime.UTC")
        return micros_of(position)
    if isinstance(position, int):
        raise InvalidPosition(f"a row index belongs to a partition: write {{partition: {position}}}")
    return position
