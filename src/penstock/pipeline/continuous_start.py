"""A pipeline made ready for the continuous trigger."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.arguments import in_quotes
from penstock.commit.offsets import QueueOffset
from penstock.commit.owner import follow
from penstock.continuous.connectors.console import ConsoleDriver
from penstock.continuous.connectors.function import FunctionDriver
from penstock.continuous.connectors.protocol import SinkDriver, SourceDriver
from penstock.continuous.connectors.queue_driver import QueueSinkDriver, QueueSourceDriver
from penstock.continuous.connectors.rate import RateDriver
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.coordinator import Limit
from penstock.continuous.driver.execution import ContinuousExecution, Settings
from penstock.continuous.driver.listener_dispatch import Telling
from penstock.continuous.driver.recovery import catch_up
from penstock.continuous.driver.runs import SparkEngine
from penstock.errors import ContinuousRefused, InvalidOption, PenstockError
from penstock.feeds.protocol import Changelog
from penstock.lake.delta_location import is_delta
from penstock.limits.per_key import KeyLimit
from penstock.limits.resume import keep
from penstock.limits.rows import STOP, RowLimit
from penstock.pipeline.continuous import ContinuousQuery
from penstock.pipeline.continuous_tables import TableSinkDriver
from penstock.pipeline.endpoints import ConsoleSink, FunctionSink, QueueSink, QueueSource, RateSource
from penstock.pipeline.failures import plain
from penstock.pipeline.monitoring.monitor import continuous, place_of
from penstock.pipeline.offset_sync import QuerySource
from penstock.pipeline.trigger import Trigger
from penstock.queue.open_stores import open_store
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.listeners import Listeners
from penstock.spark.internals.plans import streaming_reads
from penstock.spark.internals.sessions import is_classic
from penstock.spark.options import STREAM_SINK, STREAM_SOURCE, sink_options, source_options, with_defaults
from penstock.spark.registration import defaults, register
from penstock.spark.store_reach import check_reach
from penstock.tables.sink import TableSink, require_append_only

Transform = Callable[[Any], Any]
AnySource = QueueSource | RateSource | Changelog | DataFrame
AnySink = QueueSink | TableSink | ConsoleSink | FunctionSink

_GUARANTEES = ("exactly_once", "at_least_once")
_RETAIN = "spark.sql.streaming.minBatchesToRetain"
_BACKLOG = "spark.sql.streaming.continuous.epochBacklogQueueSize"


def _without_limit(transforms: Sequence[Transform]) -> tuple[Sequence[Transform], RowLimit | None]:
    """The transformations before a limit, which the engine itself keeps.

    Raises
    ------
    ContinuousRefused
        When it is a limit for each key, or not the last thing that is done.
    """
    last = transforms[-1] if transforms else None
    limit = last if isinstance(last, RowLimit) else None
    before = transforms if limit is None else transforms[:-1]
    if any(isinstance(each, KeyLimit) for each in before):
        raise ContinuousRefused(
            "the continuous trigger has no limit(n, per=[…]), which keeps state: use ps.Trigger.processing_time or "
            "ps.Trigger.available_now",
            condition="CONTINUOUS_REFUSED.LIMIT",
        )
    if any(isinstance(each, RowLimit) for each in before):
        raise ContinuousRefused(
            "with the continuous trigger limit(n) counts the rows that are written: put it behind the last transform",
            condition="CONTINUOUS_REFUSED.LIMIT",
        )
    return before, limit


def start_continuous(
    spark: SparkSession,
    source: AnySource,
    transforms: Sequence[Transform],
    sink: AnySink,
    guarantee: str,
    output_mode: str,
    *,
    checkpoint: str | None,
    name: str | None,
    trigger: Trigger,
    published: bool = True,
) -> ContinuousQuery:
    """Start a pipeline with the continuous trigger.

    Raises
    ------
    ContinuousRefused
        When the source, the sink or the transformation does not work row by row, or the session is Spark Connect's.
    InvalidOption
        When the guarantee is none that the engine keeps.
    """
    if guarantee not in _GUARANTEES:
        raise InvalidOption(
            f"the continuous trigger keeps guarantee {' or '.join(_GUARANTEES)}, not {in_quotes(guarantee)}",
            option="guarantee",
        )
    transforms, limit = _without_limit(transforms)
    if not is_classic(spark):
        raise ContinuousRefused(
            "a continuous query is one Spark job that its driver looks after, and a Spark Connect session does not reach it: use a "
            "classic session, or ps.Trigger.processing_time",
            condition="CONTINUOUS_REFUSED.CLASSIC_SESSION_NEEDED",
        )
    register(spark)
    reads = _source(spark, source)
    engine = SparkEngine(spark, reads, transforms, name or "continuous query")
    schema = engine.check()
    temporary = tempfile.mkdtemp(prefix="penstock-continuous-") if checkpoint is None else None
    logs = CheckpointLog(checkpoint or str(temporary))
    try:
        writes = _sink(spark, sink, guarantee, output_mode, logs.query_id)
        writes.check(schema)
        # What is beside the checkpoint stays, where a lower limit ends the query at once.
        if limit is not None and limit.rows >= logs.passed(logs.last_committed()):
            keep(logs.read, limit.rows)
    except PenstockError:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    retain, backlog = int(str(spark.conf.get(_RETAIN))), int(str(spark.conf.get(_BACKLOG)))
    execution = ContinuousExecution(
        name,
        reads,
        writes,
        engine,
        logs,
        Settings(trigger.seconds, retain, backlog),
        limit=None if limit is None else Limit(limit.rows, limit.on_limit == STOP),
    )
    listeners = Listeners(spark, execution.id, execution.run_id)
    place = place_of(spark, source, sink) if published else None
    publishing = continuous(spark, place, execution.id, execution.run_id, name, checkpoint)
    execution.telling = Telling(execution.called, listeners, plain, publishing)
    if temporary is not None:
        execution.tidy = partial(shutil.rmtree, temporary, ignore_errors=True)
    execution.start()
    if execution.failure is not None:
        raise plain(execution.failure) from None
    return ContinuousQuery(execution, reads)


def _source(spark: SparkSession, source: AnySource) -> SourceDriver:
    if isinstance(source, RateSource):
        return RateDriver(source.rows_per_second, source.partitions)
    if isinstance(source, QueueSource):
        given = with_defaults(source.given(), defaults(spark), STREAM_SOURCE)
        options = source_options(given, streaming=True)
        check_reach(options.url, spark.conf.get("spark.master", None))
        return QueueSourceDriver(options)
    raise ContinuousRefused(
        f"Data source {_called(source)} does not support continuous processing: read a queue with ps.QueueSource or a ps.RateSource, "
        "or use ps.Trigger.processing_time",
        condition="CONTINUOUS_REFUSED.SOURCE",
        source=_called(source),
    )


def catch_up_with_sink(
    spark: SparkSession, sink: AnySink, guarantee: str, location: str, sources: Sequence[QuerySource]
) -> None:
    """Make a checkpoint ready for micro-batches: its last epoch or micro-batch may be in the sink and not in the checkpoint.

    The driver of a continuous query dies between the two, or a machine loses its power with what Spark wrote last.

    Raises
    ------
    CheckpointMismatch, CheckpointRewound, OwnerFenced
        When the sink and the checkpoint are of different times.
    """
    # Where that was the first one, the checkpoint has the query's id and nothing else.
    if guarantee == "at_least_once" or Checkpoint(location).read("metadata") is None:
        return
    logs = CheckpointLog(location)
    writes: SinkDriver | None = None
    if isinstance(sink, QueueSink):
        given = with_defaults(sink.given(), defaults(spark), STREAM_SINK)
        writes = QueueSinkDriver(sink_options(given, streaming=True), logs.query_id, True)
    elif isinstance(sink, TableSink) and not is_delta(sink.place(spark)):
        writes = TableSinkDriver(sink, sink.place(spark), logs.query_id, True)
    if writes is not None:
        catch_up(logs, writes, lambda offset: follow_from(sources, offset))


def follow_from(sources: Sequence[QuerySource], offset: Any) -> None:
    """Move the consumer of an epoch that the sink has."""
    parsed = QueueOffset.of(offset)
    for source in sources:
        if parsed is not None and (parsed.queue, parsed.consumer) == (source.queue, source.consumer):
            store = open_store(source.url)
            follow(store.database, store.uuid, parsed)


def _called(source: AnySource) -> str:
    if isinstance(source, DataFrame):
        found = streaming_reads(source) or []
        return ", ".join(read.format for read in found if read.format) or "of the DataFrame"
    return type(source).__name__


def _sink(spark: SparkSession, sink: AnySink, guarantee: str, output_mode: str, query_id: str) -> SinkDriver:
    if isinstance(sink, ConsoleSink):
        return ConsoleDriver(sink.rows, sink.width)
    if isinstance(sink, FunctionSink):
        return FunctionDriver(sink.function)
    exactly_once, master = guarantee == "exactly_once", spark.conf.get("spark.master", None)
    if isinstance(sink, TableSink):
        url = sink.place(spark)
        require_append_only(sink, url, guarantee, output_mode)
        check_reach(url, master)
        return TableSinkDriver(sink, url, query_id, exactly_once)
    given = with_defaults(sink.given(), defaults(spark), STREAM_SINK)
    options = sink_options(given, streaming=True)
    check_reach(options.url, master)
    return QueueSinkDriver(options, query_id, exactly_once)
