"""Snapshots of everything that readers can read, for the auditor."""

from __future__ import annotations

from typing import Any

from penstock.errors import PenstockError
from penstock.queue.store import Store
from tests.simulation.database import SimDatabase
from tests.simulation.machine import Machine
from tests.simulation.scenario import CONSUMER, SINK, SOURCE, TABLE, Scenario
from tests.simulation.server import Server
from tests.support.auditor import Snapshot

Row = tuple[int, int]
"""Id and key."""


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
