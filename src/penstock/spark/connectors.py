"""Protocols for the sources and sinks of a pipeline.

A pipeline gets a streaming DataFrame from its source and a writer from its sink. The additional protocols for
the continuous trigger are in :mod:`penstock.continuous.connectors.protocol`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.arguments import in_quotes
from penstock.errors import InvalidOptionError
from penstock.spark.checkpoint import Checkpoint
from penstock.store.database import Transaction


@dataclass(frozen=True)
class OwnedConsumer:
    """A consumer of a queue that a query owns while it runs."""

    url: str = field(repr=False)
    queue: str
    consumer: str
    moved_by_sink: bool = False
    """Whether the query's sink is known to move the consumer in its own transaction."""


@dataclass(frozen=True)
class Binding:
    """The app to which a sink's commits bind the consumers that the query reads."""

    app_id: str | None
    """The query's id when None."""
    allow_new_checkpoint: bool
    """Whether a stateful query may resume a consumer of another app, with empty state."""


class Source(ABC):
    """Something that a pipeline reads. Your own source only has to implement :meth:`to_df`."""

    @abstractmethod
    def to_df(self, spark: SparkSession) -> DataFrame:
        """Return the source's rows as a streaming DataFrame.

        Parameters
        ----------
        spark
            The pipeline's session.
        """

    @property
    def kind(self) -> str:
        """The source's name in error messages."""
        return type(self).__name__

    @property
    def description(self) -> str | None:
        """The source's name on the monitor page; None for the description in Spark's progress."""
        return self.kind

    def store_url(self, spark: SparkSession) -> str | None:
        """Return the URL of the store that the source reads, if any."""
        return None

    def owned_consumers(self, spark: SparkSession) -> Sequence[OwnedConsumer]:
        """Return the consumers that a query of this source owns; for sessions whose plans cannot be read."""
        return ()

    takes_row_quota: ClassVar[bool] = False
    """Whether the source can read only as many rows as a limit still lets through."""

    def with_row_quota(self, options: Mapping[str, str]) -> Source:
        """Return a copy of the source that reads only as many rows as these options allow."""
        return self

    def moved_by_sink(self) -> Source:
        """Return a copy of the source that expects the sink's transaction to move its consumer."""
        return self


@dataclass(frozen=True)
class WriteSettings:
    """How a query writes to its sink."""

    guarantee: str
    output_mode: str
    checkpoint: str = field(repr=False)
    """The checkpoint's location; the URL may contain a password."""


@dataclass(frozen=True)
class MicroBatch(WriteSettings):
    """A micro-batch to write.

    ``app_id`` and ``batch_id`` identify its rows: a micro-batch that is repeated after a failure has the same
    ids and, in a deterministic query, the same rows.
    """

    batch_id: int
    """The micro-batch's number, from 0."""

    @property
    def app_id(self) -> str:
        """The query's identity: the same in all runs with one checkpoint."""
        return Checkpoint(self.checkpoint).query_id()


class Sink(ABC):
    """Something that a pipeline writes to.

    Your own sink extends :class:`BatchSink`, or this class if Spark has a format for it.
    """

    format: ClassVar[str] = "foreachBatch"
    """The format whose rules :func:`penstock.modes.check` applies to the sink."""
    guarantees: ClassVar[tuple[str, ...]] = ("at_least_once",)
    """The guarantees that the sink supports, with the default first."""
    output_modes: ClassVar[tuple[str, ...]] = ("append",)

    @abstractmethod
    def stream_writer(self, rows: DataFrame, settings: WriteSettings) -> DataStreamWriter:
        """Return a writer of the rows, with the checkpoint among its options; the pipeline starts it."""

    def check(self, guarantee: str, output_mode: str) -> None:
        """Refuse a guarantee or an output mode that the sink does not support.

        Raises
        ------
        InvalidOptionError
        """
        for option, value, supported in (
            ("guarantee", guarantee, self.guarantees),
            ("output_mode", output_mode, self.output_modes),
        ):
            if value not in supported:
                raise InvalidOptionError(
                    f"{type(self).__name__} takes {option.replace('_', ' ')} {' or '.join(supported)}, not "
                    f"{in_quotes(value)}",
                    condition="INVALID_OPTION.VALUE",
                    option=option,
                )

    @property
    def description(self) -> str:
        """The sink's name on the monitor page."""
        return type(self).__name__

    def store_url(self, spark: SparkSession) -> str | None:
        """Return the URL of the store that the sink writes to, if any."""
        return None

    def ledger_name(self, tx: Transaction) -> str | None:
        """Return the sink's name in its store's ledger; None if it has no entries there."""
        return None

    def binding(self, spark: SparkSession) -> Binding | None:
        """Return the app to which the sink's commits bind consumers; None if they bind none."""
        return None


class BatchSink(Sink):
    """Base class for your own sink, which gets each micro-batch on the driver.

    Set the class attribute ``guarantees`` to ``("exactly_once",)`` if :meth:`write` writes exactly once, and
    ``output_modes`` to the output modes that it supports.
    """

    @abstractmethod
    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Write a micro-batch.

        Parameters
        ----------
        rows
            The rows, as a batch DataFrame. In a stateful query they have to be computed for every
            micro-batch, even for one that was written before.
        batch
            The ids of the micro-batch, and the settings of the query.
        """

    def stream_writer(self, rows: DataFrame, settings: WriteSettings) -> DataStreamWriter:
        def write(batch: DataFrame, batch_id: int) -> None:
            self.write(
                batch,
                MicroBatch(settings.guarantee, settings.output_mode, settings.checkpoint, batch_id),
            )

        return rows.writeStream.foreachBatch(write).option("checkpointLocation", settings.checkpoint)
