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
    """What each attempt of a task reports to the sink's driver, such as how many rows it staged."""
    rows_in: int
    rows_out: int
    times: tuple[Times, ...] = ()
    """When some of its rows were created, read and written."""
    last_times: dict[int, int] = field(default_factory=dict)
    """When the last row read from each partition was created, in microseconds since 1970."""


@dataclass(frozen=True)
class Times:
    """Instants of some rows, in microseconds since 1970."""

    made: int
    read: int
    written: int
    """When the rows were in the sink, visible or staged."""
    rows: int


class ContinuousSource(ABC):
    """A source that a pipeline with the continuous trigger can read."""

    @abstractmethod
    def continuous_driver(self, spark: SparkSession) -> SourceDriver:
        """Return the source's driver side for one query, or raise ContinuousRefusedError."""


class ContinuousSink(ABC):
    """A sink that a pipeline with the continuous trigger can write to."""

    @abstractmethod
    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> SinkDriver:
        """Return the sink's driver side for one query, or raise ContinuousRefusedError."""

    def record(self, spark: SparkSession, query_id: str) -> SinkRecord | None:
        """Return the sink's record of a micro-batch query's commits; None if it keeps none."""
        return None


class SourceDriver(ABC):
    """The driver side of a source, for all runs of a query."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The source's name in progress reports."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema: ...

    def own(self) -> None:  # noqa: B027 - a source may have no other owner
        """Take ownership before each run, or raise OwnerFencedError if another query has taken over."""

    @abstractmethod
    def start(self, logged: JsonValue, begun: Callable[[], JsonValue] | None = None) -> Positions:
        """Return where a run begins.

        Parameters
        ----------
        logged
            The offset of the last committed epoch; None if there is none.
        begun
            Reads the offset of the first epoch if an earlier run has begun but not committed it: a source
            that keeps no position starts where that epoch started, not where the options now say.
        """

    @abstractmethod
    def ends(self) -> Positions:
        """Return the current ends of the partitions."""

    @abstractmethod
    def readers(self) -> ReaderFactory: ...

    @property
    def advanced_by_sink(self) -> bool:
        """Whether the sink's transaction also records an epoch in the source, or refuses it if another query
        has taken over. The checkpoint may then be written later, and :meth:`logged` is called rarely.
        """
        return False

    @abstractmethod
    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        """Return the offset to log for an epoch, and record that the epoch is in flight.

        ``last_times`` says when the last row read from each partition was created, in microseconds since
        1970, if its reader knows: the source may have other rows by now.
        """

    def follow(self, offset: JsonValue) -> None:  # noqa: B027 - a source may have nothing to move
        """Record, before a run, the last epoch in the sink: a driver that died may not have done so."""

    def logged(self, offset: JsonValue) -> bool:
        """Record that an epoch is committed and logged; return whether the source asks the query to end.

        Also called from time to time while nothing is committed. Raises OwnerFencedError.
        """
        return False

    def require_at(self, start: Positions) -> None:  # noqa: B027 - a source may not be restored
        """Check, while no epoch is committed, that the source was not restored to before the run's start."""

    def release(self, ended: JsonValue) -> None:  # noqa: B027 - a source may have no other owner
        """Give up ownership after the last run; everything up to the offset ``ended`` is committed."""


class SourceReader(ABC):
    """Reader of some partitions of a source, in one task."""

    skipped: bool = False
    """Whether it has only skipped lost rows, and read none, since ``offsets`` was last called."""

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Return rows that have arrived; None if there are none."""

    @abstractmethod
    def offsets(self) -> dict[int, int]:
        """Return the offset of each partition after the rows read."""

    @abstractmethod
    def wait(self, channel: Channel) -> None:
        """Return when there may be rows, or the driver has sent a message."""

    def last_times(self) -> dict[int, int]:
        """Return when the last row read from each partition was created, if that is known."""
        return {}

    def times(self) -> list[tuple[int, int]]:
        """Return when the last rows were created: instants in microseconds, each with its number of rows."""
        return []

    def behind(self) -> int:
        """Return the number of unread rows, as far as it is known."""
        return 0

    @property
    def grown(self) -> bool:
        """Whether the source has partitions that no task reads."""
        return False

    def close(self) -> None:  # noqa: B027 - it may hold none
        """Release its resources."""


class ReaderFactory(ABC):
    """Factory of readers for a source, sent to the tasks of a continuous query."""

    schema: pa.Schema

    @abstractmethod
    def open(self, positions: Mapping[int, int]) -> SourceReader:
        """Open a reader, in a task, of some partitions from these offsets on."""


@dataclass(frozen=True)
class SinkEpoch:
    """The last epoch or micro-batch of a query in a sink, by the sink's own record."""

    number: int
    """The number of the epoch or micro-batch; -1 when the sink has none."""
    offset: JsonValue = None
    """The offset that the checkpoint logs for it; None for a micro-batch, which Spark logs before the
    commit."""
    rows: int = 0
    before: JsonValue = None
    """The offset of the epoch before it, if the sink keeps it; the checkpoint may then lack several."""
    identified: bool = True
    """Whether the record identifies the rows. False for a micro-batch in a sink that may repeat rows: another
    copy of the checkpoint may have written it, with other rows."""


class SinkRecord(ABC):
    """A sink's record of what a query has committed to it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The sink's name in progress reports and messages."""

    def newest(self) -> SinkEpoch | None:
        """Return the last epoch in the sink; None when it keeps no record.

        Raises CheckpointMismatchError when another checkpoint wrote the record.
        """
        return None

    @property
    def may_be_new(self) -> bool:
        """Whether the sink may have no commits of the query although the checkpoint is not new."""
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
        """Whether ``commit`` records the offset in its transaction, and ``newest`` returns the last two
        offsets; the checkpoint may then be written later.
        """
        return False

    def check(self, schema: StructType) -> None:
        """Refuse rows that the sink cannot take."""

    def clear(self) -> None:
        """Drop what earlier runs have staged; called when none of their tasks is still active."""

    @abstractmethod
    def writers(self) -> WriterFactory: ...

    @abstractmethod
    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        """Make an epoch that these writers wrote visible, once, before the checkpoint logs its offset."""


class SinkWriter(ABC):
    """Writer of one task to a sink."""

    @abstractmethod
    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        """Write rows of an epoch, visible immediately or staged for its end."""

    @abstractmethod
    def end(self, epoch: int) -> Json:
        """End an epoch whose rows are all written; return what its commit needs, by attempt."""

    def close(self) -> None:  # noqa: B027 - it may hold none
        """Release its resources."""


class WriterFactory(ABC):
    """Factory of writers to a sink, sent to the tasks of a continuous query."""

    def shaped(self, frame: ContinuousFrame) -> ContinuousFrame:
        """Return the rows in the form that the writers take, as the last step in Spark."""
        return frame

    @abstractmethod
    def open(self, task: int) -> SinkWriter:
        """Open a task's writer, in the task."""
