"""Clients of the simulated stores: producers, and programs that process rows."""

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
from penstock.queue.store import open_store
from tests.simulation.machine import Machine
from tests.simulation.scenario import PROGRAM, SCHEMA, SOURCE
from tests.simulation.scheduler import Process
from tests.support.auditor import FIRST_FOREIGN_ID, History

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
