"""Sinks of pipelines, except tables: queues, the console and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.arguments import in_quotes, refused_arguments
from penstock.continuous.connectors.protocol import ContinuousSink
from penstock.continuous.connectors.queue import QueueSinkDriver
from penstock.continuous.connectors.simple import ConsoleDriver, FunctionDriver
from penstock.errors import (
    InvalidInputError,
    InvalidOptionError,
    StoreNotFoundError,
    StoreUnavailableError,
)
from penstock.modes.checking.report import MODES
from penstock.pipeline.sources import NO_OPTIONS, as_text, check_queue, url_of
from penstock.queue.store import connect
from penstock.spark.connectors import BatchSink, Binding, MicroBatch, Sink, WriteSettings
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.internals.sessions import is_classic
from penstock.spark.options import SinkOptions, sink_options
from penstock.spark.schemas import check_writable
from penstock.spark.session import session_defaults
from penstock.store.database import Transaction
from penstock.store.records.catalog import find_queue, queue_sink


@dataclass(frozen=True)
class QueueSink(Sink, ContinuousSink):
    """A queue to write to.

    Parameters
    ----------
    queue
        The queue's name.
    url
        The store; by default the session's ``spark.penstock.url``.
    options
        More options of the data source, such as ``{"maxRowsPerWrite": 10_000}``.
    """

    format: ClassVar[str] = "penstock"
    guarantees: ClassVar[tuple[str, ...]] = ("exactly_once", "idempotent", "at_least_once")

    queue: str
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, object] = field(default_factory=lambda: NO_OPTIONS)

    def __post_init__(self) -> None:
        check_queue(self.queue, self.url, self.options)

    def check(self, guarantee: str, output_mode: str) -> None:
        if output_mode in MODES and output_mode not in self.output_modes:
            raise InvalidOptionError(
                "the rows of a queue never change, so it only supports output mode append, not "
                f"{in_quotes(output_mode)}: use a watermark, so that the query appends each group once, when "
                "it is final. Or write to a TableSink with keys, which replaces rows",
                condition="INVALID_OPTION.VALUE",
                option="output_mode",
            )
        super().check(guarantee, output_mode)

    def _options(self) -> dict[str, str]:
        return as_text({"queue": self.queue, "url": self.url, **self.options})

    def stream_writer(self, rows: DataFrame, settings: WriteSettings) -> DataStreamWriter:
        self._require_writable(rows)
        options = {"guarantee": settings.guarantee, "checkpointLocation": settings.checkpoint}
        return rows.writeStream.format("penstock").options(**(self._options() | options))

    def _require_writable(self, rows: DataFrame) -> None:
        """Refuse a missing queue, or rows that do not fit it, before Spark's first micro-batch would."""
        options = self._write_options(rows.sparkSession)
        try:
            with connect(options.url, create=False) as store:
                queue = store.queue(options.queue).record
        except (StoreNotFoundError, StoreUnavailableError):
            if is_classic(rows):
                raise
            # A Spark Connect server may reach a store that this process cannot reach.
            return
        check_writable(rows.schema, queue)

    @property
    def description(self) -> str:
        return f"queue {self.queue!r}"

    def store_url(self, spark: SparkSession) -> str | None:
        return url_of(self._options(), spark)

    def ledger_name(self, tx: Transaction) -> str:
        return queue_sink(find_queue(tx, self.queue))

    def binding(self, spark: SparkSession) -> Binding:
        options = self._write_options(spark)
        return Binding(options.app_id, options.allow_new_checkpoint)

    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> QueueSinkDriver:
        options = self._write_options(spark)
        check_store_reach(options.url, spark.conf.get("spark.master", None))
        return QueueSinkDriver(options, query_id, guarantee == "exactly_once")

    def record(self, spark: SparkSession, query_id: str) -> QueueSinkDriver:
        return QueueSinkDriver(self._write_options(spark), query_id, True)

    def _write_options(self, spark: SparkSession) -> SinkOptions:
        return sink_options(self._options(), session_defaults(spark), streaming=True)


@dataclass(frozen=True)
class ConsoleSink(Sink, ContinuousSink):
    """The first rows of each micro-batch or epoch, printed on the driver.

    Parameters
    ----------
    rows
        How many rows to print.
    truncate
        Whether to cut off cells after 20 characters, or the number of characters after which to cut them off.
    """

    format: ClassVar[str] = "console"
    output_modes: ClassVar[tuple[str, ...]] = MODES

    rows: int = 20
    truncate: bool | int = True

    def stream_writer(self, rows: DataFrame, settings: WriteSettings) -> DataStreamWriter:
        options = as_text({"numRows": self.rows, "truncate": self.truncate})
        return rows.writeStream.format("console").options(**options, checkpointLocation=settings.checkpoint)

    @property
    def description(self) -> str:
        return "console"

    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> ConsoleDriver:
        is_flag = isinstance(self.truncate, bool)
        max_characters = (20 if self.truncate else 0) if is_flag else int(self.truncate)
        return ConsoleDriver(self.rows, max_characters)


@dataclass(frozen=True)
class FunctionSink(BatchSink, ContinuousSink):
    """Your own function, which tasks call with each ``pyarrow.RecordBatch``, ``at_least_once``.

    Parameters
    ----------
    function
        Takes the batch; its result is ignored. Spark pickles the function.
    """

    output_modes: ClassVar[tuple[str, ...]] = MODES

    function: Callable[[pa.RecordBatch], object]

    def __post_init__(self) -> None:
        if not callable(self.function) or refused_arguments(self.function, None) is not None:
            raise InvalidInputError(
                "function is called with one argument, a pyarrow.RecordBatch, and "
                f"{in_quotes(getattr(self.function, '__name__', self.function))} does not take just one: for "
                "a function of a DataFrame and a number, write a penstock.BatchSink",
                condition="INVALID_INPUT.FUNCTION_PARAMETERS",
                parameter="function",
            )

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        function = self.function

        def call_function(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for rows in batches:
                function(rows)
            return iter(())

        rows.mapInArrow(call_function, "nothing int").collect()

    @property
    def description(self) -> str:
        return "a function"

    def continuous_driver(
        self, spark: SparkSession, query_id: str, guarantee: str, output_mode: str
    ) -> FunctionDriver:
        return FunctionDriver(self.function)
