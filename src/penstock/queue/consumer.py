"""Consumers: their offsets on each queue and their lag; pull rows, advance and seek."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from penstock.arguments import require
from penstock.errors import (
    ConsumerInUseError,
    InvalidInputError,
    InvalidPositionError,
    OffsetConflictError,
    PartitionNotFoundError,
)
from penstock.instants import micros_of
from penstock.json_text import unreadable_record
from penstock.queue.checks import check_name, check_whole_index, check_whole_partition
from penstock.queue.maintenance import Maintainer
from penstock.store.database import Database, Transaction
from penstock.store.log import positions, reading
from penstock.store.log.trim import append_time_of
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.consumers import Registration

logger = logging.getLogger("penstock.queue")

PULL_ROWS = 10_000

Position = str | datetime | Mapping[int, int]


_PULL_BYTES = 256 << 20


@dataclass(frozen=True)
class Pull:
    """Rows [start, end) for a consumer to process. Pass both indexes to ``advance`` afterwards."""

    table: pa.Table
    start: int
    end: int


@dataclass(frozen=True)
class PartitionLag:
    """A consumer's lag on one partition."""

    partition: int
    offset: int
    """The index of the first unprocessed row."""
    next_index: int
    """The index that the next appended row will get."""
    bytes: int
    """The compressed size of the unprocessed rows, in whole segments."""
    seconds: float
    """The age of the oldest unprocessed row in seconds; 0 if there is none."""

    @property
    def rows(self) -> int:
        """The number of rows that are not processed."""
        return self.next_index - self.offset


@dataclass(frozen=True)
class Lag:
    """A consumer's lag on a queue."""

    partitions: tuple[PartitionLag, ...]

    @property
    def rows(self) -> int:
        """The number of rows that are not processed."""
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        """The compressed size of the unprocessed rows in bytes, in whole segments."""
        return sum(partition.bytes for partition in self.partitions)

    @property
    def seconds(self) -> float:
        """The age of the oldest unprocessed row, over all partitions, in seconds; 0 if there is none."""
        return max((partition.seconds for partition in self.partitions), default=0.0)


class Consumer:
    """A named set of offsets on any number of queues. Get one from ``Store.consumer``."""

    def __init__(self, database: Database, name: str, maintainer: Maintainer) -> None:
        self._database = database
        self._maintainer = maintainer
        self._pulled_generations: dict[tuple[str, int], int] = {}
        """The registration's generation at the last pull, by queue and partition."""
        self.name = name

    def __repr__(self) -> str:
        return f"Consumer({self.name!r}, {self._database.url})"

    def register(self, queue: str, *, vital: bool | None = None, start: Position = "earliest") -> None:
        """Register on a queue. If the consumer is already registered, keep its offsets, and set ``vital`` if
        it is passed.

        Parameters
        ----------
        queue
            The queue's name.
        vital
            Whether trimming waits for this consumer. By default, False for a new registration, and unchanged
            for an existing one.
        start
            ``earliest``, ``latest``, a datetime with a time zone (the first row at or after it) or
            ``{partition: row index}``.
        """
        check_name("queue", queue)
        require("vital", vital, bool | None, "True or False")

        def work(tx: Transaction) -> None:
            record = catalog.find_queue(tx, queue)
            position = _store_position(start)
            if consumers.register(tx, self.name, record, vital=vital):
                registration = consumers.find_registration(tx, self.name, queue)
                consumers.write_offsets(tx, registration, positions.resolve(tx, record, position))

        self._database.run(work, idempotent=True)
        logger.info(
            "consumer %r is registered on queue %r",
            self.name,
            queue,
            extra={"action": "consumer_registered", "consumer": self.name, "queue": queue},
        )

    def unregister(self, queue: str) -> None:
        """Remove the registration on a queue and its offsets.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        ConsumerInUseError
            When a running query owns the consumer.
        NotRegisteredError
        """

        def work(tx: Transaction) -> None:
            registration = self._find(tx, queue, lock=True)
            self.refuse_when_owned(tx, registration, "unregister")
            tx.run("delete_registration", **registration.keys)

        self._database.run(work)
        logger.info(
            "consumer %r is no longer registered on queue %r",
            self.name,
            queue,
            extra={"action": "consumer_unregistered", "consumer": self.name, "queue": queue},
        )

    def queues(self) -> list[str]:
        """Return the names of the queues that the consumer is registered on."""
        registrations = self._database.run(consumers.list_registrations, write=False)
        return [registration.queue for registration in registrations if registration.consumer == self.name]

    def registration(self, queue: str) -> Registration:
        """Return the registration on a queue, as it is stored.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        NotRegisteredError
        """
        return self._database.run(lambda tx: self._find(tx, queue), write=False)

    def offsets(self, queue: str) -> dict[int, int]:
        """Return the index of the first unprocessed row in each partition.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        NotRegisteredError
        """

        def work(tx: Transaction) -> list[int]:
            return consumers.read_offsets(tx, self._find(tx, queue))[0]

        return dict(enumerate(self._database.run(work, write=False)))

    def pull(self, queue: str, partition: int, *, max_rows: int = PULL_ROWS) -> Pull:
        """Return the next rows of a partition. The offset moves only with :meth:`advance`.

        Parameters
        ----------
        queue
            The queue's name.
        partition
            The partition's number, from 0.
        max_rows
            The largest number of rows to return. There are fewer if these rows would take more than 256 MiB.

        Raises
        ------
        DataLostError
            When the next rows have been trimmed.
        NotRegisteredError, PartitionNotFoundError
        """
        if type(max_rows) is not int or max_rows < 1:
            raise InvalidInputError(f"max_rows is 1 or more, not {max_rows!r}")
        check_whole_partition(partition)

        def work(tx: Transaction) -> tuple[int, QueueRecord, int, int]:
            registration = self._find(tx, queue)
            record = catalog.find_queue(tx, queue)
            offsets = consumers.read_offsets(tx, registration)[0]
            if not 0 <= partition < len(offsets):
                raise _no_partition_error(registration, partition)
            offset = offsets[partition]
            next_index = catalog.lock_partition(tx, record, partition).next_index
            consumers.require_reachable(registration, partition, offset, next_index)
            end = min(offset + max_rows, next_index)
            return registration.generation, record, offset, end

        generation, record, start, end = self._database.run(work, write=False)
        self._pulled_generations[queue, partition] = generation
        batches: list[pa.RecordBatch] = []
        size = 0
        for chunk in reading.read(self._database, record, [reading.Range(partition, start, end)]):
            batches.append(chunk.batch)
            size += chunk.batch.get_total_buffer_size()
            if size >= _PULL_BYTES:
                end = chunk.end
                break
        return Pull(pa.Table.from_batches(batches, schema=record.schema), start, end)

    def advance(self, queue: str, partition: int, *, old: int, new: int, connection: object = None) -> None:
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
            Your own connection to the store's database. The move becomes part of its transaction.

        Raises
        ------
        OffsetConflictError
            When the stored offset is not ``old``, or when ``seek`` has moved the consumer or the queue was
            recreated since this object pulled the rows.
        ConsumerInUseError
            When a running query owns the consumer.
        InvalidPositionError
            When ``new`` is before ``old`` or after the newest row.
        """
        check_whole_partition(partition)
        check_whole_index(old, new)

        def work(tx: Transaction) -> QueueRecord | None:
            registration = self._find(tx, queue, lock=True)
            self.refuse_when_owned(tx, registration, "move")
            self._require_pulled(registration, partition)
            record = None
            if 0 <= partition < 2**63:
                record = tx.one("read_partition", queue_id=registration.queue_id, partition=partition)
            if record is None:
                raise _no_partition_error(registration, partition)
            if old < 0:
                raise InvalidPositionError(f"a row index is 0 or more, not {old}: pass what pull returned")
            if not old <= new <= record.next_index:
                raise InvalidPositionError(
                    f"advance moves an offset forward, and not past the newest row: from {old} to at most "
                    f"{max(old, record.next_index)}, not to {new}. To move elsewhere, use seek",
                    condition="INVALID_POSITION.BACKWARDS" if new < old else "INVALID_POSITION.PAST_END",
                )
            move = {"partition": [partition], "old": [old], "new": [new]}
            consumers.advance(tx, registration, move, safe="new")
            # Only a vital consumer can have blocked trimming.
            return catalog.find_queue(tx, queue) if registration.vital else None

        if connection is not None:
            with self._database.caller_transaction(connection) as tx:
                work(tx)
        elif (queue_record := self._database.run(work)) is not None:
            self._maintainer.after_change(queue_record, ())

    def seek(self, queue: str, *, to: Position, dry_run: bool = False) -> dict[int, int]:
        """Move the consumer to another position on a queue, and return the new offsets.

        Afterwards, older checkpoints of queries that read through this consumer are refused.

        Parameters
        ----------
        queue
            The queue's name.
        to
            ``earliest``, ``latest``, a datetime with a time zone (the first row appended at or after it), or
            ``{partition: row index}``, which leaves the other partitions' offsets unchanged.
        dry_run
            Return the offsets without moving the consumer.

        Raises
        ------
        ConsumerInUseError
            When a running query owns the consumer.
        """

        def work(tx: Transaction) -> list[int]:
            generation = None if dry_run else consumers.new_generation(tx)
            registration = self._find(tx, queue, lock=True)
            record = catalog.find_queue(tx, queue)
            position = _store_position(to)
            if isinstance(position, Mapping):
                # Read the offsets first, since partitions may be added in between.
                current = consumers.read_offsets(tx, registration)[0]
                first_indexes = positions.resolve(tx, record, "earliest")
                position = {
                    part: max(offset, first_indexes[part]) for part, offset in enumerate(current)
                } | dict(position)
            offsets = positions.resolve(tx, record, position)
            if generation is not None:
                self.refuse_when_owned(tx, registration, "seek")
                consumers.seek(tx, registration, offsets, generation)
            return offsets

        offsets = dict(enumerate(self._database.run(work)))
        if not dry_run:
            logger.info(
                "consumer %r on queue %r is moved to other offsets",
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
        """Return the consumer's lag, in rows, compressed bytes and seconds.

        Parameters
        ----------
        queue
            The queue's name.

        Raises
        ------
        NotRegisteredError
        """

        def work(tx: Transaction) -> Lag:
            registration = self._find(tx, queue)
            record = catalog.find_queue(tx, queue)
            offsets = consumers.read_offsets(tx, registration)[0]
            partitions = catalog.partitions(tx, record)
            if len(partitions) != len(offsets):
                raise unreadable_record(
                    f"the offsets of consumer {self.name!r}",
                    ValueError(f"there are {len(offsets)}, and {len(partitions)} partitions"),
                )
            for partition, offset in zip(partitions, offsets, strict=True):
                consumers.require_reachable(registration, partition.partition, offset, partition.next_index)
            now = tx.now()
            return Lag(
                tuple(
                    _partition_lag(tx, record, partition, offset, now)
                    for partition, offset in zip(partitions, offsets, strict=True)
                )
            )

        return self._database.run(work, write=False)

    def _find(self, tx: Transaction, queue: str, *, lock: bool = False) -> Registration:
        return consumers.find_registration(tx, self.name, check_name("queue", queue), lock=lock)

    def _require_pulled(self, registration: Registration, partition: int) -> None:
        """Refuse to move past rows that have the same indexes as the pulled rows but are different rows."""
        queue, generation = registration.queue, registration.generation
        if self._pulled_generations.get((queue, partition), generation) != generation:
            raise OffsetConflictError(
                f"consumer {self.name!r} was moved on queue {queue!r}, or the queue was recreated, after the "
                f"rows of partition {partition} were pulled: pull again",
                condition="OFFSET_CONFLICT.ADVANCE",
                consumer=self.name,
                queue=queue,
                partition=partition,
            )

    def refuse_when_owned(self, tx: Transaction, registration: Registration, action: str) -> None:
        """Refuse to change a consumer that a running query owns."""
        if tx.owner_alive(registration.lock_name(self._database.uuid)):
            raise ConsumerInUseError(
                f"cannot {action} consumer {self.name!r} on queue {registration.queue!r}: a running query "
                "owns it; stop the query first",
                condition="CONSUMER_IN_USE.RUNNING_QUERY",
                consumer=self.name,
                queue=registration.queue,
            )


def _partition_lag(
    tx: Transaction, record: QueueRecord, partition: catalog.PartitionRecord, offset: int, now: int
) -> PartitionLag:
    row_index = max(offset, partition.first_index)
    unread = tx.one(
        "bytes_after", queue_id=record.queue_id, partition=partition.partition, row_index=row_index
    )
    appended_at = append_time_of(tx, record, partition.partition, row_index)
    seconds = 0.0 if appended_at is None else max(0.0, (now - appended_at) / 1e6)
    return PartitionLag(partition.partition, offset, partition.next_index, int(unread.bytes), seconds)


def _no_partition_error(registration: Registration, partition: int) -> PartitionNotFoundError:
    return PartitionNotFoundError(
        f"queue {registration.queue!r} has no partition {partition}", partition=partition
    )


def _store_position(position: Position) -> positions.Position:
    if isinstance(position, datetime):
        if position.tzinfo is None:
            raise InvalidPositionError(
                f"{position!r} has no time zone: add one, such as tzinfo=datetime.UTC",
                condition="INVALID_POSITION.NO_TIME_ZONE",
            )
        return micros_of(position)
    if isinstance(position, int):
        raise InvalidPositionError(
            f"a row index belongs to a partition: write {{partition: {position}}}",
            condition="INVALID_POSITION.PARTITION_NEEDED",
        )
    return position
