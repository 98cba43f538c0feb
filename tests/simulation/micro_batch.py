"""Model of Spark's micro-batch engine (4.2 and 4.3) that runs the real reader and the real writer.

The driver is one process and its executors another, which runs the tasks of a micro-batch. Some tasks are
retried, and some run twice because of speculative execution. The order in which the engine writes the offset
log and the commit log and calls the reader and the writer follows Spark's MicroBatchExecution.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from penstock.commit.offsets import pad
from penstock.continuous.driver.checkpoint_log import CheckpointLog, catch_up, require_not_behind
from penstock.pipeline.micro_batches import MicroBatchQuery, expected_epochs, move_consumer
from penstock.queue.store import open_store
from penstock.spark.connectors import OwnedConsumer
from penstock.spark.options import SinkOptions
from penstock.spark.queue_writers import QueueStreamWriter
from penstock.spark.schemas import source_schema
from penstock.spark.stream_reader import QueueStreamReader
from penstock.store.records import catalog
from penstock.tables.sink import TableSink
from penstock.tables.sql.writer import TableWriter
from tests.simulation.disk import SparkError, raise_log_conflicts
from tests.simulation.machine import Machine
from tests.simulation.query import COLUMNS, Query, cast_key
from tests.simulation.scheduler import Process, Signal

POLL_SECONDS = 1.0
MAX_ATTEMPTS = 3
"""How often a task may fail before its micro-batch fails."""


Write = Callable[[QueueStreamReader, list[Any], int], None]
"""Writes a micro-batch, given its reader, its partitions and its number."""


class MicroBatchRun:
    """Run of a micro-batch query in a driver process."""

    def __init__(self, machine: Machine, driver: Process, query: Query) -> None:
        self.machine, self.world, self._disk = machine, machine.world, machine.disk
        self.driver, self.query = driver, query
        self.executors = machine.world.start_process(f"executors of {driver}")
        self.ended = False
        self.failure: Exception | None = None
        self.last_progress: SimpleNamespace | None = None
        """The progress of the last micro-batch with rows."""
        self.expected_epochs: dict[OwnedConsumer, int] = {}
        self.active = True
        """Whether the trigger is active, as Spark reports it."""
        self.busy = False
        """Whether a micro-batch is in flight."""
        self.idle_at: list[int] | None = None
        """The offsets at which the query found no more rows."""
        self.ranges_in_flight: list[tuple[int, int]] | None = None
        """The range of each partition in the current micro-batch."""
        self.owns_consumer = False
        """Whether the driver has taken the consumer over."""
        self.query_id = ""
        driver.on_exit.append(self.kill_executors)

    def kill_executors(self) -> None:
        """Kill the executors after their driver, either at once or a while later."""
        self.machine.reruns += not self.ended
        if self.world.choices.draw(f"x{self.driver.pid}", 2):
            self.world.call_later(5.0, self.executors.kill)
        else:
            self.executors.kill()

    # The driver.

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.failure = error
            self.machine.reruns += 1
        finally:
            self.ended, self.active = True, False

    def _run(self) -> None:
        query, root, disk = self.query, self.query.checkpoint, self._disk
        is_restart = disk.read(f"{root}/metadata") is not None
        self.query_id = self._read_or_create_metadata()
        consumers = [] if query.consumer is None else [query.consumer]
        if query.pipeline and is_restart:
            # `Pipeline.start` does the same.
            logs, sink = CheckpointLog(root), query.sink_driver(self.query_id)
            if query.guarantee == "at_least_once":
                require_not_behind(logs, sink)
            else:
                catch_up(logs, sink, lambda offset: move_consumer(consumers, offset))
        self.expected_epochs = expected_epochs(consumers)
        reader = self._open_reader()
        write = self._open_writer()
        reader.getDefaultReadLimit()
        newest, committed = disk.newest(f"{root}/offsets"), disk.newest(f"{root}/commits")
        batch = 0 if newest is None else newest
        position: Any = None
        if newest is not None:
            position = self._read_offset(newest - 1) if newest else None
            if committed != newest:
                self._run_batch(reader, write, batch, position, self._read_offset(newest))
            position, batch = self._read_offset(newest), batch + 1
        while True:
            if position is None:
                position = reader.initialOffset()
            end = reader.latestOffset(position, None)
            self.owns_consumer = True
            if end == position:
                self.idle_at, self.active = end["to"], False
                self.world.sleep(POLL_SECONDS)
                self.active = True
                continue
            self.idle_at = None
            self._log(
                f"offsets/{batch}", "\n".join(["v1", json.dumps({"batchWatermarkMs": 0}), json.dumps(end)])
            )
            self._run_batch(reader, write, batch, position, end)
            position, batch = end, batch + 1

    def _read_or_create_metadata(self) -> str:
        """Return the id of the query."""
        path = f"{self.query.checkpoint}/metadata"
        content = self._disk.read(path)
        if content is None:
            content = json.dumps({"id": str(uuid.uuid4())})
            # Create it durably: losing this file would mean losing the whole checkpoint.
            with raise_log_conflicts():
                self._disk.create(path, content.encode())
        return str(json.loads(content)["id"])

    def _read_offset(self, batch: int) -> Any:
        text = self._disk.read(f"{self.query.checkpoint}/offsets/{batch}")
        if text is None:
            raise SparkError(f"batch {batch} doesn't exist")
        return json.loads(text.split("\n")[2])

    def _log(self, name: str, text: str) -> None:
        self._disk.add(f"{self.query.checkpoint}/{name}", text)

    def _open_reader(self) -> QueueStreamReader:
        options = self.query.source
        queue = open_store(options.url).queue(options.queue).record
        return QueueStreamReader(options, queue, source_schema(queue.schema, False))

    def _run_batch(self, reader: QueueStreamReader, write: Write, batch: int, start: Any, end: Any) -> None:
        if start is None:
            start = reader.initialOffset()
        self.busy = True
        partitions = list(reader.partitions(start, end)) or [None]
        self.ranges_in_flight = list(zip(pad(start["to"], len(end["to"])), end["to"], strict=False))
        write(reader, partitions, batch)
        self.ranges_in_flight = None
        self._log(f"commits/{batch}", 'v1\n{"nextBatchWatermarkMs":0}')
        self.busy = False
        latest = json.dumps(reader.reportLatestOffset())
        self.last_progress = SimpleNamespace(sources=[SimpleNamespace(latestOffset=latest)])

    # The sinks.

    def _open_writer(self) -> Write:
        sink = self.query.sink
        return self._open_table(sink) if isinstance(sink, TableSink) else self._open_queue(sink)

    def _open_queue(self, options: SinkOptions) -> Write:
        def write(reader: QueueStreamReader, partitions: list[Any], batch: int) -> None:
            # Spark creates a new writer for each micro-batch.
            record = open_store(options.url).database.run(
                lambda tx: catalog.find_queue(tx, options.queue), write=False
            )
            writer = QueueStreamWriter(options, record)
            messages = self.run_tasks(
                batch, partitions, lambda partition: writer.write(_read_selected(reader, partition))
            )
            writer.commit(messages, batch)

        return write

    def _open_table(self, sink: TableSink) -> Write:
        layout = sink.prepared(self.query.sink_url, COLUMNS, "append", ())
        writer = TableWriter(
            self.query.sink_url, layout, sink.name, "append", self.query.guarantee, self.query.checkpoint
        )

        def write(reader: QueueStreamReader, partitions: list[Any], batch: int) -> None:
            writer(_DataFrame(self, reader, partitions, batch), batch)  # type: ignore[arg-type]

        return write

    # Tasks.

    def run_tasks(self, batch: int, partitions: list[Any], work: Callable[[Any], Any]) -> list[Any]:
        """Run a task for each partition; return the result of one attempt of each."""
        all_attempts = [
            self._start_attempts(batch, number, partition, work)
            for number, partition in enumerate(partitions)
        ]
        results = []
        for number, attempts in enumerate(all_attempts):
            while True:
                self._replace_executors(all_attempts)
                successful = next((attempt for attempt in attempts if attempt.done), None)
                if successful is not None:
                    results.append(successful.result)
                    break
                if all(attempt.failure is not None for attempt in attempts):
                    if len(attempts) >= MAX_ATTEMPTS or not isinstance(attempts[-1].failure, Exception):
                        raise attempts[-1].failure
                    attempts.append(self._start_attempt(batch, number, partitions[number], work))
                self.world.wait(*(attempt.changed for attempt in attempts), seconds=1.0)
        return results

    def _replace_executors(self, all_attempts: list[list[_Attempt]]) -> None:
        """Start new executors if they have died; their tasks fail and are retried."""
        if self.executors.alive:
            return
        self.executors = self.world.start_process(f"executors of {self.driver}")
        self.machine.reruns += 1
        for attempt in (attempt for attempts in all_attempts for attempt in attempts):
            if not attempt.done and attempt.failure is None:
                attempt.failure = SparkError("executor lost")

    def _start_attempts(
        self, batch: int, number: int, partition: Any, work: Callable[[Any], Any]
    ) -> list[_Attempt]:
        """Start a task, sometimes twice, as speculative execution does."""
        # With at-least-once, both attempts would append, and the auditor would not expect the repeated rows.
        chance = 0.0 if self.query.guarantee == "at_least_once" else 0.05
        is_speculative = self.world.choices.draw(f"s{self.driver.pid}.{batch}.{number}", 2, chance)
        return [self._start_attempt(batch, number, partition, work) for _ in range(1 + is_speculative)]

    def _start_attempt(self, batch: int, number: int, partition: Any, work: Callable[[Any], Any]) -> _Attempt:
        attempt = _Attempt()

        def run() -> None:
            try:
                attempt.result = work(partition)
                attempt.done = True
            except Exception as error:
                attempt.failure = error
                self.machine.reruns += 1
            attempt.changed.notify_all()

        task = self.executors.spawn(run, f"task {batch}.{number}")
        task.spark_properties = {
            "task": number,
            "sql.streaming.queryId": self.query_id,
            "streaming.sql.batchId": str(batch),
            "spark.master": "local[2]",
        }
        return attempt

    # The end of the query.

    def is_caught_up(self, ends: list[int]) -> bool:
        """Return whether the query is idle at or after these ends of the source's partitions."""
        return self.idle_at is not None and all(
            offset >= end for offset, end in zip(pad(self.idle_at, len(ends)), ends, strict=False)
        )

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the query in the driver's process, as a user does."""
        consumer, stopped = self.query.consumer, Signal()
        pipeline_query = MicroBatchQuery(
            _StreamingQuery(self),  # type: ignore[arg-type]
            self.query.checkpoint,
            [] if consumer is None else [consumer],
            expected_epochs=self.expected_epochs,
        )

        def work() -> None:
            pipeline_query.stop(timeout)
            stopped.notify_all()

        if self.driver.alive:
            self.driver.spawn(work, "stop")
            self.world.wait(stopped, seconds=timeout + 10.0)
        self.driver.kill()


class _StreamingQuery:
    """Replacement for the parts of PySpark's ``StreamingQuery`` that a pipeline's query uses."""

    id, runId, name = "id", "run", "simulated"

    def __init__(self, run: MicroBatchRun) -> None:
        self._run = run

    @property
    def isActive(self) -> bool:
        return not self._run.ended

    @property
    def lastProgress(self) -> Any:
        return self._run.last_progress

    @property
    def status(self) -> dict[str, Any]:
        return {"isTriggerActive": self._run.active, "isDataAvailable": self._run.active}

    def stop(self) -> None:
        """Interrupt the query's thread and kill its tasks."""
        run = self._run
        run.machine.reruns += run.busy
        run.ended = True
        run.executors.kill()
        run.machine.kill_tasks([task for task in run.driver.tasks if task.name == "query" and not task.done])
        for server in run.machine.servers.values():
            # The reader runs in a child process of Spark, which ends with the query.
            server.release_owner_locks(run.driver)


class _Attempt:
    """Attempt of a task."""

    def __init__(self) -> None:
        self.result: Any = None
        self.failure: Exception | None = None
        self.done = False
        self.changed = Signal()


class _DataFrame:
    """Replacement for the parts of a micro-batch's ``DataFrame`` that the writer of a table uses."""

    def __init__(
        self, run: MicroBatchRun, reader: QueueStreamReader, partitions: list[Any], batch: int
    ) -> None:
        self._run, self._reader, self._partitions, self._batch = run, reader, partitions, batch

    def mapInArrow(self, func: Callable[[Any], Iterator[pa.RecordBatch]], schema: str) -> _DataFrame:
        self._func = func
        return self

    def collect(self) -> list[Any]:
        from pyspark.sql import Row

        def run_task(partition: Any) -> list[pa.RecordBatch]:
            batches = (_with_table_columns(batch) for batch in _read_selected(self._reader, partition))
            return list(self._func(batches))

        batches_by_task = self._run.run_tasks(self._batch, self._partitions, run_task)
        return [Row(**row) for batches in batches_by_task for batch in batches for row in batch.to_pylist()]


def _with_table_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rename the columns as the writer of a table does."""
    return batch.rename_columns([f"c{index}" for index in range(batch.num_columns)])


def _read_selected(reader: QueueStreamReader, partition: Any) -> Iterator[pa.RecordBatch]:
    """Read a partition of the micro-batch, with the columns that the query selects."""
    if partition is not None:
        for batch in reader.read(partition):
            yield cast_key(batch.select(COLUMNS.names))
