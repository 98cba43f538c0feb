"""Clients of the simulated stores: producers, programs that process rows, and the auditor's reader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from penstock.errors import (
    CommitOutcomeUnknownError,
    NotFoundError,
    OffsetConflictError,
    PenstockError,
    ProducerFencedError,
)
from penstock.queue.store import Store, open_store
from tests.simulation.database import SimDatabase
from tests.simulation.machine import Machine
from tests.simulation.scenario import CONSUMER, PROGRAM, SCHEMA, SINK, SOURCE, TABLE, Scenario
from tests.simulation.scheduler import Process
from tests.simulation.server import Server
from tests.support.auditor import FIRST_FOREIGN_ID, History, Snapshot

Row = tuple[int, int]
"""Id and key."""

KEYS = 12
_RETRY_SECONDS = 1.0


@dataclass
class _Progress:
    """How far one process of a producer has come."""

    sequence: int = -1
    """The number of the append in flight, or of the last one."""
    pending: tuple[int, ...] = ()
    """The ids of the append in flight."""
    partition: int | None = None


class Producer:
    """Client that appends to a queue through a producer session and retries each append until it succeeds.

    A restarted producer resumes with the append that was in flight, as if it read its input from a file.
    """

    def __init__(
        self,
        machine: Machine,
        history: History,
        url: str,
        queue: str,
        *,
        first_id: int,
        appends: int,
        max_rows_per_append: int,
        by_key: bool,
    ) -> None:
        self._machine, self._world, self._history = machine, machine.world, history
        self._url, self._queue, self._by_key = url, queue, by_key
        self._next_id, self._remaining_appends, self._max_rows = first_id, appends, max_rows_per_append
        self._name = f"producer {len(machine.world.processes)}"
        self._progress = _Progress()
        self.finished = False
        self._start_process()

    def _start_process(self) -> None:
        self.process = process = self._world.start_process(f"producer of {self._queue}")
        process.spawn(lambda: self._run(process, self._progress), "append")

    def restart(self) -> None:
        """Take the session over in a new process; the old one may still run."""
        if not self.finished:
            self._progress = replace(self._progress)
            self._start_process()

    def _run(self, process: Process, progress: _Progress) -> None:
        session: Any = None
        while self._remaining_appends > 0 or progress.pending:
            session = session or self._open_session(process)
            if session is not None and not progress.pending:
                # The previous process may have appended more before it lost the session.
                progress.sequence = max(progress.sequence, session.sequence) + 1
                progress.pending = self._new_ids()
                progress.partition = None if self._by_key else self._draw(16)
            if session is None:
                return
            if not self._append(progress, session):
                session = None
                continue
            progress.pending = ()
            self._world.sleep(self._draw(4) * 0.4)
        self.finished = self.finished or process is self.process

    def _new_ids(self) -> tuple[int, ...]:
        self._remaining_appends -= 1
        ids = tuple(range(self._next_id, self._next_id + 1 + self._draw(self._max_rows)))
        self._next_id += len(ids)
        self._history.keys.update((row_id, row_id * 7 % KEYS) for row_id in ids)
        if self._next_id < FIRST_FOREIGN_ID:
            self._history.appends.append(ids)
        return ids

    def _open_session(self, process: Process) -> Any:
        """Open the session; return None if a newer process of the producer has been started."""
        while process is self.process:
            try:
                session = open_store(self._url).producer(self._queue, self._name)
            except PenstockError:
                self._world.sleep(_RETRY_SECONDS)
                continue
            # A replaced process must not use sequence numbers that its successor uses for other rows.
            return session if process is self.process else None
        return None

    def _append(self, progress: _Progress, session: Any) -> bool:
        """Append the pending rows until it succeeds; return False when the session must be opened again."""
        ids = progress.pending
        table = pa.table([list(ids), [self._history.keys[row_id] for row_id in ids]], schema=SCHEMA)
        while True:
            try:
                partition = None if progress.partition is None else progress.partition % self._partitions()
                session.append(table, progress.sequence, partition=partition)
                break
            except ProducerFencedError:
                # The new process may have used this sequence number, so the outcome remains unknown.
                progress.pending = ()
                return False
            except NotFoundError:
                # The queue was recreated, or a backup was restored.
                self._world.sleep(_RETRY_SECONDS)
                return False
            except PenstockError:
                self._world.sleep(_RETRY_SECONDS)
        (self._history.acknowledged if ids[0] < FIRST_FOREIGN_ID else self._history.foreign).update(ids)
        return True

    def _partitions(self) -> int:
        return open_store(self._url).queue(self._queue).partitions

    def _draw(self, count: int) -> int:
        return self._machine.random.randrange(count)


class Program:
    """Python program that pulls rows and advances a consumer, in competition with other instances."""

    def __init__(self, machine: Machine, history: History, url: str) -> None:
        self._machine, self._world, self._history, self._url = machine, machine.world, history, url
        self.process = machine.world.start_process("program")
        self.process.spawn(self._run, "pull")

    def _run(self) -> None:
        while True:
            try:
                self._process_partitions()
            except PenstockError as error:
                self._world.note(f"the program got an error: {error}")
            self._world.sleep(0.5 + self._machine.random.randrange(4) * 0.5)

    def _process_partitions(self) -> None:
        store = open_store(self._url)
        consumer = store.consumer(PROGRAM)
        for partition in consumer.offsets(SOURCE):
            pull = consumer.pull(SOURCE, partition, max_rows=1 + self._machine.random.randrange(4))
            ids = pull.table["id"].to_pylist()
            if not ids:
                continue
            self._history.possibly_processed.update(ids)
            try:
                consumer.advance(SOURCE, partition, old=pull.start, new=pull.end)
            except CommitOutcomeUnknownError:
                continue
            except OffsetConflictError:
                # Another instance has processed them.
                self._history.possibly_processed.subtract(ids)
                continue
            self._history.possibly_processed.subtract(ids)
            self._history.processed.update(ids)


class SnapshotReader:
    """Reads the source, the sink and the consumer's offsets at one moment, while no task runs."""

    def __init__(self, machine: Machine, scenario: Scenario, source: Server, sink: Server) -> None:
        self._scenario, self._source, self._sink = scenario, source, sink
        self._world = machine.world
        self._process = machine.world.start_process("auditor")
        self._stores: dict[int, Store] = {}
        self._cache: dict[tuple[int, int, int, int], tuple[int, list[Row]]] = {}
        """The first index and the rows read earlier, by server, number of restores, queue and partition."""

    def snapshot(self, *, use_cache: bool = True) -> Snapshot:
        """Return what a reader can read at this moment.

        Parameters
        ----------
        use_cache
            Whether to return rows that were read earlier without reading them again.
        """
        if not use_cache:
            self._cache.clear()
        with self._world.without_steps():
            return self._read_snapshot()

    def miscounted_partitions(self) -> list[str]:
        """Return the partitions whose record has a wrong number of segments or bytes."""
        with self._world.without_steps():
            return [
                f"partition {number} of {name}"
                for server, name in ((self._source, SOURCE), (self._sink, SINK))
                if (queue := self._queue(server, name)) is not None
                for number in range(queue.partitions)
                if not _is_counted_correctly(server, queue, number)
            ]

    def _read_snapshot(self) -> Snapshot:
        source = self._queue(self._source, SOURCE)
        offsets = None
        scenario = self._scenario
        if scenario.consumer and source is not None:
            try:
                offsets = list(self._store(self._source).consumer(CONSUMER).offsets(SOURCE).values())
            except PenstockError:
                offsets = None
        partitions = [] if source is None else self._read_queue(self._source, source)
        safe_offsets = self._safe_offsets() if scenario.consumer and source is not None else None
        return Snapshot(
            source=[[row[0] for row in rows] for _, rows in partitions],
            first_indexes=[first for first, _ in partitions],
            sink=self._read_sink(),
            offsets=offsets,
            safe_offsets=safe_offsets,
        )

    def _safe_offsets(self) -> list[int] | None:
        store = self._store(self._source)
        try:
            keys = store.consumer(CONSUMER).registration(SOURCE).keys
        except PenstockError:
            return None
        rows = store.database.run(lambda tx: tx.all("read_positions", **keys), write=False)
        return [row.safe_index for row in rows]

    def _read_sink(self) -> list[list[Row]]:
        if self._scenario.sink == "table":
            return [self._read_table()]
        sink = self._queue(self._sink, SINK)
        if sink is None:
            return []
        return [rows for _, rows in self._read_queue(self._sink, sink)]

    def _read_table(self) -> list[Row]:
        exists = self._sink.read_committed("select count(*) from sqlite_schema where name = ?", (TABLE,))
        if not exists[0][0]:
            return []
        return self._sink.read_committed(f"select id, key from {TABLE}")

    def _read_queue(self, server: Server, queue: Any) -> list[tuple[int, list[Row]]]:
        """Return the first index and the rows of each partition."""
        queue.refresh()
        return [self._read_partition(server, queue, partition) for partition in range(queue.partitions)]

    def _read_partition(self, server: Server, queue: Any, partition: int) -> tuple[int, list[Row]]:
        key = (id(server), server.restores, queue.record.queue_id, partition)
        record = queue._partition(partition)
        first, rows = self._cache.get(key, (record.first_index, []))
        rows = rows[record.first_index - first :]
        if record.next_index > record.first_index + len(rows):
            table = queue.read(partition, record.first_index + len(rows))
            rows = rows + list(zip(table["id"].to_pylist(), table["key"].to_pylist(), strict=True))
        self._cache[key] = (record.first_index, rows)
        return record.first_index, rows

    def _queue(self, server: Server, name: str) -> Any:
        try:
            return self._store(server).queue(name)
        except PenstockError:
            return None

    def _store(self, server: Server) -> Store:
        store = self._stores.get(id(server))
        if store is None:
            store = self._stores[id(server)] = Store(SimDatabase(server, self._process))
        return store


def _is_counted_correctly(server: Server, queue: Any, partition: int) -> bool:
    record = queue._partition(partition)
    actual = server.read_committed(
        "select count(*), coalesce(sum(bytes), 0) from main.penstock_segment "
        "where queue_id = ? and partition = ?",
        (queue.record.queue_id, partition),
    )
    return actual == [(record.segments, record.bytes)]
