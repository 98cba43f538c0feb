"""Clients of an audited store: producers that append continuously, and an auditor that takes a snapshot
every second.

The checks are the simulation's (`tests.support.auditor`). They know the answers that clients got and what
anybody can read, and nothing of how Spark or Penstock work.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

import penstock
from penstock.errors import PenstockError
from penstock.store.database import Transaction
from penstock.store.log.decode import Decoder
from penstock.store.records import catalog, consumers
from tests.crash.audited import CONSUMER, SINK, SOURCE
from tests.support.auditor import (
    FIRST_FOREIGN_ID,
    History,
    Snapshot,
    Violation,
    check_invariants,
    unknown_rows,
)

SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64())])
AUDIT_SECONDS = 1.0


class EventLog:
    """What happened when."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.lines: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def note(self, text: str) -> None:
        self.lines.append(f"{self.seconds:7.2f} s  {text}")


class SharedHistory:
    """A history that producers write while the auditor reads it."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._lock = threading.Lock()

    def begin(self, ids: Sequence[int], keys: Sequence[int]) -> None:
        """Note an append that is about to be tried."""
        with self._lock:
            self._history.keys.update(zip(ids, keys, strict=True))
            if ids[0] < FIRST_FOREIGN_ID:
                self._history.appends.append(tuple(ids))

    def interrupt(self, reruns: int) -> None:
        """Note something after which rows of an at-least-once query may be written again so often."""
        with self._lock:
            self._history.reruns += reruns

    def acknowledge(self, ids: Sequence[int]) -> None:
        """Note an append that has succeeded."""
        with self._lock:
            (self._history.acknowledged if ids[0] < FIRST_FOREIGN_ID else self._history.foreign).update(ids)

    def copy(self) -> History:
        """Return the history as it is now."""
        with self._lock:
            history = self._history
            return replace(
                history,
                acknowledged=set(history.acknowledged),
                appends=list(history.appends),
                foreign=set(history.foreign),
                keys=dict(history.keys),
            )


class Producer(threading.Thread):
    """Appends to one queue through a producer session, each append until it is acknowledged."""

    def __init__(self, url: str, queue: str, first: int, history: SharedHistory, seed: int) -> None:
        super().__init__(name=f"producer of {queue}", daemon=True)
        self._url, self._queue, self._history = url, queue, history
        self._next, self._random = first, random.Random(seed)
        self.ending = threading.Event()
        """Set when it is to append nothing more once the append in flight is acknowledged."""
        self.abandoned = threading.Event()
        """Set when nobody waits for the append in flight."""
        self.failure: BaseException | None = None
        self.outcomes = Counter[str]()
        """How many tries of an append ended how."""

    def run(self) -> None:
        try:
            with penstock.connect(self._url) as store:
                self._produce(store)
        except BaseException as error:
            self.failure = error

    def _produce(self, store: penstock.Store) -> None:
        session: Any = None
        sequence = 0
        draw = self._random
        while not self.ending.is_set():
            # Now and then so many that a continuous query is far behind.
            count = draw.randint(1, 8) if draw.random() < 0.97 else draw.randint(200, 600)
            ids = range(self._next, self._next + count)
            self._next += count
            # Some keys come all the time. Others come for a while and not before: while the sink grows, they
            # must not part.
            keys = [draw.choice([draw.randrange(5), 5 + sequence + draw.randrange(4)]) for _ in ids]
            self._history.begin(ids, keys)
            table = pa.table([list(ids), keys], schema=SCHEMA)
            partition = None if self._queue == SINK else draw.choice([None, 0, 1])
            while True:
                try:
                    if session is None:
                        session = store.producer(self._queue, self.name)
                    session.append(table, sequence, partition=partition)
                    break
                except PenstockError as error:
                    self.outcomes[type(error).__name__] += 1
                    if self.abandoned.wait(0.2):
                        return
            self.outcomes["acknowledged"] += 1
            self._history.acknowledge(ids)
            sequence += 1
            self.ending.wait(draw.random() * 0.3)


class SnapshotReader:
    """Reads the consumer's offsets, the source and the sink at one moment.

    All of it is one read transaction: repeatable read in PostgreSQL, one snapshot of the file in SQLite. So
    the auditor may demand that the sink has what the consumer has passed, and nothing else, whatever is
    committed meanwhile.
    """

    def __init__(self, url: str, table: str | None) -> None:
        self._store, self._table = penstock.connect(url), table

    def snapshot(self) -> Snapshot:
        return self._store.database.run(self._read, write=False)

    def offsets(self) -> list[int]:
        """Return the consumer's offsets alone."""
        return self._store.database.run(self._offsets, write=False)

    def close(self) -> None:
        self._store.close()

    def _read(self, tx: Transaction) -> Snapshot:
        source = self._partitions(tx, SOURCE)
        return Snapshot(
            source=[rows["id"].to_pylist() for _, rows in source],
            first_indexes=[first for first, _ in source],
            sink=self._sink(tx),
            offsets=self._offsets(tx),
        )

    def _offsets(self, tx: Transaction) -> list[int]:
        return consumers.read_offsets(tx, consumers.find_registration(tx, CONSUMER, SOURCE))[0]

    def _sink(self, tx: Transaction) -> list[list[tuple[int, int]]]:
        if self._table is None:
            return [
                list(zip(rows["id"].to_pylist(), rows["key"].to_pylist(), strict=True))
                for _, rows in self._partitions(tx, SINK)
            ]
        if tx.dialect == "sqlite":
            exists = tx.query("select name from sqlite_schema where name = :name", name=self._table)
        else:
            exists = tx.query("select 1 where to_regclass(:name) is not null", name=self._table)
        # The query creates the table when it starts for the first time.
        return [tx.query(f"select id, key from {self._table}") if exists else []]

    def _partitions(self, tx: Transaction, name: str) -> list[tuple[int, pa.Table]]:
        """Return the first row index and the rows of each partition."""
        queue = catalog.find_queue(tx, name)
        decoder = Decoder(queue, None, lambda: queue)
        partitions = []
        for partition in catalog.partitions(tx, queue):
            batches, position = [], partition.first_index
            while position < partition.next_index:
                page = tx.page(
                    queue_id=queue.queue_id,
                    partition=partition.partition,
                    start_index=position,
                    end_index=partition.next_index,
                    max_segments=1024,
                    max_bytes=8 << 20,
                    with_runs=0,
                )
                where = f"partition {partition.partition} of {name!r}"
                for segment in page:
                    if segment.start_index != position:
                        raise Violation("gap", f"{where} has row {position} twice or not at all")
                    batches += decoder.decode_rows(segment, segment.start_index, segment.end_index)
                    position = segment.end_index
                if not page:
                    raise Violation(
                        "gap", f"{where} has no row {position} and ends at {partition.next_index}"
                    )
            partitions.append((partition.first_index, pa.Table.from_batches(batches, schema=queue.schema)))
        return partitions


class Auditor(threading.Thread):
    """Checks a snapshot every second until the first violation."""

    def __init__(self, reader: SnapshotReader, history: SharedHistory, log: EventLog) -> None:
        super().__init__(name="auditor", daemon=True)
        self._reader, self._history, self._log = reader, history, log
        self.ending = threading.Event()
        self.failure: BaseException | None = None
        self.newest: Snapshot | None = None
        self.snapshots = 0

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                self.audit()
                self.ending.wait(AUDIT_SECONDS)
        except BaseException as error:
            self._log.note(f"!!! {type(error).__name__}: {error}")
            self.failure = error

    def audit(self) -> tuple[History, Snapshot]:
        """Read and check one snapshot.

        Raises
        ------
        Violation
        """
        # What was acknowledged before the snapshot must be in it; what was tried before its end may be.
        before = self._history.copy()
        now = self._reader.snapshot()
        history = replace(before, keys=self._history.copy().keys)
        check_invariants(history, now)
        _check_values(history, now)
        if self.newest is not None:
            _check_kept(self.newest, now, in_order=history.keyed)
        self.newest = now
        self.snapshots += 1
        return history, now


def _check_values(history: History, now: Snapshot) -> None:
    """Check that every row was appended, with the key that it has."""
    if unknown := unknown_rows(history, now):
        raise Violation("unknown", f"rows {unknown} are in the sink and were never appended")
    for rows in now.sink:
        for row, key in rows:
            if history.keys[row] != key:
                raise Violation(
                    "values", f"row {row} was appended with key {history.keys[row]} and has {key}"
                )


def _check_kept(before: Snapshot, now: Snapshot, *, in_order: bool) -> None:
    """Check that rows which anybody has seen are where they were, and that the consumer has not gone back."""
    for name, old, new in (("source", before.source, now.source), ("sink", before.sink, now.sink)):
        for partition, (seen, rows) in enumerate(zip(old, new, strict=False)):
            if name == "sink" and not in_order:
                if gone := Counter(seen) - Counter(rows):
                    raise Violation("vanished", f"rows {sorted(gone)} were in the sink before")
            elif rows[: len(seen)] != seen:
                raise Violation("vanished", f"partition {partition} of the {name} has other rows than before")
    for partition, (old_offset, offset) in enumerate(
        zip(before.offsets or [], now.offsets or [], strict=True)
    ):
        if offset < old_offset:
            raise Violation(
                "back", f"the consumer went from {old_offset} back to {offset} in partition {partition}"
            )
