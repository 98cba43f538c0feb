"""What the driver of a continuous query asks of its source and of its sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.continuous.driver.epochs import Epoch
from penstock.continuous.task.reader import Source
from penstock.continuous.task.writer import Sink

Positions = dict[int, int]
"""Where each partition of a source stands."""


class SourceDriver(ABC):
    """A source as the driver sees it, for all runs of a query."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What progress calls it."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Of its rows."""

    @abstractmethod
    def own(self) -> None:
        """Before each run: take hold of the source; whoever had it is fenced.

        Raises
        ------
        OwnerFenced
            When another query has taken over since the run before.
        """

    @abstractmethod
    def start(self, logged: Any | None) -> Positions:
        """Where a run begins.

        Parameters
        ----------
        logged
            The offset of the last committed epoch; None with a new checkpoint.
        """

    @abstractmethod
    def ends(self) -> Positions:
        """Where the partitions end now."""

    @abstractmethod
    def source(self) -> Source:
        """What tasks read."""

    @abstractmethod
    def plan(self, start: Positions, end: Positions) -> Any:
        """The offset of an epoch, as the log has it; the source takes note that it is in hand."""

    def follow(self, offset: Any) -> None:  # noqa: B027 - most have nothing to move
        """Take note, before a run, of the last epoch that the sink has: a driver that has died may not have said so."""

    @abstractmethod
    def logged(self, offset: Any) -> bool:
        """Told last, when an epoch is committed and logged, and again now and then while there is none; whether the source asks to end.

        Raises
        ------
        OwnerFenced
            When another query has taken over.
        """

    @abstractmethod
    def release(self, ended: Any | None) -> None:
        """After the last run: give up the hold; everything up to this offset is committed."""


@dataclass(frozen=True)
class SinkEpoch:
    """The last epoch or micro-batch of a query that its sink has, by the sink's own record."""

    number: int
    """-1 when it has none."""
    offset: Any = None
    """What the checkpoint logs for it; None for a micro-batch, which Spark logs before it is committed."""
    rows: int = 0


class SinkDriver(ABC):
    """A sink as the driver sees it, for all runs of a query.

    Calls come in this order: ``check`` once; then for each run ``clear``, ``newest`` and ``sink``, and ``commit`` for each of its
    epochs. A run for the other pace asks for its ``sink`` while the run before is still at work.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """What progress calls it."""

    @property
    def at_once(self) -> bool:
        """Whether rows are seen when they are written, before their epoch is committed."""
        return False

    @abstractmethod
    def check(self, schema: StructType) -> None:
        """Refuse rows that the sink does not take.

        Raises
        ------
        SchemaMismatch
        """

    def clear(self) -> None:  # noqa: B027 - most stage nothing
        """Drop what earlier runs have staged; called when none of their tasks is at work."""

    @abstractmethod
    def sink(self) -> Sink:
        """What the tasks of a run write to."""

    def newest(self) -> SinkEpoch | None:
        """Return the last epoch that the sink has; None when it keeps no record.

        Raises
        ------
        CheckpointMismatch
            When the record is that of another checkpoint.
        """
        return None

    @property
    def may_be_new(self) -> bool:
        """Whether the sink may have nothing of the query although the checkpoint is not new."""
        return False

    @abstractmethod
    def commit(self, sink: Sink, epoch: Epoch, offset: Any) -> None:
        """Make an epoch visible, once, before the checkpoint logs it.

        Parameters
        ----------
        sink
            What the tasks wrote to.
        offset
            What the checkpoint will log.
        """
