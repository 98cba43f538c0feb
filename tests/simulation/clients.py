"""Producers, programs that read for themselves, and what reads everything at one moment."""

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
from tests.simulation.scenario import CONSUMER, FOREIGN, PROGRAM, SCHEMA, SINK, SOURCE, TABLE, Scenario
from tests.simulation.scheduler import Process
from tests.simulation.server import Server
from tests.simulation.virtual import Machine
from tests.support.auditor import History, Snapshot

Row = tuple[int, int]
"""Id and key."""

KEYS = 12
_RETRY_SECONDS = 1.0


@dataclass
class _Progress:
    """What one holder of a producer session knows."""

    sequence: int = -1
    """The number of the append in flight, or of the last one."""
    pending: tuple[int, ...] = ()
    """Its ids, until it is acknowledged."""
    partition: int | None = None


class Producer:
    """Appends to one queue through a producer session, each append until it is acknowledged.

    What its next append is, it knows even after a crash, as one that reads a file or a topic does.
    """

    def __init__(
        self,
        machine: Machine,
        history: History,
        url: str,
        queue: str,
        *,
        first: int,
        appends: int,
        most: int,
        by_key: bool,
    ) -> None:
        self._machine, self._world, self._history = machine, machine.world, history
        self._url, self._queue, self._by_key = url, queue, by_key
        self._next, self._left, self._most = first, appends, most
        self._name = f"producer {len(machine.world.processes)}"
        self._known = _Progress()
        self.ended = False
        self._begin()

    def _begin(self) -> None:
        self.process = process = self._world.start(f"producer of {self._queue}")
        process.spawn(lambda: self._run(process, self._known), "append")

    def restart(self) -> None:
        """Somebody else takes the session over; whoever had it may not know."""
        if not self.ended:
            self._known = replace(self._known)
            self._begin()

    def _run(self, process: Process, known: _Progress) -> None:
        session: Any = None
        while self._left > 0 or known.pending:
            session = session or self._opened(process)
            if session is not None and not known.pending:
                # Somebody may have gone on for a while before the session was taken over.
                known.sequence = max(known.sequence, session.sequence) + 1
                known.pending, known.partition = self._ids(), None if self._by_key else self._draw(16)
            if session is None:
                return
            if not self._appended(process, known, session):
                session = None
                continue
            known.pending = ()
            self._world.sleep(self._draw(4) * 0.4)
        self.ended = self.ended or process is self.process

    def _ids(self) -> tuple[int, ...]:
        self._left -= 1
        ids = tuple(range(self._next, self._next + 1 + self._draw(self._most)))
        self._next += len(ids)
        self._history.keys.update((each, each * 7 % KEYS) for each in ids)
        if self._next < FOREIGN:
            self._history.appends.append(ids)
        return ids

    def _opened(self, process: Process) -> Any:
        """The session; None if another process has it by now."""
        while process is self.process:
            try:
                session = open_store(self._url).producer(self._queue, self._name)
            except PenstockError:
                self._world.sleep(_RETRY_SECONDS)
                continue
            # Whoever was replaced meanwhile must not use numbers that its successor has for other rows.
            return session if process is self.process else None
        return None

    def _appended(self, process: Process, known: _Progress, session: Any) -> bool:
        """Append what is pending, as often as it takes; False when the session has to be opened again."""
        ids = known.pending
        table = pa.table([list(ids), [self._history.keys[each] for each in ids]], schema=SCHEMA)
        while True:
            try:
                partition = None if known.partition is None else known.partition % self._partitions()
                session.append(table, known.sequence, partition=partition)
                break
            except ProducerFencedError:
                # Whoever has the session now may have used the number: nothing says that these rows are in.
                known.pending = ()
                return False
            except NotFoundError:
                # The queue was recreated, or a backup was restored.
                self._world.sleep(_RETRY_SECONDS)
                return False
            except PenstockError:
                self._world.sleep(_RETRY_SECONDS)
        (self._history.acknowledged if ids[0] < FOREIGN else self._history.foreign).update(ids)
        return True

    def _partitions(self) -> int:
        """How many there are by now."""
        return open_store(self._url).queue(self._queue).partitions

    def _draw(self, count: int) -> int:
        return self._machine.random.randrange(count)


class Program:
    """A Python program that pulls rows and advances its consumer; other instances compete for the rows."""

    def __init__(self, machine: Machine, history: History, url: str) -> None:
        self._machine, self._world, self._history, self._url = machine, machine.world, history, url
        self.process = machine.world.start("program")
        self.process.spawn(self._run, "pull")

    def _run(self) -> None:
        while True:
            try:
                self._round()
            except PenstockError as error:
                self._world.note(f"the program gets: {error}")
            self._world.sleep(0.5 + self._machine.random.randrange(4) * 0.5)

    def _round(self) -> None:
        store = open_store(self._url)
        consumer = store.consumer(PROGRAM)
        for partition in consumer.offsets(SOURCE):
            pull = consumer.pull(SOURCE, partition, max_rows=1 + self._machine.random.randrange(4))
            ids = pull.table["id"].to_pylist()
            if not ids:
                continue
            self._history.perhaps.update(ids)
            try:
                consumer.advance(SOURCE, partition, old=pull.start, new=pull.end)
            except CommitOutcomeUnknownError:
                continue
            except OffsetConflictError:
                # The other instance has them.
                self._history.perhaps.subtract(ids)
                continue
            self._history.perhaps.subtract(ids)
            self._history.processed.update(ids)


class Reader:
    """Reads everything, between two tasks and so at one moment."""

    def __init__(self, machine: Machine, scenario: Scenario, source: Server, sink: Server) -> None:
        self._scenario, self._source, self._sink = scenario, source, sink
        self._world = machine.world
        self._process = machine.world.start("auditor")
        self._stores: dict[int, Store] = {}
        self._seen: dict[tuple[int, int, int, int], tuple[int, list[Row]]] = {}
        """What was read before, by server, restores, queue and partition: from which index, and the rows."""

    def snapshot(self, *, anew: bool = False) -> Snapshot:
        """What anybody can read at this moment.

        Parameters
        ----------
        anew
            Whether rows that were read before are read again.
        """
        if anew:
            self._seen.clear()
        with self._world.unseen():
            return self._snapshot()

    def miscounted(self) -> list[str]:
        """Partitions that have other segments, or bytes, than their own record says."""
        with self._world.unseen():
            return [
                f"partition {number} of {name}"
                for server, name in ((self._source, SOURCE), (self._sink, SINK))
                if (queue := self._queue(server, name)) is not None
                for number in range(queue.partitions)
                if not _counted(server, queue, number)
            ]

    def _snapshot(self) -> Snapshot:
        source = self._queue(self._source, SOURCE)
        offsets = None
        scenario = self._scenario
        if scenario.consumer and source is not None:
            try:
                offsets = list(self._store(self._source).consumer(CONSUMER).offsets(SOURCE).values())
            except PenstockError:
                offsets = None
        rows = [] if source is None else self._rows(self._source, source)
        safe = self._safe() if scenario.consumer and source is not None else None
        return Snapshot(
            source=[[each[0] for each in part] for _, part in rows],
            first=[first for first, _ in rows],
            sink=self._written(),
            offsets=offsets,
            safe=safe,
        )

    def _safe(self) -> list[int] | None:
        store = self._store(self._source)
        try:
            keys = store.consumer(CONSUMER).registration(SOURCE).keys
        except PenstockError:
            return None
        rows = store.database.run(lambda tx: tx.all("read_positions", **keys), write=False)
        return [row.safe_index for row in rows]

    def _written(self) -> list[list[tuple[int, int]]]:
        if self._scenario.sink == "table":
            return [self._table()]
        sink = self._queue(self._sink, SINK)
        if sink is None:
            return []
        return [part for _, part in self._rows(self._sink, sink)]

    def _table(self) -> list[tuple[int, int]]:
        self._sink._leave()
        connection = self._sink._connection
        found = connection.execute("select count(*) from sqlite_schema where name = ?", (TABLE,)).fetchall()
        if not found[0][0]:
            return []
        return list(connection.execute(f"select id, key from {TABLE}").fetchall())

    def _rows(self, server: Server, queue: Any) -> list[tuple[int, list[Row]]]:
        queue.refresh()
        return [self._partition(server, queue, partition) for partition in range(queue.partitions)]

    def _partition(self, server: Server, queue: Any, partition: int) -> tuple[int, list[Row]]:
        key = (id(server), server.restores, queue.record.queue_id, partition)
        there = queue._partition(partition)
        first, rows = self._seen.get(key, (there.first_index, []))
        rows = rows[there.first_index - first :]
        if there.next_index > there.first_index + len(rows):
            table = queue.read(partition, there.first_index + len(rows))
            rows = rows + list(zip(table["id"].to_pylist(), table["key"].to_pylist(), strict=True))
        self._seen[key] = (there.first_index, rows)
        return there.first_index, rows

    def _queue(self, server: Server, name: str) -> Any:
        try:
            return self._store(server).queue(name)
        except PenstockError:
            return None

    def _store(self, server: Server) -> Store:
        found = self._stores.get(id(server))
        if found is None:
            made = SimDatabase(server, self._process)
            found = self._stores[id(server)] = Store(made)
        return found


def _counted(server: Server, queue: Any, partition: int) -> bool:
    there = queue._partition(partition)
    server._leave()
    found = server._connection.execute(
        "select count(*), coalesce(sum(bytes), 0) from main.penstock_segment "
        "where queue_id = ? and partition = ?",
        (queue.record.queue_id, partition),
    ).fetchall()
    return found == [(there.segments, there.bytes)]
