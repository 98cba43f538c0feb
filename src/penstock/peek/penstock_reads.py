"""What a plan does to its rows, as far as taking some of them depends on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from penstock.changes.data_source import FORMAT as CHANGES
from penstock.changes.data_source import STREAM, ChangesStreamReader, read_options
from penstock.queue.open_stores import open_store
from penstock.spark.internals.operators import Trait, traits_of
from penstock.spark.internals.plan_text import plan_tree
from penstock.spark.internals.plans import StreamingRead
from penstock.spark.options import BATCH_SOURCE, STREAM_SOURCE, source_options, with_defaults
from penstock.spark.registration import session_defaults
from penstock.spark.schemas import projection, source_schema
from penstock.spark.session_store import check_reach
from penstock.spark.source.stream_reader import QueueStreamReader

_READ = "StreamingRelationV2"


class RowScope(IntEnum):
    """On how much of the stream a row that comes out may depend."""

    ROW = 1
    """On one row that went in."""
    MICRO_BATCH = 2
    """On those of one micro-batch."""
    STREAM = 3
    """On all that came before, which Spark keeps as state, or on something that is not known here."""


def row_scope(frame: DataFrame) -> RowScope:
    """The reach of a plan over one streaming read; STREAM for all plans with more leaves."""
    names = [node.name for node in plan_tree(frame).walk()]
    operators = [traits_of(name) for name in names if name != _READ]
    if names.count(_READ) != 1 or not all(map(_is_short, operators)):
        return RowScope.STREAM
    return RowScope.MICRO_BATCH if any(Trait.PER_BATCH in each for each in operators) else RowScope.ROW


def may_keep_state(frame: DataFrame) -> bool:
    """Whether a task may have to read all its rows, because what it keeps of them is committed behind the last one."""
    names = {node.name for node in plan_tree(frame).walk() if node.children}
    return not all(name == "Union" or _is_short(traits_of(name)) for name in names)


def _is_short(operator: Trait) -> bool:
    """Whether rows that come out of an operator depend on one micro-batch at the most."""
    return bool(operator & (Trait.PER_ROW | Trait.PER_BATCH))


# ---- own_reads: Penstock's own streaming reads, made such that reading changes nothing: no consumer moves or is owned, no slot goes on.

QUEUE = "penstock"
_LIMITS = ("maxrowsperpartition", "maxrowspertrigger", "maxbytespertrigger", "maxcommitspertrigger")
_STARTS = ("startingoffsets", "startingtimestamp", "startingversion", "startingboundinclusive")

Offset = dict[str, Any]


class Reader(Protocol):
    """What both of Penstock's streaming readers have, as far as it is called here."""

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
    """By their names in lower case, without a consumer."""
    schema: StructType

    @classmethod
    def of(cls, spark: SparkSession, read: StreamingRead) -> PenstockRead | None:
        """The read of a plan's leaf; None when it is of another source.

        Raises
        ------
        NotFound, InvalidOption
            When its queue or its consumer is not there any more.
        """
        if read.format == QUEUE:
            return cls(spark, QUEUE, _without_consumer(spark, read.options), read.schema)
        if read.format == CHANGES:
            return cls(spark, CHANGES, {**read.options, "readonly": "true"}, read.schema)
        return None

    @property
    def has_whole_commits(self) -> bool:
        """Whether what is done with a micro-batch may depend on its having whole commits."""
        return self.format == CHANGES

    @property
    def can_go_on(self) -> bool:
        """Whether a stream can start where a reader stands: bounds of a range are both versions, or both times."""
        return "endingtimestamp" not in self.options

    def reader(self, rows: int | None) -> Reader:
        """A reader for this process.

        Parameters
        ----------
        rows
            The most that a range may have; of a feed rounded up to a whole commit. All that there is when None.
        """
        if self.format == CHANGES:
            given = read_options(self.options, STREAM, "streaming read of changes")
            least = min(filter(None, (rows, given.max_rows)), default=None)
            return ChangesStreamReader(replace(given, max_rows=least), self.schema)
        options = source_options(self.options, streaming=True)
        options = replace(
            options, max_rows_per_trigger=rows, max_rows_per_partition=None, max_bytes_per_trigger=None
        )
        check_reach(options.url, self.spark.conf.get("spark.master", None))
        queue = open_store(options.url, verify=True).queue(options.queue).record
        columns = projection(self.schema, source_schema(queue.schema, options.service_columns))
        return QueueStreamReader(options, queue, columns)

    def stream(self, stands: Offset | None = None, *, rows: int | None = None) -> DataFrame:
        """The read for a streaming query.

        Parameters
        ----------
        stands
            Where to go on, of a change feed; where the read starts by itself when None.
        rows
            The most in a micro-batch, unless the read has a limit of its own.
        """
        options = dict(self.options)
        if stands is not None:
            options = {name: value for name, value in options.items() if name not in _STARTS}
            options["startingversion"] = str(int(stands["to"]) + 1)
        if rows is not None and not options.keys() & set(_LIMITS):
            options["maxrowspertrigger"] = str(rows)
        return self.spark.readStream.format(self.format).schema(self.schema).options(**options).load()

    def batch(self, end: Offset, rows: int) -> DataFrame:
        """A queue's rows before an offset and behind the one before it, at rest.

        Parameters
        ----------
        rows
            About how many there are.
        """
        known = {name.lower() for name in BATCH_SOURCE}
        options = {name: value for name, value in self.options.items() if name in known.difference(_STARTS)}
        for name, bound in {"startingoffsets": "from", "endingoffsets": "to"}.items():
            options[name] = json.dumps(dict(enumerate(end[bound])))
        options["rowspertask"] = str(-(-rows // self.spark.sparkContext.defaultParallelism))
        return self.spark.read.format(QUEUE).schema(self.schema).options(**options).load()


def _without_consumer(spark: SparkSession, given: Mapping[str, str]) -> dict[str, str]:
    """A queue's options with the consumer's offsets, as they are now, in the consumer's place."""
    found = with_defaults(given, session_defaults(spark), STREAM_SOURCE)
    options = source_options(found, streaming=True)
    found.pop("path", None)
    found["queue"] = options.queue
    if options.consumer is None:
        return found
    check_reach(options.url, spark.conf.get("spark.master", None))
    offsets = open_store(options.url, verify=True).consumer(options.consumer).offsets(options.queue)
    # With startingOffsets given, the session's own default does not come in its place.
    del found["consumer"]
    return {**found, "startingoffsets": json.dumps(offsets)}
