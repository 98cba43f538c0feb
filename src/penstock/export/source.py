"""The rows of a queue that an export reads, and the consumer that keeps them from being trimmed."""

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
    """Rows for one commit."""

    record: QueueRecord
    ranges: tuple[reading.Range, ...]

    @property
    def ends(self) -> dict[int, int]:
        return {asked.partition: asked.end for asked in self.ranges}

    @property
    def rows(self) -> int:
        return sum(asked.end - asked.start for asked in self.ranges)


@dataclass(frozen=True)
class Pending:
    """The rows that the table does not have yet."""

    starts: dict[int, int]
    """The first row of each partition that the table lacks."""
    ends: dict[int, int]
    """Where to stop in each."""
    bytes: int
    """Their approximate size, compressed."""
    unrecorded: dict[int, int]
    """The starts of partitions whose positions the table does not record."""

    @property
    def rows(self) -> int:
        return sum(end - self.starts[part] for part, end in self.ends.items())


class ExportSource:
    """A queue, and a vital consumer that follows the table."""

    def __init__(self, store: Store, queue: str, consumer: str, metadata_columns: bool) -> None:
        self._store, self._name, self._with_metadata = store, queue, metadata_columns
        self.record: QueueRecord = store.queue(queue).record
        with suppress(AlreadyExistsError):
            store.create_consumer(consumer)
        self.consumer: Consumer = store.consumer(consumer)
        self._refuse_queries_consumer()
        self.consumer.register(queue, vital=True)
        self._followed: dict[int, int] = {}

    def _refuse_queries_consumer(self) -> None:
        """Refuse a consumer that a query has used: moving it would lose the query's place."""
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
        """Return where the partitions end now."""
        parts = self._store.database.run(lambda tx: catalog.partitions(tx, self.record), write=False)
        return {part.partition: part.next_index for part in parts}

    def pending(
        self, positions: Callable[[int], Mapping[int, int]], until: Mapping[int, int] | None = None
    ) -> Pending:
        """Return what a table lacks: without positions, all rows of the queue.

        ``positions`` gives the table's positions for a number of partitions. ``until`` are the ends of the
        partitions to look at, by default those that they have now.
        """

        def read(tx: Transaction) -> tuple[list[PartitionRecord], QueueRecord]:
            registration = consumers.find_registration(tx, self.consumer.name, self._name)
            self.consumer.refuse_when_owned(tx, registration, "move")
            partitions = catalog.partitions(tx, self.record)
            # In this order, so that the record has all columns of those rows.
            return partitions, catalog.reload_queue(tx, self.record)

        partitions, self.record = self._store.database.run(read, write=False)
        known = positions(len(partitions))
        starts = starts_of(self._name, partitions, known)
        ends, size = {}, 0
        for part in partitions:
            start = starts[part.partition]
            wanted = part.next_index if until is None else until.get(part.partition, start)
            end = ends[part.partition] = max(min(wanted, part.next_index), start)
            size += part.bytes * (end - start) // max(part.next_index - part.first_index, 1)
        unrecorded = {part: start for part, start in starts.items() if part not in known}
        return Pending(starts, ends, size, unrecorded)

    def plan(self, pending: Pending, most_bytes: int) -> Plan:
        """Choose rows from all partitions for the next commit, of about ``most_bytes`` compressed."""
        share = min(1.0, most_bytes / max(pending.bytes, 1))
        ranges = []
        for part, end in pending.ends.items():
            start = pending.starts[part]
            if end > start:
                ranges.append(reading.Range(part, start, start + max(1, int((end - start) * share))))
        return Plan(self.record, tuple(ranges))

    def rows(self, plan: Plan) -> Iterator[pa.RecordBatch]:
        schema = self.schema
        for chunk in reading.read(
            self._store.database, plan.record, plan.ranges, with_runs=self._with_metadata
        ):
            yield to_output_batch(chunk, plan.record, schema)

    def follow(self, positions: Mapping[int, int], *, back: bool = False) -> None:
        """Move the consumer to the table's positions; backwards only with ``back``."""
        if positions == self._followed:
            return
        behind: dict[int, int] = {}

        def work(tx: Transaction) -> None:
            registration = consumers.find_registration(tx, self.consumer.name, self._name, lock=True)
            self.consumer.refuse_when_owned(tx, registration, "move")
            offsets = consumers.read_offsets(tx, registration)[0]
            moves = [(part, offsets[part], to) for part, to in sorted(positions.items())]
            ahead = [move for move in moves if move[2] > move[1]]
            behind.update((part, to) for part, old, to in moves if to < old)
            if ahead:
                parts, old, new = zip(*ahead, strict=True)
                consumers.advance(tx, registration, {"partition": parts, "old": old, "new": new}, safe="new")

        self._store.database.run(work, idempotent=True)
        if behind and back:
            self.consumer.seek(self._name, to=behind)
        self._followed = dict(positions)


def starts_of(queue: str, partitions: Sequence[PartitionRecord], known: Mapping[int, int]) -> dict[int, int]:
    """Return the first row of each partition that a table with some positions lacks.

    A table without positions is new, and gets all rows that the queue still has. A table with positions has
    them for all partitions that existed at its last commit. All rows of a partition added later are new.

    Raises
    ------
    CheckpointMismatchError, DataLostError
    """
    starts = {}
    for part in partitions:
        start = known.get(part.partition, 0) if known else part.first_index
        about = f"partition {part.partition} of queue {queue!r}"
        if start > part.next_index:
            raise CheckpointMismatchError(
                f"the table has the rows of {about} up to {start}, and the queue ends at {part.next_index}: "
                "the store was restored from an older backup. Restore the table from before that time too, "
                "or export to another table",
                condition="CHECKPOINT_MISMATCH.QUEUE_BEHIND",
                queue=queue,
                partition=part.partition,
            )
        if start < part.first_index:
            raise DataLostError(
                f"the table has the rows of {about} up to {start}, and the queue has them from "
                f"{part.first_index}: those in between were trimmed. Export to another table",
                condition="DATA_LOST.TRIMMED",
                queue=queue,
                partition=part.partition,
            )
        starts[part.partition] = start
    return starts
