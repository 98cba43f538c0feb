"""Penstock's own streaming reads in a plan, without side effects: no consumer moves or is owned, no slot
advances.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from penstock.changes.data_source import FORMAT as CHANGES
from penstock.changes.data_source import STREAM, ChangesStreamReader, read_options
from penstock.json_text import Json
from penstock.queue.store import open_store
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.plans import StreamingRead
from penstock.spark.internals.python_workers import check_reach
from penstock.spark.options import BATCH_SOURCE, STREAM_SOURCE, source_options, with_defaults
from penstock.spark.schemas import projection, source_schema
from penstock.spark.session import session_defaults
from penstock.spark.stream_reader import QueueStreamReader

_READ = "StreamingRelationV2"


class RowScope(IntEnum):
    """The input rows that an output row of a plan may depend on."""

    ROW = 1
    """One row."""
    MICRO_BATCH = 2
    """The rows of one micro-batch."""
    STREAM = 3
    """All earlier rows, which Spark keeps as state; or unknown."""


def row_scope(frame: DataFrame) -> RowScope:
    """Return the scope of a plan over one streaming read; STREAM if it has several."""
    names = [node.name for node in plan_tree(frame).walk()]
    operators = [traits_of(name) for name in names if name != _READ]
    if names.count(_READ) != 1 or not all(map(_is_local, operators)):
        return RowScope.STREAM
    return RowScope.MICRO_BATCH if any(Trait.PER_BATCH in each for each in operators) else RowScope.ROW


def may_keep_state(frame: DataFrame) -> bool:
    """Return whether a task may keep state, so that it must read all rows to commit it."""
    names = {node.name for node in plan_tree(frame).walk() if node.children}
    return not all(name == "Union" or _is_local(traits_of(name)) for name in names)


def _is_local(operator: Trait) -> bool:
    """Return whether an operator's output rows depend on one micro-batch at most."""
    return bool(operator & (Trait.PER_ROW | Trait.PER_BATCH))


QUEUE = "penstock"
_LIMITS = ("maxrowsperpartition", "maxrowspertrigger", "maxbytespertrigger", "maxcommitspertrigger")
_STARTS = ("startingoffsets", "startingtimestamp", "startingversion", "startingboundinclusive")

Offset: TypeAlias = Json


class Reader(Protocol):
    """The methods of Penstock's two streaming readers that are called here."""

    def initialOffset(self) -> Offset: ...
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset: ...
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]: ...
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]: ...


@dataclass(frozen=True)
class PenstockRead:
    """A read of a queue or of a change feed."""

    spark: SparkSession
    format: str
    options: Mapping[str, str] = field(repr=False)
    """With names in lower case, without a consumer."""
    schema: StructType

    @classmethod
    def of(cls, spark: SparkSession, read: StreamingRead) -> PenstockRead | None:
        """Return the read of a plan's leaf; None if it is of another source."""
        if read.format == QUEUE:
            return cls(spark, QUEUE, _without_consumer(spark, read.options), read.schema)
        if read.format == CHANGES:
            return cls(spark, CHANGES, {**read.options, "readonly": "true"}, read.schema)
        return None

    @property
    def has_whole_commits(self) -> bool:
        """Whether micro-batches hold whole commits, which transformations may rely on."""
        return self.format == CHANGES

    @property
    def can_resume(self) -> bool:
        """Whether a stream can start at an offset: the bounds of a range are both versions, or both times."""
        return "endingtimestamp" not in self.options

    def reader(self, rows: int | None) -> Reader:
        """Return a reader for this process, of ranges of so many rows (of a feed, of whole commits)."""
        if self.format == CHANGES:
            feed_options = read_options(self.options, STREAM, "streaming read of changes")
            most = min(filter(None, (rows, feed_options.max_rows)), default=None)
            return ChangesStreamReader(replace(feed_options, max_rows=most), self.schema)
        options = source_options(self.options, streaming=True)
        options = replace(
            options, max_rows_per_trigger=rows, max_rows_per_partition=None, max_bytes_per_trigger=None
        )
        check_reach(options.url, self.spark.conf.get("spark.master", None))
        queue = open_store(options.url, verify=True).queue(options.queue).record
        columns = projection(self.schema, source_schema(queue.schema, options.service_columns))
        return QueueStreamReader(options, queue, columns)

    def stream(self, after: Offset | None = None, *, rows: int | None = None) -> DataFrame:
        """Return the read for a streaming query, of a feed after an offset; ``rows`` is a default limit."""
        options = dict(self.options)
        if after is not None:
            options = {name: value for name, value in options.items() if name not in _STARTS}
            options["startingversion"] = str(int(after["to"]) + 1)
        if rows is not None and not options.keys() & set(_LIMITS):
            options["maxrowspertrigger"] = str(rows)
        return self.spark.readStream.format(self.format).schema(self.schema).options(**options).load()

    def batch(self, end: Offset, rows: int) -> DataFrame:
        """Return a queue's rows of one range as a static DataFrame; ``rows`` is about their number."""
        known = {name.lower() for name in BATCH_SOURCE}
        options = {name: value for name, value in self.options.items() if name in known.difference(_STARTS)}
        for name, bound in {"startingoffsets": "from", "endingoffsets": "to"}.items():
            options[name] = json.dumps(dict(enumerate(end[bound])))
        options["rowspertask"] = str(-(-rows // self.spark.sparkContext.defaultParallelism))
        return self.spark.read.format(QUEUE).schema(self.schema).options(**options).load()


def _without_consumer(spark: SparkSession, options: Mapping[str, str]) -> dict[str, str]:
    """Return a queue's options with the consumer replaced by its current offsets."""
    complete = with_defaults(options, session_defaults(spark), STREAM_SOURCE)
    parsed = source_options(complete, streaming=True)
    complete.pop("path", None)
    complete["queue"] = parsed.queue
    if parsed.consumer is None:
        return complete
    check_reach(parsed.url, spark.conf.get("spark.master", None))
    offsets = open_store(parsed.url, verify=True).consumer(parsed.consumer).offsets(parsed.queue)
    # startingOffsets prevents that the session's default consumer is used instead.
    del complete["consumer"]
    return {**complete, "startingoffsets": json.dumps(offsets)}
