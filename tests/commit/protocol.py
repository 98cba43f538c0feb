"""The calls to the protocol that a streaming query makes, without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

import penstock
from penstock.commit.micro_batch import BatchCommit, QueueTarget
from penstock.commit.offsets import QueueOffset
from penstock.commit.owner import Owner
from penstock.commit.protocol import commit_batch
from penstock.store import staging
from penstock.store.log import segmenting
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.consumers import Registration
from penstock.store.staging import Attempt

SCHEMA = pa.schema([("id", pa.int64())])


def numbers(start: int, end: int) -> pa.Table:
    return pa.table({"id": pa.array(range(start, end), pa.int64())})


def rows_of(queue: penstock.Queue) -> list[int]:
    """Return all ids in a queue, partition by partition."""
    queue.refresh()
    return [i for p in range(queue.partitions) for i in queue.read(p, 0)["id"].to_pylist()]


def stage(
    store: penstock.Store, sink: QueueRecord, app_id: str, batch_id: int, task: int, ids: Sequence[int]
) -> dict[str, int]:
    """Stage rows as one attempt of a task; return what the task reports to the driver."""
    attempt = str(uuid.uuid4())
    segments = segmenting.to_segments(pa.table({"id": pa.array(ids, pa.int64())}), task % sink.partitions)
    store.database.run(
        lambda tx: staging.stage(tx, sink, Attempt(app_id, batch_id, task, attempt), segments, 0)
    )
    return {attempt: len(segments)}


@dataclass
class Pair:
    """A source queue with a consumer, and a sink queue. Both are in one store unless `into` is another
    store.
    """

    store: penstock.Store
    source: penstock.Queue
    sink: penstock.Queue
    into: penstock.Store
    consumer: str = "billing"

    def own(self, *, moved_by_sink: bool = False) -> Owner:
        return Owner(
            self.store.database,
            self.consumer,
            self.source.name,
            moved_by_sink=moved_by_sink,
        )

    def offset(self, owner: Owner, start: Sequence[int], end: Sequence[int]) -> QueueOffset:
        return QueueOffset(
            self.store.uuid,
            self.source.name,
            self.consumer,
            owner.generation,
            owner.epoch,
            tuple(start),
            tuple(end),
            moved_by_sink=owner.moved_by_sink,
            owner=owner.identity,
        )

    def planned(self, owner: Owner, start: Sequence[int], end: Sequence[int]) -> QueueOffset:
        """Plan a micro-batch, and return its offset."""
        offset = self.offset(owner, start, end)
        owner.plan(offset)
        return offset

    def batch(
        self, app_id: str, batch_id: int, *sources: QueueOffset, ids: Sequence[int] | None = (), **more: Any
    ) -> BatchCommit:
        """Return a micro-batch whose tasks have staged `ids`, or the rows of its ranges if that is None."""
        record = self.into.queue(self.sink.name).record
        given = [i for source in sources for i in self.ids(source)] if ids is None else ids
        attempts = stage(self.into, record, app_id, batch_id, 0, given) if given else {}
        fields: dict[str, Any] = {"origin": app_id, "attempts": attempts, **more}
        return BatchCommit(QueueTarget(record), app_id, batch_id, len(given), sources=sources, **fields)

    def ids(self, source: QueueOffset) -> list[int]:
        """Return the source's rows in a range."""
        tables = [
            self.source.read(partition, start, end)
            for partition, (start, end) in enumerate(zip(source.start, source.end, strict=True))
        ]
        return [i for table in tables for i in table["id"].to_pylist()]

    def commit(self, batch: BatchCommit) -> object:
        return commit_batch(self.into.database, batch)

    def offsets(self) -> list[int]:
        return list(self.store.consumer(self.consumer).offsets(self.source.name).values())

    def registration(self) -> Registration:
        return self.store.consumer(self.consumer).registration(self.source.name)

    def safe(self) -> list[int]:
        keys: Mapping[str, int] = self.registration().keys
        found = self.store.database.run(lambda tx: tx.all("read_positions", **keys), write=False)
        return [row.safe_index for row in found]


def make_pair(
    store: penstock.Store,
    *,
    partitions: int = 2,
    into: penstock.Store | None = None,
    rows: int = 20,
    **sink: Any,
) -> Pair:
    """Create the source `orders` with `rows` ids in each partition (0.., 1000..), the consumer `billing` and
    the sink `big`.
    """
    source = store.create_queue("orders", SCHEMA, partitions=partitions)
    for partition in range(partitions):
        source.append(numbers(1000 * partition, 1000 * partition + rows), partition=partition)
    store.create_consumer("billing").register("orders", vital=True)
    target = into or store
    return Pair(store, source, target.create_queue("big", SCHEMA, **sink), target)


def with_attempts(batch: BatchCommit, attempts: Mapping[str, int]) -> BatchCommit:
    return replace(batch, attempts=attempts)
