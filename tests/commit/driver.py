"""Simulation of a streaming query's driver. It runs one step at a time, so that a test can kill it between
any two steps.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

import penstock
from penstock.commit.micro_batch import BatchCommit, QueueTarget
from penstock.commit.offsets import QueueOffset, batch_ranges, pad
from penstock.commit.owner import Owner
from penstock.commit.protocol import append_task, commit_batch
from penstock.json_text import Json
from penstock.store import staging
from penstock.store.log import segmenting
from penstock.store.records.catalog import QueueRecord, queue_sink
from penstock.store.records.ledger import LedgerKey
from penstock.store.staging import Attempt

OUTPUT = pa.schema([("id", pa.int64()), ("nth", pa.int64())])
"""`nth` is how many rows of its source partition a stateful query had seen, 0 from a stateless one."""

State = Mapping[tuple[str, int], int]
Steps = Generator[str, int, None]
"""Yields the name of the state it has reached, takes a number to decide by."""


class LogConflictError(Exception):
    """Spark's error CONCURRENT_STREAM_LOG_UPDATE: another driver has written the same entry of the
    checkpoint.
    """


@dataclass
class Checkpoint:
    """The parts of a query that survive a crash: Spark's two logs and its state store."""

    stateful: bool
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    offsets: dict[int, str] = field(default_factory=dict)
    commits: dict[int, str] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)

    def write(self, entries: dict[int, str], batch_id: int, text: str) -> None:
        if batch_id in entries:
            raise LogConflictError
        entries[batch_id] = text

    def parsed(self, batch_id: int) -> list[Json]:
        return json.loads(self.offsets[batch_id]) if batch_id >= 0 else []


@dataclass
class Query:
    """The fixed parts of a query."""

    store: penstock.Store
    queues: tuple[str, ...]
    consumer: str
    sink: QueueRecord
    checkpoint: Checkpoint
    idempotent: bool = False


class Driver:
    """One run of a query."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.database = query.store.database
        self.owners: dict[str, Owner] = {}
        self.steps = self._run()
        self.error: Exception | None = None
        self.state = ""
        self.batches = 0

    def step(self, choice: int) -> None:
        """Advance to the next state. An error ends the driver, as it ends Spark's query."""
        try:
            self.state = self.steps.send(choice) if self.state else next(self.steps)
        except Exception as error:
            self.error = error
            self.die()

    def die(self) -> None:
        """Simulate SIGKILL: drop the generator at its current step, and release the locks as the kernel
        would.
        """
        self.steps.close()
        for owner in self.owners.values():
            owner.release()

    def _run(self) -> Steps:
        check = self.query.checkpoint
        for queue in self.query.queues:
            self.owners[queue] = Owner(self.database, self.query.consumer, queue)
        yield "OWN"
        last = max(check.offsets, default=-1)
        if last >= 0 and last not in check.commits:
            yield from self._batch(last)
        while True:
            choice = yield "READY"
            offsets = self._next(last, choice)
            if offsets is None:
                continue
            last += 1
            check.write(check.offsets, last, json.dumps(offsets))
            yield "OFFSETS"
            yield from self._batch(last)

    def _next(self, last: int, choice: int) -> list[Json] | None:
        """Act as Spark's constructNextBatch; return None if there is nothing to do."""
        before = self.query.checkpoint.parsed(last)
        found = []
        for place, queue in enumerate(self.query.queues):
            found.append(self._latest(queue, before[place] if before else None, choice))
        without_data = self.query.checkpoint.stateful and last >= 0 and choice % 5 == 0
        with_data = any(not offset.empty for offset in batch_ranges(found, before))
        return found if with_data or without_data else None

    def _latest(self, queue: str, before: Json | None, choice: int) -> Json | None:
        owner = self.owners[queue]
        began = QueueOffset.of(before) if before else self._initial(queue)
        assert began is not None
        _, there, draining = owner.observe(began)
        start = pad(began.end, len(there))
        most = 1 + choice % 4
        end = tuple(min(part.next_index, first + most) for part, first in zip(there, start, strict=True))
        if draining or end == start:
            return before or began.to_dict()
        return replace(began, epoch=owner.epoch, start=start, end=end).to_dict()

    def _initial(self, queue: str) -> QueueOffset:
        owner = self.owners[queue]
        start = owner.positions()
        return QueueOffset(
            self.query.store.uuid, queue, self.query.consumer, owner.generation, owner.epoch, start, start
        )

    def _batch(self, batch_id: int) -> Iterator[str]:
        check = self.query.checkpoint
        ranges = batch_ranges(check.parsed(batch_id), check.parsed(batch_id - 1))
        tasks: list[tuple[str, list[int]]] = []
        for offset in ranges:
            if not offset.empty:
                owner = self.owners[offset.queue]
                offset.require(self.query.store.uuid, offset.queue, self.query.consumer, owner.generation)
                owner.plan(offset)
                tasks += [(offset.queue, task) for task in self._cut(offset)]
                yield f"PLANNED {batch_id}"
        attempts, counts = {}, {}
        state = dict(check.states.get(batch_id - 1, {}))
        for number, (queue, (partition, start, end)) in enumerate(tasks):
            ids = self.query.store.queue(queue).read(partition, start, end)["id"].to_pylist()
            rows = self._transform(state, queue, partition, ids)
            counts[number] = len(rows)
            attempts |= self._write(batch_id, number, rows)
            yield f"STAGED {batch_id}.{number}"
        if not tasks:
            # Rows that a query emits because of time alone, such as windows that close.
            attempts |= self._write(batch_id, 0, [(tick(check.id, batch_id), 0)])
            counts[0] = 1
        check.states[batch_id] = state
        yield f"STAGED {batch_id}"
        self._commit(batch_id, ranges, attempts, counts)
        self.batches += 1
        yield f"COMMITTED {batch_id}"
        check.write(check.commits, batch_id, "")
        yield f"LOGGED {batch_id}"

    def _cut(self, offset: QueueOffset) -> list[list[int]]:
        """Divide the rows into tasks as the offset says, in every run."""
        size = 1 + offset.epoch % 3
        return [
            [partition, at, min(at + size, end)]
            for partition, (start, end) in enumerate(zip(offset.start, offset.end, strict=True))
            for at in range(start, end, size)
        ]

    def _transform(
        self, state: dict[tuple[str, int], int], queue: str, partition: int, ids: list[int]
    ) -> list[tuple[int, int]]:
        if not self.query.checkpoint.stateful:
            return [(i, 0) for i in ids]
        seen = state.get((queue, partition), 0)
        state[queue, partition] = seen + len(ids)
        return [(i, seen + n + 1) for n, i in enumerate(ids)]

    def _write(self, batch_id: int, task: int, rows: list[tuple[int, int]]) -> dict[str, int]:
        query = self.query
        table = pa.table([[i for i, _ in rows], [n for _, n in rows]], schema=OUTPUT)
        segments = segmenting.to_segments(table, task % query.sink.partitions)
        if query.idempotent:
            key = LedgerKey(queue_sink(query.sink), query.checkpoint.id, batch_id, task)
            append_task(self.database, query.sink, key, segments, origin=query.checkpoint.id)
            return {}
        attempt = str(uuid.uuid4())
        for at in (attempt, f"twin of {attempt}"):
            # A speculative copy stages the same rows and is not acknowledged.
            self.database.run(
                lambda tx, at=at: staging.stage(
                    tx, query.sink, Attempt(query.checkpoint.id, batch_id, task, at), segments, 0
                )
            )
        return {attempt: len(segments)}

    def _commit(
        self, batch_id: int, ranges: list[QueueOffset], attempts: dict[str, int], counts: dict[int, int]
    ) -> None:
        query = self.query
        batch = BatchCommit(
            QueueTarget(query.sink),
            query.checkpoint.id,
            batch_id,
            sum(counts.values()),
            origin=query.checkpoint.id,
            sources=ranges,
            attempts=attempts,
            tasks=counts if query.idempotent else None,
            stateful=query.checkpoint.stateful,
        )
        commit_batch(self.database, batch)
        if batch_id % 3 == 0:
            # Commit again, as after a commit with an unknown outcome.
            assert commit_batch(self.database, batch) is None


def tick(checkpoint: str, batch_id: int) -> int:
    """Return the row that a micro-batch without new rows emits: a negative number, different for each
    micro-batch.
    """
    return -(int(uuid.UUID(checkpoint)) % 10**12) * 1000 - batch_id - 1
