"""Protocols for the sources and sinks of continuous queries.

::

    ContinuousSource -> SourceDriver -> ReaderFactory -> SourceReader
    ContinuousSink   -> SinkDriver   -> WriterFactory -> SinkWriter
    in the pipeline     on the driver   carried to       in a task
                                        the tasks
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from penstock.continuous.channel import Channel
from penstock.json_text import Json, JsonValue

if TYPE_CHECKING:
    from penstock.continuous.dataframe import ContinuousFrame

Positions = dict[int, int]
"""The offset of each partition of a source."""


@dataclass(frozen=True)
class Epoch:
    """A complete epoch."""

    number: int
    offsets: dict[int, int]
    """The offset of each partition of the source at its end."""
    attempts: Json
    """What each attempt of a task reports to the sink's driver, such as how much it staged."""
    rows_in: int
    rows_out: int
    times: tuple[Times, ...] = ()
    """When some of its rows were created, read and written."""
    last_times: dict[int, int] = field(default_factory=dict)
    """When the last row that was read of each partition was created, in microseconds since 1970."""


@dataclass(frozen=True)
class Times:
    """Instants of some rows, in microseconds since 1970."""

    made: int
    read: int
    written: int
    """When they were in the sink, whether visible or staged."""
    rows: int


class ContinuousSource(ABC):
    """A source that a pipeline with the continuous trigger can read."""

    @abstractmethod
    def continuous_driver(self, spark: SparkSession) -> SourceDriver:
        """Return its driver side for one query, or raise ContinuousRefusedError."""


class ContinuousSink(ABC):
    """A sink that a pipeline with the continuous trigger can write to."""

    @abstractmethod
    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> SinkDriver:
        """Return its driver side for one query, or raise ContinuousRefusedError."""

    def record(self, spark: SparkSession, query_id: str) -> SinkRecord | None:
        """Return its record of a query's commits, for a query of micro-batches; None if it keeps none."""
        return None


class SourceDriver(ABC):
    """The driver side of a source, for all runs of a query."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What progress calls it."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema: ...

    def own(self) -> None:  # noqa: B027 - a source may have no other owner
        """Take ownership before each run, or raise OwnerFencedError if another query has taken over since."""

    @abstractmethod
    def start(self, logged: JsonValue, begun: Callable[[], JsonValue] | None = None) -> Positions:
        """Return where a run begins.

        Parameters
        ----------
        logged
            The offset of the last committed epoch; None if there is none.
        begun
            Reads the offset of the first epoch, if an earlier run has begun and not committed it: a source
            without a position of its own starts where that epoch started, and not where the options say now.
        """

    @abstractmethod
    def ends(self) -> Positions:
        """Return where the partitions end now."""

    @abstractmethod
    def readers(self) -> ReaderFactory: ...

    @property
    def advanced_by_sink(self) -> bool:
        """Whether the transaction of the sink records an epoch here as well, or refuses it if another
        query has taken over; the checkpoint may then be written later, and :meth:`logged` called seldom.
        """
        return False

    @abstractmethod
    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        """Return the offset to log for an epoch, and record that the epoch is in flight.

        ``last_times`` says when the last row read of each partition was created, in microseconds since 1970,
        as far as its reader knows: the source may have other rows by now.
        """

    def follow(self, offset: JsonValue) -> None:  # noqa: B027 - a source may have nothing to move
        """Record, before a run, the last epoch that the sink has: a driver that died may not have done so."""

    def logged(self, offset: JsonValue) -> bool:
        """Record that an epoch is committed and logged; return whether the source asks the query to end.

        Also called now and then while nothing is committed. Raises OwnerFencedError.
        """
        return False

    def require_at(self, start: Positions) -> None:  # noqa: B027 - a source may not be restored
        """Check, while no epoch is committed, that the source was not restored to before the run's start."""

    def release(self, ended: JsonValue) -> None:  # noqa: B027 - a source may have no other owner
        """Give up ownership after the last run; everything up to this offset is committed."""


class SourceReader(ABC):
    """Reader of some partitions of a source, in one task."""

    skipped: bool = False
    """Whether it has skipped lost rows since its offsets were last asked for, and has read none."""

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Return rows that have come; None if there are none."""

    @abstractmethod
    def offsets(self) -> dict[int, int]:
        """Return the offset of each partition after the rows that were read."""

    @abstractmethod
    def wait(self, channel: Channel) -> None:
        """Return when there may be rows, or the driver has sent a message."""

    def last_times(self) -> dict[int, int]:
        """Return when the last row that was read of each partition was created, if that is known."""
        return {}

    def times(self) -> list[tuple[int, int]]:
        """Return when the last rows were created: instants in microseconds with their numbers of rows."""
        return []

    def behind(self) -> int:
        """Return how many rows there are that were not read yet, as far as it is known."""
        return 0

    @property
    def grown(self) -> bool:
        """Whether the source has partitions that no task reads."""
        return False

    def close(self) -> None:  # noqa: B027 - it may hold none
        """Release its resources."""


class ReaderFactory(ABC):
    """Factory of readers for a source, carried to the tasks of a continuous query."""

    schema: pa.Schema

    @abstractmethod
    def open(self, positions: Mapping[int, int]) -> SourceReader:
        """Open a reader of some partitions, from these offsets on, in a task."""


@dataclass(frozen=True)
class SinkEpoch:
    """The last epoch or micro-batch of a query that a sink has, by the sink's own record."""

    number: int
    """-1 when it has none."""
    offset: JsonValue = None
    """What the checkpoint logs for it; None for a micro-batch, which Spark logs before the commit."""
    rows: int = 0
    before: JsonValue = None
    """The offset of the epoch before it, if the sink keeps that: a checkpoint may then lack several."""
    identified: bool = True
    """Whether the record says which rows they are. False for a micro-batch of a sink that may repeat rows:
    another copy of the checkpoint may have written it, with other rows."""


class SinkRecord(ABC):
    """A sink's record of what a query has committed to it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What progress and messages call the sink."""

    def newest(self) -> SinkEpoch | None:
        """Return the last epoch that the sink has; None when it keeps no record.

        Raises CheckpointMismatchError when another checkpoint wrote the record.
        """
        return None

    @property
    def may_be_new(self) -> bool:
        """Whether the sink may have nothing of the query although the checkpoint is not new."""
        return False


class SinkDriver(SinkRecord):
    """The driver side of a sink, for all runs of a query.

    Calls come in this order: ``check`` once; then for each run ``clear``, ``newest`` and ``writers``, and
    ``commit`` for each of its epochs. A job that catches up is a run of one epoch.
    """

    @property
    def at_once(self) -> bool:
        """Whether rows are visible when they are written, before their epoch is committed."""
        return False

    @property
    def keeps_offsets(self) -> bool:
        """Whether ``commit`` records the offset in its transaction, and ``newest`` returns the last two: the
        checkpoint may then follow later.
        """
        return False

    def check(self, schema: StructType) -> None:
        """Refuse rows that the sink cannot take."""

    def clear(self) -> None:
        """Drop what earlier runs have staged; called when none of their tasks is active."""

    @abstractmethod
    def writers(self) -> WriterFactory: ...

    @abstractmethod
    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        """Make an epoch of tasks with these writers visible, once, before the checkpoint logs its offset."""


class SinkWriter(ABC):
    """Writer of one task to a sink."""

    @abstractmethod
    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        """Write rows of an epoch, visible at once or staged for its end."""

    @abstractmethod
    def end(self, epoch: int) -> Json:
        """End an epoch whose rows are all written; return what its commit has to know, by attempt."""

    def close(self) -> None:  # noqa: B027 - it may hold none
        """Release its resources."""


class WriterFactory(ABC):
    """Factory of writers to a sink, carried to the tasks of a continuous query."""

    def shaped(self, frame: ContinuousFrame) -> ContinuousFrame:
        """Return the rows as the writers take them; Spark does this last."""
        return frame

    @abstractmethod
    def open(self, task: int) -> SinkWriter:
        """Open a task's writer, in the task."""
