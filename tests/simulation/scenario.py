"""Scenario of a schedule: the stores, queues, query, producers and programs that it begins with.

A scenario is drawn from the schedule's choices. Choice 0 is always the simplest alternative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from penstock.spark.options import SinkOptions, SourceOptions
from penstock.tables.sink import TableSink
from tests.simulation.query import KEY, Query
from tests.simulation.scheduler import Choices

SCHEMA = pa.schema([("id", pa.int64()), KEY])
WIDER_KEY = pa.field("key", pa.int64())
"""The type to which a queue's key may be widened."""
SOURCE, SINK, TABLE, CONSUMER, PROGRAM = "source", "sink", "totals", "billing", "reports"
ADDED_COLUMN = "note"
"""A column that a queue may get later, and that the query does not select."""

MICRO_BATCH, CONTINUOUS = "micro-batch", "continuous"


class TaskLimits(NamedTuple):
    """Options that decide how a micro-batch is split into tasks."""

    rows_per_task: int
    max_tasks: int


TASK_LIMITS = (
    TaskLimits(4, 100),
    TaskLimits(2, 100),
    TaskLimits(100, 100),
    TaskLimits(3, 1),
    TaskLimits(100, 1),
)


@dataclass(frozen=True)
class Scenario:
    """Initial state of the query and everything around it."""

    engine: str
    pipeline: bool
    """Whether a pipeline starts the micro-batches, rather than ``writeStream``.

    A pipeline first compares the checkpoint with the sink.
    """
    two_stores: bool
    row_locks: bool
    """Whether the stores lock rows, as PostgreSQL does, rather than the whole file."""
    consumer: bool
    vital: bool
    sink: str
    """``queue``, ``keyed`` or ``table``."""
    guarantee: str
    source_partitions: int
    sink_partitions: int
    appends: int
    max_rows_per_append: int

    max_rows_per_trigger: int | None
    task_limits: TaskLimits
    fail_on_data_loss: bool
    background_maintenance: bool
    """Whether a background task compacts segments and cleans up staged rows."""
    first_append_delay: float
    """Seconds before the first append."""
    switches_engine: bool
    """Whether each restart may switch to the other engine."""
    object_storage: bool
    """Whether larger appends are kept in object storage."""
    programs: int
    """How many Python programs compete for the source's rows through a consumer of their own."""

    @classmethod
    def draw(cls, choices: Choices) -> Scenario:
        def choose(name: str, *values: object) -> object:
            return values[choices.draw(name, len(values))]

        engine = choose("engine", MICRO_BATCH, CONTINUOUS)
        sink = choose("sink", "queue", "keyed", "table")
        guarantees = ["exactly_once", "exactly_once", "exactly_once", "at_least_once"]
        if engine == MICRO_BATCH and sink != "table":
            guarantees.append("idempotent")
        return cls(
            engine=engine,
            pipeline=engine == CONTINUOUS or bool(choose("pipeline", True, True, False)),
            two_stores=bool(choose("stores", False, True)),
            row_locks=bool(choose("rows", False, True)),
            consumer=bool(choose("consumer", True, True, False)),
            vital=bool(choose("vital", True, True, False)),
            sink=sink,
            guarantee=choose("guarantee", *guarantees),
            source_partitions=choose("source partitions", 1, 2),
            sink_partitions=choose("sink partitions", 1, 2, 3),
            appends=choose("appends", 2, 4, 8, 14),
            max_rows_per_append=choose("rows per append", 3, 3, 12),
            max_rows_per_trigger=choose("max rows", None, 3, 7),
            task_limits=choose("division", *TASK_LIMITS),
            fail_on_data_loss=bool(choose("fail on data loss", True, True, False)),
            background_maintenance=bool(choose("maintained", False, False, True)),
            first_append_delay=choose("quiet start", 0.0, 0.0, 4.0),
            switches_engine=bool(choose("switches", False, False, True)),
            programs=choose("programs", 0, 0, 0, 0, 1, 2),
            object_storage=bool(choose("objects", False, False, True)),
        )

    def query(self, source_url: str, sink_url: str, checkpoint: str, task_limits: TaskLimits) -> Query:
        """Return the query with the options of its next run."""
        source = SourceOptions(
            source_url,
            SOURCE,
            consumer=CONSUMER if self.consumer else None,
            fail_on_data_loss=self.fail_on_data_loss,
            rows_per_task=task_limits.rows_per_task,
            max_tasks=task_limits.max_tasks,
            max_rows_per_trigger=self.max_rows_per_trigger,
            # A pipeline sets this option of its source.
            moved_by_sink=self.pipeline and self.guarantee != "at_least_once" and not self.two_stores,
        )
        sink: SinkOptions | TableSink
        if self.sink == "table":
            sink = TableSink(TABLE, url=sink_url)
        else:
            sink = SinkOptions(sink_url, SINK, self.guarantee, max_rows_per_write=3, checkpoint=checkpoint)
        return Query(source, sink, sink_url, self.guarantee, checkpoint, self.pipeline)
