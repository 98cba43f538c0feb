"""Producers, and what reads everything at one moment."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock.errors import NotFound, PenstockError, ProducerFenced
from penstock.queue.opened import open_store
from penstock.queue.store import Store
from penstock.store.migrate import VERSION, StoreIdentity
from tests.simulation.auditor import History, Snapshot
from tests.simulation.database import Server, SimDatabase
from tests.simulation.scenario import CONSUMER, FOREIGN, SCHEMA, SINK, SOURCE, TABLE, Scenario
from tests.simulation.virtual import Machine

Row = tuple[int, int]
"""Id and key."""

KEYS = 5
_RETRY_SECONDS = 1.0


class Producer:
    """Appends to one queue through a producer session, each append until it is acknowledged."""

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
        self.process = machine.world.start(f"producer of {queue}")
        self.ended = False
        self.process.spawn(self._run, "append")

    def _run(self) -> None:
        session: Any = None
        name, sequence = self.process.name + str(self.process.pid), 0
        while self._left:
            ids = tuple(range(self._next, self._next + 1 + self._draw(self._most)))
            self._next += len(ids)
            keys = [each * 7 % KEYS for each in ids]
            self._history.keys.update(zip(ids, keys, strict=True))
            if self._next < FOREIGN:
                self._history.appends.append(ids)
            table = pa.table([list(ids), keys], schema=SCHEMA)
            where = None if self._by_key else self._draw(16)
            while True:
                try:
                    if session is None:
                        session = open_store(self._url).producer(self._queue, name)
                    partition = None if where is None else where % self._partitions()
                    session.append(table, sequence, partition=partition)
                    break
                except (NotFound, ProducerFenced):
                    # The queue was made anew, or a backup was restored.
                    session = None
                    self._world.sleep(_RETRY_SECONDS)
                except PenstockError:
                    self._world.sleep(_RETRY_SECONDS)
            sequence += 1
            (self._history.acknowledged if self._next < FOREIGN else self._history.foreign).update(ids)
            self._left -= 1
            self._world.sleep(self._draw(4) * 0.4)
        self.ended = True

    def _partitions(self) -> int:
        """How many there are by now."""
        return open_store(self._url).queue(self._queue).partitions

    def _draw(self, count: int) -> int:
        return self._machine.random.randrange(count)


class Reader:
    """Reads everything, between two tasks and so at one moment."""

    def __init__(self, machine: Machine, scenario: Scenario, source: Server, sink: Server) -> None:
        self._scenario, self._source, self._sink = scenario, source, sink
        self._process = machine.world.start("auditor")
        self._stores: dict[int, Store] = {}
        self._seen: dict[tuple[int, int, int, int], tuple[int, list[Row]]] = {}
        """What was read before, by server, its restores, queue and partition: from which index on, and the rows."""

    def snapshot(self, *, anew: bool = False) -> Snapshot:
        """What anybody can read at this moment.

        Parameters
        ----------
        anew
            Whether rows that were read before are read again.
        """
        if anew:
            self._seen.clear()
        source = self._queue(self._source, SOURCE)
        offsets = None
        scenario = self._scenario
        if scenario.consumer and self._source is self._sink and source is not None:
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
            found = self._stores[id(server)] = Store(made, StoreIdentity(server.uuid, VERSION))
        return found
