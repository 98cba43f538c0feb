"""What a schedule is about: stores, queues, a query, producers.

They are drawn from its choices, and are the simplest where those are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from penstock.spark.options import SinkOptions, SourceOptions
from penstock.tables.sink import TableSink
from tests.simulation.micro_batch import KEY, Plan
from tests.simulation.scheduler import Choices

SCHEMA = pa.schema([("id", pa.int64()), KEY])
WIDER = pa.field("key", pa.int64())
"""What the key may become."""
SOURCE, SINK, TABLE, CONSUMER, PROGRAM = "source", "sink", "totals", "billing", "reports"
ADDED = "note"
"""A column that a queue may get later, which the query does not select."""
FOREIGN = 1_000_000
"""From here on ids are those of producers that append to the sink themselves."""

MICRO_BATCH, CONTINUOUS = "micro-batch", "continuous"


class Division(NamedTuple):
    """How a micro-batch is divided into tasks."""

    rows_per_task: int
    max_tasks: int


DIVISIONS = Division(4, 100), Division(2, 100), Division(100, 100), Division(3, 1), Division(100, 1)


@dataclass(frozen=True)
class Scenario:
    """The query and its surroundings, as they begin."""

    engine: str
    pipeline: bool
    """Whether a pipeline starts the micro-batches, or ``writeStream``.

    A pipeline looks up what the sink has before that.
    """
    two_stores: bool
    rows: bool
    """Whether the stores lock rows, as PostgreSQL does."""
    consumer: bool
    vital: bool
    sink: str
    """``queue``, ``keyed`` or ``table``."""
    guarantee: str
    source_partitions: int
    sink_partitions: int
    appends: int
    rows_per_append: int
    """At the most."""
    available_now: bool
    max_rows: int | None
    division: Division
    fail_on_data_loss: bool
    maintained: bool
    """Whether segments are merged and staging is cleaned up all the while."""
    quiet_start: float
    """Seconds before anything is appended."""
    switches: bool
    """Whether each run may be of the other engine than the one before it."""
    objects: bool
    """Whether larger appends are in object storage."""
    programs: int
    """How many Python programs compete for the source's rows, through a consumer of their own."""

    @classmethod
    def drawn(cls, choices: Choices) -> Scenario:
        def one(name: str, *values: object) -> object:
            return values[choices.draw(name, len(values))]

        engine = one("engine", MICRO_BATCH, CONTINUOUS)
        sink = one("sink", "queue", "keyed", "table")
        guarantees = ["exactly_once", "exactly_once", "exactly_once", "at_least_once"]
        if engine == MICRO_BATCH and sink != "table":
            guarantees.append("idempotent")
        return cls(
            engine=engine,
            pipeline=engine == CONTINUOUS or bool(one("pipeline", True, True, False)),
            two_stores=bool(one("stores", False, True)),
            rows=bool(one("rows", False, True)),
            consumer=bool(one("consumer", True, True, False)),
            vital=bool(one("vital", True, True, False)),
            sink=sink,
            guarantee=one("guarantee", *guarantees),
            source_partitions=one("source partitions", 1, 2),
            sink_partitions=one("sink partitions", 1, 2, 3),
            appends=one("appends", 2, 4, 8, 14),
            rows_per_append=one("rows per append", 3, 3, 12),
            available_now=False,
            max_rows=one("max rows", None, 3, 7),
            division=one("division", *DIVISIONS),
            fail_on_data_loss=bool(one("fail on data loss", True, True, False)),
            maintained=bool(one("maintained", False, False, True)),
            quiet_start=one("quiet start", 0.0, 0.0, 4.0),
            switches=bool(one("switches", False, False, True)),
            programs=one("programs", 0, 0, 0, 0, 1, 2),
            objects=bool(one("objects", False, False, True)),
        )

    def plan(self, source_url: str, sink_url: str, checkpoint: str, engine: str, division: Division) -> Plan:
        """One run of the query."""
        source = SourceOptions(
            source_url,
            SOURCE,
            consumer=CONSUMER if self.consumer else None,
            fail_on_data_loss=self.fail_on_data_loss,
            rows_per_task=division.rows_per_task,
            max_tasks=division.max_tasks,
            max_rows_per_trigger=self.max_rows,
            # As a pipeline says to its source.
            moved_by_sink=self.pipeline and self.guarantee != "at_least_once" and not self.two_stores,
        )
        sink: SinkOptions | TableSink
        if self.sink == "table":
            sink = TableSink(TABLE, url=sink_url)
        else:
            sink = SinkOptions(sink_url, SINK, self.guarantee, max_rows_per_write=3, checkpoint=checkpoint)
        return Plan(source, sink, sink_url, self.guarantee, checkpoint, self.available_now, self.pipeline)
