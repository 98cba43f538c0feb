"""Protocols for the sources and sinks of continuous queries: their driver side, and what they carry to tasks.

The task side is in :mod:`penstock.continuous.task.reader` and :mod:`penstock.continuous.task.writer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from penstock.continuous.driver.epochs import Epoch
from penstock.continuous.task.reader import ReaderFactory
from penstock.continuous.task.writer import WriterFactory

Positions = dict[int, int]
"""The offset of each partition of a source."""


class ContinuousSource(ABC):
    """A source that a pipeline with the continuous trigger can read."""

    @abstractmethod
    def continuous_driver(self, spark: SparkSession) -> SourceDriver:
        """Return its driver side for one query.

        Raises
        ------
        ContinuousRefused
            When it cannot be read with these settings.
        """


class ContinuousSink(ABC):
    """A sink that a pipeline with the continuous trigger can write to."""

    @abstractmethod
    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> SinkDriver:
        """Return its driver side for one query.

        Raises
        ------
        ContinuousRefused
            When it cannot be written to with these settings.
        """

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
    def schema(self) -> pa.Schema:
        """The schema of its rows."""

    @abstractmethod
    def own(self) -> None:
        """Take ownership of the source before each run; the previous owner is fenced.

        Raises
        ------
        OwnerFenced
            When another query has taken over since the last run.
        """

    @abstractmethod
    def start(self, logged: Any | None) -> Positions:
        """Return where a run begins.

        Parameters
        ----------
        logged
            The offset of the last committed epoch; None with a new checkpoint.
        """

    @abstractmethod
    def ends(self) -> Positions:
        """Return where the partitions end now."""

    @abstractmethod
    def readers(self) -> ReaderFactory:
        """Return what is carried to the tasks of a run to read with."""

    @abstractmethod
    def plan(self, start: Positions, end: Positions) -> Any:
        """Return the offset to log for an epoch, and record that the epoch is in flight."""

    def follow(self, offset: Any) -> None:  # noqa: B027 - most have nothing to move
        """Record, before a run, the last epoch that the sink has: a driver that died may not have done so."""

    @abstractmethod
    def logged(self, offset: Any) -> bool:
        """Record that an epoch is committed and logged; return whether the source asks the query to end.

        Also called now and then while nothing is committed.

        Raises
        ------
        OwnerFenced
            When another query has taken over.
        """

    @abstractmethod
    def release(self, ended: Any | None) -> None:
        """Give up ownership after the last run; everything up to this offset is committed."""


@dataclass(frozen=True)
class SinkEpoch:
    """The last epoch or micro-batch of a query that a sink has, by the sink's own record."""

    number: int
    """-1 when it has none."""
    offset: Any = None
    """The offset that the checkpoint logs for it; None for a micro-batch, which Spark logs before the
    commit."""
    rows: int = 0


class SinkRecord(ABC):
    """A sink's record of what a query has committed to it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What progress and messages call the sink."""

    def newest(self) -> SinkEpoch | None:
        """Return the last epoch that the sink has; None when it keeps no record.

        Raises
        ------
        CheckpointMismatch
            When another checkpoint wrote the record.
        """
        return None

    @property
    def may_be_new(self) -> bool:
        """Whether the sink may have nothing of the query although the checkpoint is not new."""
        return False


class SinkDriver(SinkRecord):
    """The driver side of a sink, for all runs of a query.

    Calls come in this order: ``check`` once; then for each run ``clear``, ``newest`` and ``writers``, and
    ``commit`` for each of its epochs. A run with another batch size asks for its ``writers`` while the
    previous run is still active.
    """

    @property
    def at_once(self) -> bool:
        """Whether rows are visible when they are written, before their epoch is committed."""
        return False

    @abstractmethod
    def check(self, schema: StructType) -> None:
        """Refuse rows that the sink cannot take.

        Raises
        ------
        SchemaMismatch
        """

    def clear(self) -> None:
        """Drop what earlier runs have staged; called when none of their tasks is active."""

    @abstractmethod
    def writers(self) -> WriterFactory:
        """Return what is carried to the tasks of a run to write with."""

    @abstractmethod
    def commit(self, writers: WriterFactory, epoch: Epoch, offset: Any) -> None:
        """Make an epoch visible, once, before the checkpoint logs it.

        Parameters
        ----------
        writers
            What the tasks of the epoch wrote with.
        epoch
            Its number, and what the tasks reported.
        offset
            The offset that the checkpoint will log.
        """
