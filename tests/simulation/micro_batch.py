"""A streaming query as Spark's micro-batch engine runs it (4.2 and 4.3).

It is built around the real reader and the real writer. The driver is one process, the executors another, and
the tasks of a micro-batch are tasks there: some are tried twice, some have a speculative twin. What is
written and when (offset log, commit log, the calls of reader and writer) follows MicroBatchExecution.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from penstock.commit.offsets import pad
from penstock.continuous.connectors.protocol import SinkDriver
from penstock.continuous.connectors.queue import QueueSinkDriver
from penstock.continuous.driver.checkpoint_log import CheckpointLog, catch_up, require_not_behind
from penstock.pipeline.micro_batches import MicroBatchQuery, expected_epochs, move_consumer
from penstock.queue.store import open_store
from penstock.spark.connectors import OwnedConsumer
from penstock.spark.options import SinkOptions, SourceOptions
from penstock.spark.queue_writers import QueueStreamWriter
from penstock.spark.schemas import source_schema
from penstock.spark.stream_reader import QueueStreamReader
from penstock.store.records import catalog
from penstock.tables.sink import TableSink
from penstock.tables.sql.writer import TableWriter
from tests.simulation.disk import SparkError, conflicts_told
from tests.simulation.scheduler import Gate, Process
from tests.simulation.virtual import Machine

POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Plan:
    """What a query is: the same in all its runs, but for options that may change."""

    source: SourceOptions
    sink: SinkOptions | TableSink
    sink_url: str
    guarantee: str
    checkpoint: str
    available_now: bool = False
    pipeline: bool = True
    """Whether a pipeline starts it."""

    @property
    def query_source(self) -> OwnedConsumer | None:
        source = self.source
        if source.consumer is None:
            return None
        return OwnedConsumer(source.url, source.queue, source.consumer, source.moved_by_sink)

    def driver(self, query_id: str) -> SinkDriver:
        """The sink as the driver of a continuous query sees it."""
        exactly = self.guarantee == "exactly_once"
        if isinstance(self.sink, TableSink):
            return self.sink.driver(self.sink_url, query_id, exactly_once=exactly)
        return QueueSinkDriver(self.sink, query_id, exactly)


KEY = pa.field("key", pa.int32())
COLUMNS = StructType([StructField("id", LongType()), StructField("key", IntegerType())])


class MicroBatchRun:
    """One run: begun in a driver process."""

    def __init__(self, machine: Machine, driver: Process, plan: Plan) -> None:
        self._machine, self._world, self._disk = machine, machine.world, machine.disk
        self.driver, self.plan = driver, plan
        self.executors = machine.world.start(f"executors of {driver}")
        self.ended = False
        self.failure: Exception | None = None
        self.progress: SimpleNamespace | None = None
        """Of the last micro-batch with rows, if there was one."""
        self.expected: dict[OwnedConsumer, int] = {}
        self.active = True
        self.busy = False
        """Whether a micro-batch is being planned or done."""
        self.idle_at: list[int] | None = None
        """Where it found nothing more to do."""
        self.hand: list[tuple[int, int]] | None = None
        """The range of each partition in the micro-batch that is being done."""
        self.owned = False
        """Whether it has taken its consumer over."""
        self.query_id = ""
        driver.at_death.append(self.executors_die)

    def executors_die(self) -> None:
        """A while after their driver, as a choice; what they have begun goes on until then."""
        self._machine.repeats += not self.ended
        if self._world.choices.draw(f"x{self.driver.pid}", 2):
            self._world.later(5.0, self.executors.kill)
        else:
            self.executors.kill()

    # The driver.

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.failure = error
            self._machine.repeats += 1
        finally:
            self.ended, self.active = True, False

    def _run(self) -> None:
        plan, root, disk = self.plan, self.plan.checkpoint, self._disk
        begun_before = disk.read(f"{root}/metadata") is not None
        self.query_id = self._metadata()
        if plan.pipeline and begun_before:
            # As `Pipeline.start` does it.
            sources = [] if plan.query_source is None else [plan.query_source]
            logs, record = CheckpointLog(root), plan.driver(self.query_id)
            if plan.guarantee == "at_least_once":
                require_not_behind(logs, record)
            else:
                catch_up(logs, record, lambda offset: move_consumer(sources, offset))
        self.expected = expected_epochs([] if plan.query_source is None else [plan.query_source])
        reader = self._reader()
        write = self._writer()
        if plan.available_now:
            reader.prepareForTriggerAvailableNow()
        else:
            reader.getDefaultReadLimit()
        begun, committed = disk.newest(f"{root}/offsets"), disk.newest(f"{root}/commits")
        batch = 0 if begun is None else begun
        position: Any = None
        if begun is not None:
            position = self._logged(begun - 1) if begun else None
            if committed != begun:
                self._batch(reader, write, batch, position, self._logged(begun))
            position, batch = self._logged(begun), batch + 1
        while True:
            if position is None:
                position = reader.initialOffset()
            end = reader.latestOffset(position, None)
            self.owned = True
            if end == position:
                if plan.available_now:
                    return
                self.idle_at, self.active = end["to"], False
                self._world.sleep(POLL_SECONDS)
                self.active = True
                continue
            self.idle_at = None
            self._log(
                f"offsets/{batch}", "\n".join(["v1", json.dumps({"batchWatermarkMs": 0}), json.dumps(end)])
            )
            self._batch(reader, write, batch, position, end)
            position, batch = end, batch + 1

    def _metadata(self) -> str:
        path = f"{self.plan.checkpoint}/metadata"
        found = self._disk.read(path)
        if found is None:
            found = json.dumps({"id": str(uuid.uuid4())})
            # Its loss would be that of a whole new checkpoint.
            with conflicts_told():
                self._disk.create(path, found.encode())
        return str(json.loads(found)["id"])

    def _logged(self, number: int) -> Any:
        text = self._disk.read(f"{self.plan.checkpoint}/offsets/{number}")
        if text is None:
            raise SparkError(f"batch {number} doesn't exist")
        return json.loads(text.split("\n")[2])

    def _log(self, name: str, text: str) -> None:
        self._disk.add(f"{self.plan.checkpoint}/{name}", text)

    def _reader(self) -> QueueStreamReader:
        options = self.plan.source
        queue = open_store(options.url).queue(options.queue).record
        return QueueStreamReader(options, queue, source_schema(queue.schema, False))

    def _batch(self, reader: QueueStreamReader, write: Any, batch: int, start: Any, end: Any) -> None:
        if start is None:
            start = reader.initialOffset()
        self.busy = True
        parts = list(reader.partitions(start, end)) or [None]
        self.hand = list(zip(pad(start["to"], len(end["to"])), end["to"], strict=False))
        write(reader, parts, batch)
        self.hand = None
        self._log(f"commits/{batch}", 'v1\n{"nextBatchWatermarkMs":0}')
        self.busy = False
        latest = json.dumps(reader.reportLatestOffset())
        self.progress = SimpleNamespace(sources=[SimpleNamespace(latestOffset=latest)])

    # The sinks.

    def _writer(self) -> Callable[[QueueStreamReader, list[Any], int], None]:
        sink = self.plan.sink
        return self._table(sink) if isinstance(sink, TableSink) else self._queue(sink)

    def _queue(self, options: SinkOptions) -> Callable[[QueueStreamReader, list[Any], int], None]:
        def write(reader: QueueStreamReader, parts: list[Any], batch: int) -> None:
            # Spark makes the writer anew for each micro-batch.
            record = open_store(options.url).database.run(
                lambda tx: catalog.find_queue(tx, options.queue), write=False
            )
            writer = QueueStreamWriter(options, record)
            messages = self._tasks(batch, parts, lambda part: writer.write(_rows(reader, part)))
            writer.commit(messages, batch)

        return write

    def _table(self, sink: TableSink) -> Callable[[QueueStreamReader, list[Any], int], None]:
        layout = sink.prepared(self.plan.sink_url, COLUMNS, "append", ())
        writer = TableWriter(
            self.plan.sink_url, layout, sink.name, "append", self.plan.guarantee, self.plan.checkpoint
        )

        def write(reader: QueueStreamReader, parts: list[Any], batch: int) -> None:
            writer(_Frame(self, reader, parts, batch), batch)  # type: ignore[arg-type]  # what it asks of one

        return write

    # Tasks.

    def _tasks(self, batch: int, parts: list[Any], work: Callable[[Any], Any]) -> list[Any]:
        """The result of one attempt of each task; a task may have several."""
        attempts = [self._attempts(batch, number, part, work) for number, part in enumerate(parts)]
        results = []
        for number, mine in enumerate(attempts):
            while True:
                self._replace_executors(attempts)
                found = next((each for each in mine if each.done), None)
                if found is not None:
                    results.append(found.result)
                    break
                if all(each.failure is not None for each in mine):
                    if len(mine) >= 3 or not isinstance(mine[-1].failure, Exception):
                        raise mine[-1].failure
                    mine.append(self._attempt(batch, number, parts[number], work))
                self._world.wait(*(each.changed for each in mine), seconds=1.0)
        return results

    def _replace_executors(self, attempts: list[list[_Attempt]]) -> None:
        """Start others where they have died: Spark tries their tasks again."""
        if self.executors.alive:
            return
        self.executors = self._world.start(f"executors of {self.driver}")
        self._machine.repeats += 1
        for each in (attempt for mine in attempts for attempt in mine):
            if not each.done and each.failure is None:
                each.failure = SparkError("executor lost")

    def _attempts(self, batch: int, number: int, part: Any, work: Callable[[Any], Any]) -> list[_Attempt]:
        # A twin appends as well where nothing tells repeats.
        chance = 0.0 if self.plan.guarantee == "at_least_once" else 0.05
        twin = self._world.choices.draw(f"s{self.driver.pid}.{batch}.{number}", 2, chance)
        return [self._attempt(batch, number, part, work) for _ in range(1 + twin)]

    def _attempt(self, batch: int, number: int, part: Any, work: Callable[[Any], Any]) -> _Attempt:
        attempt = _Attempt()

        def run() -> None:
            try:
                attempt.result = work(part)
                attempt.done = True
            except Exception as error:
                attempt.failure = error
                self._machine.repeats += 1
            attempt.changed.open()

        task = self.executors.spawn(run, f"task {batch}.{number}")
        task.local = {
            "task": number,
            "sql.streaming.queryId": self.query_id,
            "streaming.sql.batchId": str(batch),
            "spark.master": "local[2]",
        }
        return attempt

    # Its end.

    def at_rest(self, ends: list[int]) -> bool:
        """Whether it has nothing more to do."""
        return self.idle_at is not None and all(
            at >= end for at, end in zip(pad(self.idle_at, len(ends)), ends, strict=False)
        )

    def stop(self, timeout: float = 30.0) -> None:
        """Stop it as its user does, in the driver's process."""
        source, ended = self.plan.query_source, Gate()
        query = MicroBatchQuery(
            _StreamingQuery(self),  # type: ignore[arg-type]  # what is asked of one
            self.plan.checkpoint,
            [] if source is None else [source],
            expected_epochs=self.expected,
        )

        def work() -> None:
            query.stop(timeout)
            ended.open()

        if self.driver.alive:
            self.driver.spawn(work, "stop")
            self._world.wait(ended, seconds=timeout + 10.0)
        self.driver.kill()


class _StreamingQuery:
    """What PySpark's class of that name says of a run, as far as a pipeline's query asks."""

    id, runId, name = "id", "run", "simulated"

    def __init__(self, run: MicroBatchRun) -> None:
        self._run = run

    @property
    def isActive(self) -> bool:
        return not self._run.ended

    @property
    def lastProgress(self) -> Any:
        return self._run.progress

    @property
    def status(self) -> dict[str, Any]:
        return {"isTriggerActive": self._run.active, "isDataAvailable": self._run.active}

    def stop(self) -> None:
        """Interrupt the query's thread, and end its tasks."""
        run = self._run
        run._machine.repeats += run.busy
        run.ended = True
        run.executors.kill()
        run._machine.kill_tasks([task for task in run.driver.tasks if task.name == "query" and not task.done])
        for server in run._machine.servers.values():
            # The process of the reader is a child of Spark's, which ends with the query.
            server.forget_owners(run.driver)


class _Attempt:
    """One try of a task."""

    def __init__(self) -> None:
        self.result: Any = None
        self.failure: Exception | None = None
        self.done = False
        self.changed = Gate()


class _Frame:
    """What a table's writer asks of a micro-batch's DataFrame."""

    def __init__(self, run: MicroBatchRun, reader: QueueStreamReader, parts: list[Any], batch: int) -> None:
        self._run, self._reader, self._parts, self._batch = run, reader, parts, batch

    def mapInArrow(self, work: Callable[[Any], Iterator[pa.RecordBatch]], report: str) -> _Frame:
        self._work = work
        return self

    def collect(self) -> list[Any]:
        from pyspark.sql import Row

        def task(part: Any) -> list[pa.RecordBatch]:
            rows = (_shaped(batch) for batch in _rows(self._reader, part))
            return list(self._work(rows))

        batches_by_task = self._run._tasks(self._batch, self._parts, task)
        return [Row(**row) for batches in batches_by_task for batch in batches for row in batch.to_pylist()]


def _shaped(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.rename_columns([f"c{place}" for place in range(batch.num_columns)])


def as_selected(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with the key as the query has it, whatever type it has in the queue."""
    place = batch.schema.get_field_index("key")
    return batch.set_column(place, KEY, batch.column(place).cast(KEY.type))


def _rows(reader: QueueStreamReader, part: Any) -> Iterator[pa.RecordBatch]:
    """The rows of a task, in the columns that the query selects."""
    if part is not None:
        for batch in reader.read(part):
            yield as_selected(batch.select(COLUMNS.names))
