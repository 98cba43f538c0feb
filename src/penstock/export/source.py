"""The rows of a queue that an export reads, and the consumer that keeps them from being trimmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import AlreadyExistsError, CheckpointMismatchError, DataLostError
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
    """What the table does not have yet."""

    partitions: tuple[PartitionRecord, ...]
    starts: dict[int, int]

    @property
    def rows(self) -> int:
        return sum(part.next_index - self.starts[part.partition] for part in self.partitions)

    @property
    def bytes(self) -> int:
        """About how many compressed bytes that is."""
        return sum(
            part.bytes
            * (part.next_index - self.starts[part.partition])
            // max(part.next_index - part.first_index, 1)
            for part in self.partitions
        )


class ExportSource:
    """A queue, and a vital consumer that follows the table."""

    def __init__(self, store: Store, queue: str, consumer: str, metadata_columns: bool) -> None:
        self._store, self._name, self._with_metadata = store, queue, metadata_columns
        self.record: QueueRecord = store.queue(queue).record
        with suppress(AlreadyExistsError):
            store.create_consumer(consumer)
        self.consumer: Consumer = store.consumer(consumer)
        self.consumer.register(queue, vital=True)
        self._followed: dict[int, int] = {}

    @property
    def schema(self) -> pa.Schema:
        return source_schema(self.record.schema, self._with_metadata)

    def ends(self) -> dict[int, int]:
        """Return where the partitions end now."""
        parts = self._store.database.run(lambda tx: catalog.partitions(tx, self.record), write=False)
        return {part.partition: part.next_index for part in parts}

    def pending(
        self, positions: Callable[[int], Mapping[int, int]], until: Mapping[int, int] | None
    ) -> Pending:
        """Return what a table lacks; one without positions lacks all rows that are there.

        ``positions`` gives the table's positions for a number of partitions. ``until`` are the ends of the
        partitions to look at, by default those that they have now.
        """

        def read(tx: Transaction) -> tuple[list[PartitionRecord], list[int], QueueRecord]:
            registration = consumers.find_registration(tx, self.consumer.name, self._name)
            partitions = catalog.partitions(tx, self.record)
            # In this order: the rows of those partitions have no columns that the record lacks.
            return partitions, consumers.read_offsets(tx, registration)[0], catalog.reread(tx, self.record)

        partitions, offsets, self.record = self._store.database.run(read, write=False)
        known, parts, starts = positions(len(partitions)), [], {}
        # Partitions may have been added in between.
        for part, offset in zip(partitions, offsets, strict=False):
            begin = min(max(offset, part.first_index), part.next_index) if known else part.first_index
            start = starts[part.partition] = known.get(part.partition, begin)
            self._require_there(part, start)
            end = part.next_index if until is None else until.get(part.partition, start)
            parts.append(replace(part, next_index=max(min(end, part.next_index), start)))
        return Pending(tuple(parts), starts)

    def _require_there(self, part: PartitionRecord, start: int) -> None:
        about = f"partition {part.partition} of queue {self._name!r}"
        if start > part.next_index:
            raise CheckpointMismatchError(
                f"the table has the rows of {about} up to {start}, and the queue ends at {part.next_index}: "
                "the store was restored from an older backup. Restore the table from before that time too, "
                "or export to another table",
                condition="CHECKPOINT_MISMATCH.QUEUE_BEHIND",
                queue=self._name,
                partition=part.partition,
            )
        if start < part.first_index:
            raise DataLostError(
                f"the table has the rows of {about} up to {start}, and the queue has them from "
                f"{part.first_index}: those in between were trimmed. Export to another table",
                condition="DATA_LOST.TRIMMED",
                queue=self._name,
                partition=part.partition,
            )

    def plan(self, pending: Pending, most_bytes: int) -> Plan:
        """Choose the rows of the next commit: about so many compressed bytes, from all partitions."""
        share = min(1.0, most_bytes / max(pending.bytes, 1))
        ranges = []
        for part in pending.partitions:
            start = pending.starts[part.partition]
            count = part.next_index - start
            if count:
                ranges.append(reading.Range(part.partition, start, start + max(1, int(count * share))))
        return Plan(self.record, tuple(ranges))

    def rows(self, plan: Plan) -> Iterator[pa.RecordBatch]:
        schema = self.schema
        for chunk in reading.read(
            self._store.database, plan.record, plan.ranges, with_runs=self._with_metadata
        ):
            yield to_output_batch(chunk, plan.record, schema)

    def follow(self, positions: Mapping[int, int]) -> None:
        """Move the consumer to where the table is."""
        if positions == self._followed:
            return
        back: dict[int, int] = {}

        def work(tx: Transaction) -> None:
            registration = consumers.find_registration(tx, self.consumer.name, self._name, lock=True)
            self.consumer.refuse_when_owned(tx, registration, "move")
            offsets = consumers.read_offsets(tx, registration)[0]
            moves = [(part, offsets[part], to) for part, to in sorted(positions.items())]
            ahead = [move for move in moves if move[2] > move[1]]
            back.update((part, to) for part, old, to in moves if to < old)
            if ahead:
                parts, old, new = zip(*ahead, strict=True)
                consumers.advance(tx, registration, {"partition": parts, "old": old, "new": new}, safe="new")

        self._store.database.run(work, idempotent=True)
        if back:
            self.consumer.seek(self._name, to=back)
        self._followed = dict(positions)
