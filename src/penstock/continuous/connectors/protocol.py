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
    """The offset of each partition at the end of the epoch."""
    attempts: Json
    """The report of each task attempt to the sink's driver, such as how many parts it has staged."""
    rows_in: int
    rows_out: int
    times: tuple[Times, ...] = ()
    """When rows of the epoch were created, read and written; for a sample of its rows."""
    last_times: dict[int, int] = field(default_factory=dict)
    """When the last row read from each partition was created, in microseconds since 1970."""


@dataclass(frozen=True)
class Times:
    """When some rows were created, read and written, in microseconds since 1970."""

    created: int
    read: int
    written: int
    """When the rows were visible or staged in the sink."""
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

    def take_ownership(self) -> None:  # noqa: B027 - a source may have no other owner
        """Take ownership before a run; raise OwnerFencedError if another query has taken over."""

    @abstractmethod
    def start(self, committed: JsonValue, read_begun: Callable[[], JsonValue] | None = None) -> Positions:
        """Return the offsets at which a run starts.

        Parameters
        ----------
        committed
            The offset of the last committed epoch; None if there is none.
        read_begun
            Reads the logged offset of epoch 0, if an earlier run has begun it without committing it. A source
            that has no consumer then starts where that epoch started, whatever its options now say.
        """

    @abstractmethod
    def end_offsets(self) -> Positions:
        """Return the current end of each partition."""

    @abstractmethod
    def reader_factory(self) -> ReaderFactory: ...

    @property
    def advanced_by_sink(self) -> bool:
        """Whether the sink's transaction also moves the source's consumer, and fails if another query has
        taken over. The checkpoint may then be written later, and :meth:`notify_logged` is called rarely.
        """
        return False

    @abstractmethod
    def plan(self, start: Positions, end: Positions, last_times: Mapping[int, int]) -> JsonValue:
        """Return the offset to log for an epoch, and record that the epoch is in flight.

        ``last_times`` has the creation time of the last row read from each partition, in microseconds since
        1970, if the reader knows it. The source may have other rows by now.
        """

    def move_past_commit(self, offset: JsonValue) -> None:  # noqa: B027 - a source may have nothing to move
        """Record the last epoch in the sink before a run, in case its driver died before it did so."""

    def notify_logged(self, offset: JsonValue) -> bool:
        """Record that an epoch is committed and logged; return whether the source asks the query to end.

        Also called regularly while nothing is committed. Raises OwnerFencedError if another query has taken
        over.
        """
        return False

    def require_not_restored(self, start: Positions) -> None:  # noqa: B027 - a source may not be restored
        """Refuse a source that was restored to before the run's start; called while no epoch is logged."""

    def release(self, last_offset: JsonValue) -> None:  # noqa: B027 - a source may have no other owner
        """Give up ownership after the last run; everything up to ``last_offset`` is committed."""


class SourceReader(ABC):
    """Reader of some partitions of a source, in one task."""

    skipped_rows: bool = False
    """Whether the reader has only skipped lost rows since the last call of ``offsets``."""

    @abstractmethod
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Return rows that have arrived; None if there are none."""

    @abstractmethod
    def offsets(self) -> dict[int, int]:
        """Return the offset of each partition after the rows that were read."""

    @abstractmethod
    def wait(self, channel: Channel) -> None:
        """Wait until there may be rows, or the driver has sent a message."""

    def last_times(self) -> dict[int, int]:
        """Return when the last row read from each partition was created, if known."""
        return {}

    def creation_times(self) -> list[tuple[int, int]]:
        """Return creation times of the last rows read, in microseconds, each with its number of rows."""
        return []

    def unread_rows(self) -> int:
        """Return the number of unread rows, as far as known."""
        return 0

    @property
    def has_new_partitions(self) -> bool:
        """Whether the source has new partitions, which no task reads."""
        return False

    def close(self) -> None:  # noqa: B027 - it may have none
        """Release its resources."""


class ReaderFactory(ABC):
    """Factory of readers for a source, sent to the tasks of a continuous query."""

    schema: pa.Schema

    @abstractmethod
    def open(self, positions: Mapping[int, int]) -> SourceReader:
        """Open a reader in a task, for these partitions, starting at these offsets."""


@dataclass(frozen=True)
class SinkEpoch:
    """The last epoch or micro-batch of a query in a sink, from the sink's own record."""

    number: int
    """The number of the epoch or micro-batch; -1 when the sink has none."""
    offset: JsonValue = None
    """The offset that the checkpoint logs for it; None for a micro-batch, which Spark logs before the
    commit."""
    rows: int = 0
    previous_offset: JsonValue = None
    """The previous epoch's offset, if the sink keeps it. The checkpoint may then lack several epochs."""
    identifies_rows: bool = True
    """Whether the record identifies the rows. False for a micro-batch in a sink that may repeat rows: it may
    have been written with other rows, from another copy of the checkpoint."""


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
    def allows_new_sink(self) -> bool:
        """Whether the sink may be new to the query although the checkpoint is not new."""
        return False


class SinkDriver(SinkRecord):
    """The driver side of a sink, for all runs of a query.

    Calls come in this order: ``check`` once; for each run ``newest``, ``delete_staged`` and
    ``writer_factory``; for each epoch of the run ``commit``. A catch-up job is a run with one epoch.
    """

    @property
    def visible_when_written(self) -> bool:
        """Whether rows are visible as soon as they are written, before their epoch is committed."""
        return False

    @property
    def records_offsets(self) -> bool:
        """Whether ``commit`` records the offset in its transaction, and ``newest`` returns the last two
        offsets; the checkpoint may then be written later.
        """
        return False

    def check(self, schema: StructType) -> None:
        """Refuse a schema that the sink does not accept."""

    def delete_staged(self) -> None:
        """Delete what earlier runs have staged. Their tasks have ended."""

    @abstractmethod
    def writer_factory(self) -> WriterFactory: ...

    @abstractmethod
    def commit(self, writers: WriterFactory, epoch: Epoch, offset: JsonValue) -> None:
        """Make the rows of an epoch visible, exactly once; the checkpoint logs its offset later."""


class SinkWriter(ABC):
    """Writer of one task to a sink."""

    @abstractmethod
    def write(self, rows: list[pa.RecordBatch], epoch: int) -> None:
        """Write rows of an epoch: visible immediately, or staged until its commit."""

    @abstractmethod
    def end(self, epoch: int) -> Json:
        """End an epoch after all its rows are written; return what the commit needs, by task attempt."""

    def close(self) -> None:  # noqa: B027 - it may have none
        """Release its resources."""


class WriterFactory(ABC):
    """Factory of writers to a sink, sent to the tasks of a continuous query."""

    def convert(self, frame: ContinuousFrame) -> ContinuousFrame:
        """Convert rows to the form that the writers take; the last step in Spark."""
        return frame

    @abstractmethod
    def open(self, task: int) -> SinkWriter:
        """Open a task's writer, in the task."""
