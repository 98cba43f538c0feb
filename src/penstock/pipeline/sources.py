"""Sources of a pipeline: queues, rates, change feeds and streaming DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession

from penstock.arguments import require
from penstock.changes.reading import read_stream
from penstock.continuous.connectors.protocol import ContinuousSource
from penstock.continuous.connectors.queue import QueueSourceDriver
from penstock.continuous.connectors.simple import RateDriver
from penstock.errors import InvalidInputError, InvalidOptionError
from penstock.feeds.protocol import Feed
from penstock.feeds.queue_feed import QueueFeed
from penstock.queue.checks import check_name
from penstock.spark.connectors import OwnedConsumer, Source
from penstock.spark.error_boundary import raising_original_errors
from penstock.spark.internals.plans import streaming_reads
from penstock.spark.internals.python_workers import check_store_reach
from penstock.spark.options import CONF_PREFIX, source_options
from penstock.spark.session import default_url, register, session_defaults

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class QueueSource(Source, ContinuousSource):
    """A queue to read from.

    Parameters
    ----------
    queue
        The queue's name.
    consumer
        The consumer to read with, which is registered on the queue. The query resumes at its offsets, and
        moves them.
    url
        The store; by default the session's ``spark.penstock.url``.
    options
        More options of the data source, such as ``{"maxRowsPerTrigger": 100_000}``.
    """

    takes_row_quota: ClassVar[bool] = True

    queue: str
    consumer: str | None = None
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, object] = field(default_factory=lambda: NO_OPTIONS)

    def __post_init__(self) -> None:
        check_queue(self.queue, self.url, self.options)
        if self.consumer is not None:
            check_name("consumer", self.consumer)

    def _options(self) -> dict[str, str]:
        return as_text({"queue": self.queue, "consumer": self.consumer, "url": self.url, **self.options})

    def to_df(self, spark: SparkSession) -> DataFrame:
        register(spark)
        with raising_original_errors():
            return spark.readStream.format("penstock").options(**self._options()).load()

    def with_row_quota(self, options: Mapping[str, str]) -> QueueSource:
        return replace(self, options={**self.options, **options})

    def moved_by_sink(self) -> QueueSource:
        return self if self.consumer is None else self.with_row_quota({"movedBySink": "true"})

    @property
    def description(self) -> str:
        return f"queue {self.queue!r}"

    def store_url(self, spark: SparkSession) -> str | None:
        return url_of(self._options(), spark)

    def owned_consumers(self, spark: SparkSession) -> Sequence[OwnedConsumer]:
        owned = owned_consumer(spark, {name.lower(): value for name, value in self._options().items()})
        return () if owned is None else (owned,)

    def continuous_driver(self, spark: SparkSession) -> QueueSourceDriver:
        options = source_options(self._options(), session_defaults(spark), streaming=True)
        check_store_reach(options.url, spark.conf.get("spark.master", None))
        return QueueSourceDriver(options)


@dataclass(frozen=True)
class RateSource(Source, ContinuousSource):
    """Rows at a steady rate, with ``timestamp`` and ``value``, to try things out.

    Parameters
    ----------
    rows_per_second
        The number of rows per second.
    partitions
        The number of partitions.
    """

    rows_per_second: int = 1
    partitions: int = 1

    def __post_init__(self) -> None:
        for name in ("rows_per_second", "partitions"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidOptionError(
                    f"{name} is a whole number from 1 on, not {value!r}",
                    condition="INVALID_OPTION.VALUE",
                    option=name,
                )

    def to_df(self, spark: SparkSession) -> DataFrame:
        reader = spark.readStream.format("rate").option("rowsPerSecond", self.rows_per_second)
        return reader.option("numPartitions", self.partitions).load()

    @property
    def description(self) -> str:
        return f"rate of {self.rows_per_second} rows per second"

    def continuous_driver(self, spark: SparkSession) -> RateDriver:
        return RateDriver(self.rows_per_second, self.partitions)


@dataclass(frozen=True)
class FeedSource(Source):
    """A change feed, without carry-over rows."""

    feed: Feed

    def to_df(self, spark: SparkSession) -> DataFrame:
        return read_stream(spark, self.feed)

    @property
    def kind(self) -> str:
        return type(self.feed).__name__

    @property
    def description(self) -> str | None:
        return f"queue {self.feed.queue!r}" if isinstance(self.feed, QueueFeed) else None

    def store_url(self, spark: SparkSession) -> str | None:
        return self.feed.store if isinstance(self.feed, QueueFeed) else None


@dataclass(frozen=True)
class DataFrameSource(Source):
    """A streaming DataFrame."""

    frame: DataFrame

    def to_df(self, spark: SparkSession) -> DataFrame:
        return self.frame

    @property
    def kind(self) -> str:
        formats = [read.format for read in streaming_reads(self.frame) or () if read.format]
        return ", ".join(formats) or "of the DataFrame"

    @property
    def description(self) -> None:
        return None


def as_source(source: Source | Feed | DataFrame) -> Source:
    """Return a source for what a user passed as one."""
    if isinstance(source, Source):
        return source
    if isinstance(source, DataFrame):
        if not source.isStreaming:
            raise InvalidInputError(
                "the DataFrame is not streaming: read it with spark.readStream",
                condition="INVALID_INPUT.NOT_STREAMING",
            )
        return DataFrameSource(source)
    if isinstance(source, Feed):
        return FeedSource(source)
    raise InvalidInputError(
        "a source is a QueueSource, a RateSource, a change feed, a streaming DataFrame or another "
        f"penstock.Source, not {type(source).__name__}"
    )


def owned_consumer(spark: SparkSession, options: Mapping[str, str]) -> OwnedConsumer | None:
    """Return the consumer of a read; None if it has none. The names of ``options`` are in lower case."""
    url = options.get("url") or default_url(spark)
    queue = options.get("queue") or options.get("path") or spark.conf.get(CONF_PREFIX + "queue", None)
    consumer = options.get("consumer")
    moved_by_sink = options.get("movedbysink") == "true"
    return OwnedConsumer(url, queue, consumer, moved_by_sink) if url and queue and consumer else None


def check_queue(queue: str, url: str | None, options: Mapping[str, object]) -> None:
    """Refuse arguments of a queue source or sink that have the wrong type."""
    check_name("queue", queue)
    require("url", url, str | None, "the URL of a store, such as 'sqlite:///shop.db'")
    require("options", options, Mapping, "a mapping such as {'maxRowsPerTrigger': 100_000}")


def url_of(options: Mapping[str, str], spark: SparkSession) -> str | None:
    """Return the store's URL from options of the data source, or else from the session."""
    return {name.lower(): value for name, value in options.items()}.get("url", default_url(spark))


def as_text(options: Mapping[str, object]) -> dict[str, str]:
    """Return options as text, as Spark takes them; those that are None are left out."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }
