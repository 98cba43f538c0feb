"""``ExportSource``: the queue of an export, and the consumer that prevents trimming of unexported rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import (
    AlreadyExistsError,
    CheckpointMismatchError,
    ConsumerInUseError,
    DataLostError,
    NotRegisteredError,
)
from penstock.queue.consumer import Consumer
from penstock.queue.store import Store
from penstock.spark.schemas import source_schema, to_output_batch
from penstock.store.database import Transaction
from penstock.store.log import reading
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import PartitionRecord, QueueRecord


@dataclass(frozen=True)
class Plan:
    """The ranges of rows for one commit."""

    record: QueueRecord
    ranges: tuple[reading.Range, ...]

    @property
    def ends(self) -> dict[int, int]:
        return {row_range.partition: row_range.end for row_range in self.ranges}

    @property
    def rows(self) -> int:
        return sum(row_range.end - row_range.start for row_range in self.ranges)


@dataclass(frozen=True)
class Pending:
    """The rows that the table does not have yet."""

    starts: dict[int, int]
    """The index of the first row that the table lacks in each partition."""
    ends: dict[int, int]
    """The end index in each partition."""
    bytes: int
    """The approximate compressed size."""
    unrecorded: dict[int, int]
    """The starts of partitions for which the table has no position."""

    @property
    def rows(self) -> int:
        return sum(end - self.starts[part] for part, end in self.ends.items())


class ExportSource:
    """A queue, and a vital consumer with the positions of the table."""

    def __init__(self, store: Store, queue: str, consumer: str, metadata_columns: bool) -> None:
        self._store, self._name, self._with_metadata = store, queue, metadata_columns
        self.record: QueueRecord = store.queue(queue).record
        with suppress(AlreadyExistsError):
            # If a reply is lost, the consumer may already exist at the next attempt.
            store.database.retry(lambda: store.create_consumer(consumer))
        self.consumer: Consumer = store.consumer(consumer)
        self._refuse_consumer_of_query()
        self.consumer.register(queue, vital=True)
        self._consumer_positions: dict[int, int] = {}

    def _refuse_consumer_of_query(self) -> None:
        """Refuse a consumer that a query has used, because moving it would lose the query's offset."""
        with suppress(NotRegisteredError):
            if self.consumer.registration(self._name).app_id is not None:
                raise ConsumerInUseError(
                    f"a query has used consumer {self.consumer.name!r} on queue {self._name!r}: export as "
                    "another consumer",
                    condition="CONSUMER_IN_USE.QUERY",
                    consumer=self.consumer.name,
                    queue=self._name,
                )

    @property
    def schema(self) -> pa.Schema:
        return source_schema(self.record.schema, self._with_metadata)

    def ends(self) -> dict[int, int]:
        """Return the current end of each partition."""
        parts = self._store.database.run(lambda tx: catalog.partitions(tx, self.record), write=False)
        return {part.partition: part.next_index for part in parts}

    def pending(
        self, positions: Callable[[int], Mapping[int, int]], until: Mapping[int, int] | None = None
    ) -> Pending:
        """Return the rows that the table lacks; all rows of the queue if the table has no positions.

        ``positions`` returns the table's positions for a number of partitions. ``until`` limits each
        partition; by default its current end.
        """

        def read(tx: Transaction) -> tuple[list[PartitionRecord], QueueRecord]:
            registration = consumers.find_registration(tx, self.consumer.name, self._name)
            self.consumer.refuse_when_owned(tx, registration, "move")
            partitions = catalog.partitions(tx, self.record)
            # In this order, so that the record has all columns of the rows in these partitions.
            return partitions, catalog.reload_queue(tx, self.record)

        partitions, self.record = self._store.database.run(read, write=False)
        recorded = positions(len(partitions))
        starts = starts_of(self._name, partitions, recorded)
        ends, size = {}, 0
        for partition in partitions:
            start = starts[partition.partition]
            end_index = partition.next_index if until is None else until.get(partition.partition, start)
            end = ends[partition.partition] = max(min(end_index, partition.next_index), start)
            size += partition.bytes * (end - start) // max(partition.next_index - partition.first_index, 1)
        unrecorded = {partition: start for partition, start in starts.items() if partition not in recorded}
        return Pending(starts, ends, size, unrecorded)

    def plan(self, pending: Pending, most_bytes: int) -> Plan:
        """Choose rows from all partitions for the next commit; about ``most_bytes``, compressed."""
        fraction = min(1.0, most_bytes / max(pending.bytes, 1))
        ranges = []
        for part, end in pending.ends.items():
            start = pending.starts[part]
            if end > start:
                ranges.append(reading.Range(part, start, start + max(1, int((end - start) * fraction))))
        return Plan(self.record, tuple(ranges))

    def rows(self, plan: Plan) -> Iterator[pa.RecordBatch]:
        schema = self.schema
        for chunk in reading.read(
            self._store.database, plan.record, plan.ranges, with_runs=self._with_metadata
        ):
            yield to_output_batch(chunk, plan.record, schema)

    def follow(self, positions: Mapping[int, int], *, allow_backward: bool = False) -> None:
        """Move the consumer to the table's positions; backward only with ``allow_backward``."""
        if positions == self._consumer_positions:
            return
        backward: dict[int, int] = {}

        def work(tx: Transaction) -> None:
            registration = consumers.find_registration(tx, self.consumer.name, self._name, lock=True)
            self.consumer.refuse_when_owned(tx, registration, "move")
            offsets = consumers.read_offsets(tx, registration)[0]
            moves = [(part, offsets[part], new_offset) for part, new_offset in sorted(positions.items())]
            forward = [move for move in moves if move[2] > move[1]]
            backward.update(
                (part, new_offset) for part, old_offset, new_offset in moves if new_offset < old_offset
            )
            if forward:
                parts, old_offset, new = zip(*forward, strict=True)
                consumers.advance(
                    tx, registration, {"partition": parts, "old": old_offset, "new": new}, safe="new"
                )

        self._store.database.run(work, idempotent=True)
        if backward and allow_backward:
            self.consumer.seek(self._name, to=backward)
        self._consumer_positions = dict(positions)


def starts_of(
    queue: str, partitions: Sequence[PartitionRecord], recorded: Mapping[int, int]
) -> dict[int, int]:
    """Return the index of the first row that a table lacks in each partition.

    A table without positions is new, and gets all rows that the queue still has. Otherwise the table has
    positions for all partitions that existed at its last commit, and lacks all rows of newer partitions.

    Raises
    ------
    CheckpointMismatchError, DataLostError
    """
    starts = {}
    for part in partitions:
        start = recorded.get(part.partition, 0) if recorded else part.first_index
        partition_name = f"partition {part.partition} of queue {queue!r}"
        if start > part.next_index:
            raise CheckpointMismatchError(
                f"the table has the rows of {partition_name} up to {start}, and the queue ends at "
                f"{part.next_index}: the store was restored from an older backup. Also restore the table to "
                "a version from before that time, or export to another table",
                condition="CHECKPOINT_MISMATCH.QUEUE_BEHIND",
                queue=queue,
                partition=part.partition,
            )
        if start < part.first_index:
            raise DataLostError(
                f"the table has the rows of {partition_name} up to {start}, and the queue has rows from "
                f"{part.first_index}: the rows in between were trimmed. Export to another table",
                condition="DATA_LOST.TRIMMED",
                queue=queue,
                partition=part.partition,
            )
        starts[part.partition] = start
    return starts
