"""What the driver of a continuous query asks of its source and of its sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.continuous.epochs import Epoch
from penstock.continuous.reader import Source
from penstock.continuous.writer import Sink

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
        """Before each run: take hold of the source; whoever had it is fenced."""

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

    @abstractmethod
    def logged(self, offset: Any) -> bool:
        """Told last, when an epoch is committed and logged; whether the source asks to end."""

    @abstractmethod
    def release(self, ended: Any | None) -> None:
        """After the last run: give up the hold; everything up to this offset is committed."""


class SinkDriver(ABC):
    """A sink as the driver sees it, for all runs of a query."""

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

    @abstractmethod
    def sink(self) -> Sink:
        """Before each run: what tasks write to."""

    @abstractmethod
    def settled(self, number: int, offset: Any) -> bool:
        """Whether an epoch whose commit was never logged is in; one that is not leaves nothing behind."""

    @abstractmethod
    def commit(self, epoch: Epoch, offset: Any) -> None:
        """Make an epoch visible, once."""
