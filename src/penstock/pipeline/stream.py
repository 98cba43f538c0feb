"""Pipelines: ``penstock.stream(…).transform(…).write(…).start(…)``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession

from penstock.arguments import did_you_mean, in_quotes, path_text, require
from penstock.errors import CommitRefusedError, InvalidInputError, InvalidOptionError, PenstockError
from penstock.feeds.protocol import Feed
from penstock.limits.per_key import KeyLimit
from penstock.limits.record import store_record
from penstock.limits.rows import STOP, RowLimit, is_per_micro_batch
from penstock.limits.run import LimitRun, require_no_limit, store_key_limit
from penstock.modes.checking.check import check as check_modes
from penstock.modes.checking.report import ModeReport
from penstock.pipeline.continuous import ContinuousQuery, Transform, start_continuous
from penstock.pipeline.initial_batch import no_data_batches, with_initial_batch
from penstock.pipeline.micro_batches import (
    MicroBatchQuery,
    catch_up_with_sink,
    expected_epochs,
    sync_consumers,
)
from penstock.pipeline.monitor import monitor_target, start_monitored
from penstock.pipeline.query import EndedQuery, Query, Trigger, stop_on_sigterm
from penstock.pipeline.sources import as_source, owned_consumer
from penstock.pipeline.start_checks import look_up_consumers, require_own_state, require_same_consumers
from penstock.queue.store import connect
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.connectors import OwnedConsumer, Sink, Source, WriteSettings
from penstock.spark.internals.plan_text import first_gathering_operator
from penstock.spark.internals.plans import streaming_reads
from penstock.spark.internals.sessions import check_session, default_file_system
from penstock.spark.options import GUARANTEES
from penstock.spark.session import register

log = logging.getLogger("penstock.pipeline")

_TRIGGERS = (
    "one of penstock.Trigger.processing_time('10 seconds'), penstock.Trigger.available_now() and "
    "penstock.Trigger.continuous('100 ms')"
)


def stream(spark: SparkSession, source: Source | Feed | DataFrame) -> Stream:
    """Begin a pipeline.

    Parameters
    ----------
    spark
        The session.
    source
        A :class:`QueueSource`, a :class:`RateSource` or another :class:`Source`; a change feed, read with the
        defaults of ``changes.read_stream``, that is, without carry-over rows; or any streaming DataFrame.

    Raises
    ------
    InvalidInputError
        When it is none of these.
    """
    check_session(spark)
    return Stream(spark, as_source(source))


@dataclass(frozen=True)
class Stream:
    """A source with the transformations so far; each method returns a new stream."""

    spark: SparkSession
    source: Source
    transforms: tuple[Transform, ...] = ()

    def transform(self, function: Transform) -> Stream:
        """Add a transformation: ordinary DataFrame code, stateful or not.

        Parameters
        ----------
        function
            Takes a DataFrame and returns one.

        Raises
        ------
        InvalidInputError
            When it is not a function.
        """
        if not callable(function):
            raise InvalidInputError(
                f"transform takes a function of a DataFrame, not {type(function).__name__}"
            )
        return replace(self, transforms=(*self.transforms, function))

    def limit(
        self,
        n: int,
        *,
        on_limit: str | None = None,
        per: Sequence[str] | None = None,
        ttl: str | None = None,
    ) -> Stream:
        """Keep the first ``n`` rows, or the first ``n`` of each key, over all micro-batches and restarts.

        That holds in output mode append, and in complete mode if the limit comes before the aggregation.
        After an aggregation in complete mode, the limit is Spark's: it cuts the result of each micro-batch,
        and the query continues.

        Parameters
        ----------
        n
            The number of rows.
        on_limit
            ``stop`` (when None): the query ends in the micro-batch that reaches ``n``. ``keep``: it keeps
            running and drops the rows that it reads, like a plain ``df.limit(n)``.
        per
            The key columns. Each key has its own limit of ``n`` rows, and the query does not end by itself.
        ttl
            With ``per``: how long after a key's last row its count is dropped, such as ``"1 hour"``; never
            when None.

        Raises
        ------
        InvalidInputError
            When an argument has the wrong type, or the stream already has a limit.
        """
        if any(isinstance(transform, RowLimit | KeyLimit) for transform in self.transforms):
            raise InvalidInputError(
                "the stream already has a limit: a pipeline can only have one",
                condition="INVALID_INPUT.SEVERAL_LIMITS",
            )
        if per is not None:
            if on_limit is not None:
                raise InvalidOptionError(
                    "on_limit applies to a limit on all rows: with per, each key has its own limit, and the "
                    "query keeps running",
                    condition="INVALID_OPTION.CONFLICT",
                    option="on_limit",
                )
            return self.transform(KeyLimit.of(n, per, ttl))
        if ttl is not None:
            raise InvalidOptionError(
                "ttl applies to keys: pass per=[...] as well",
                condition="INVALID_OPTION.MISSING",
                option="ttl",
            )
        return self.transform(RowLimit(n, on_limit or STOP))

    @property
    def row_limit(self) -> RowLimit | None:
        """The limit on all rows, if there is one."""
        return next((limit for limit in self.transforms if isinstance(limit, RowLimit)), None)

    @property
    def key_limit(self) -> KeyLimit | None:
        """The limit for each key, if there is one."""
        return next((limit for limit in self.transforms if isinstance(limit, KeyLimit)), None)

    def to_df(self) -> DataFrame:
        """The transformed streaming DataFrame."""
        return _apply_transforms(self)[0]

    def write(self, sink: Sink, *, guarantee: str | None = None, output_mode: str = "append") -> Pipeline:
        """Choose where the rows go.

        Parameters
        ----------
        sink
            A :class:`QueueSink`, a :class:`TableSink`, a :class:`ConsoleSink`, a :class:`FunctionSink`, or
            your own :class:`BatchSink`.
        guarantee
            For a queue or a table, ``exactly_once`` by default (one transaction writes the rows and records
            the micro-batch; it also moves the consumer, or the consumer moves afterwards if it is in another
            store), ``idempotent`` (for stateless transformations in output mode append: tasks write their
            rows directly, and skip rows that are already there) or ``at_least_once``. The console and a
            function only support ``at_least_once``; other sinks list their own guarantees.
        output_mode
            ``append`` for a queue, whose rows never change. A table also takes ``update`` and ``complete``.

        Raises
        ------
        InvalidOptionError
            When the sink does not support the guarantee or the output mode.
        """
        require(
            "sink",
            sink,
            Sink,
            "a QueueSink, TableSink, ConsoleSink, FunctionSink or another penstock.Sink",
        )
        chosen = sink.guarantees[0] if guarantee is None else guarantee
        if chosen not in GUARANTEES:
            raise InvalidOptionError(
                f"guarantee is one of {', '.join(GUARANTEES)}, not "
                f"{in_quotes(chosen)}.{did_you_mean(str(chosen), GUARANTEES)}",
                condition="INVALID_OPTION.VALUE",
                option="guarantee",
            )
        sink.check(chosen, output_mode)
        return Pipeline(self, sink, chosen, output_mode)


def _apply_transforms(stream: Stream) -> tuple[DataFrame, DataFrame | None]:
    """Return the transformed DataFrame, and the input of a limit per key, if there is one."""
    frame, limit_input = stream.source.to_df(stream.spark), None
    for function in stream.transforms:
        limit_input = frame if isinstance(function, KeyLimit) else limit_input
        frame = function(frame)
        if not isinstance(frame, DataFrame):
            raise InvalidInputError(
                f"the transformation {in_quotes(getattr(function, '__name__', function))} returned "
                f"{type(frame).__name__}, not a DataFrame: is its return statement missing?",
                condition="INVALID_INPUT.FUNCTION_RESULT",
            )
    return frame, limit_input


@dataclass(frozen=True)
class Pipeline:
    """A stream and its sink, ready to start."""

    stream: Stream
    sink: Sink
    guarantee: str
    output_mode: str

    def start(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        name: str | None = None,
        trigger: Trigger | None = None,
        check: bool = True,
        monitor: bool = True,
    ) -> Query:
        """Start the query.

        Parameters
        ----------
        checkpoint
            Where Spark keeps the query's progress: a folder, or the URL of one. Only the continuous trigger
            works without one. It then uses a temporary folder, which is deleted when the query ends, and kept
            if it fails.
        name
            The query's name.
        trigger
            One micro-batch after the other when None.
        check
            Whether to refuse a query that :func:`penstock.modes.check` finds not allowed or not safe in its
            output mode.
        monitor
            Whether the query reports its progress to the store of its sink, or else of its source, for
            ``penstock ui``, with at most one small write a second. Over Spark Connect, it only reports after
            ``penstock.monitor``.

        Raises
        ------
        InvalidInputError
            When an argument has the wrong type, or the checkpoint is empty.
        OutputModeRefusedError
            When Spark would not start the query in this output mode, rows might be lost or repeated, or state
            would grow without a limit; has the report.
        CommitRefusedError
            When the guarantee or the limit cannot be kept with this checkpoint or this plan.
        ContinuousRefusedError
            With the continuous trigger, when the source, the sink or the transformation does not work row by
            row.
        """
        require("check", check, bool, "True or False")
        require("trigger", trigger, Trigger | None, _TRIGGERS)
        require("name", name, str | None, "text")
        require("monitor", monitor, bool, "True or False")
        return self._with_moved_consumer()._start(checkpoint, name, trigger, check, monitor)

    def _with_moved_consumer(self) -> Pipeline:
        """Return the pipeline with a source that knows if the sink's transaction moves its consumer."""
        if self.guarantee == "at_least_once" or not self._has_one_store():
            return self
        return replace(self, stream=replace(self.stream, source=self.stream.source.moved_by_sink()))

    def _has_one_store(self) -> bool:
        """Return whether the source and the sink are in the same store."""
        spark = self.stream.spark
        urls = self.stream.source.store_url(spark), self.sink.store_url(spark)
        if None in urls:
            return False
        # The query itself reports problems of a store.
        with suppress(PenstockError):
            uuids = set()
            for url in urls:
                with connect(str(url), create=False) as store:
                    uuids.add(store.uuid)
            return len(uuids) == 1
        return False

    def _start(
        self,
        checkpoint: str | os.PathLike[str] | None,
        name: str | None,
        trigger: Trigger | None,
        check: bool,
        monitor: bool,
    ) -> Query:
        if trigger is not None and trigger.kind == "continuous":
            return self._start_continuous(checkpoint, name, trigger, monitor)
        location = _checkpoint_location(self.stream.spark, checkpoint)
        frame, limit_input = _apply_transforms(self.stream)
        if check:
            # Below, the sink itself refuses rows that do not fit.
            report = check_modes(frame, self.sink.format, trigger)
            report.require(self.output_mode)
            _log_warnings(report[self.output_mode], name)
        self._check_guarantee(frame, location)
        register(self.stream.spark)
        if (key_limit := self.stream.key_limit) is not None and limit_input is not None:
            store_key_limit(limit_input, key_limit, location)
        elif self.stream.row_limit is None:
            require_no_limit(location)
        limit_run = self._limit_run(frame, location)
        if limit_run is not None:
            reason = limit_run.reason_to_end(name)
            if reason is not None:
                ended = EndedQuery(limit_run.checkpoint.query_id(), name, reason)
                # The run that reached the limit may have been killed after its last commit.
                sync_consumers(name or ended.id, location, self._owned_consumers(frame)[0])
                return ended
            frame = self._with_row_quota(limit_run, frame)
            store_record(limit_run.checkpoint, limit_run.limit.rows)
        arguments: Mapping[str, str | bool] = (trigger or Trigger.processing_time()).arguments()
        if limit_run is not None:
            arguments = limit_run.trigger_arguments(arguments)
        query = self._start_micro_batches(frame, location, name, arguments, monitor)
        if limit_run is not None:
            limit_run.watch(query)
        return query

    def _start_micro_batches(
        self,
        frame: DataFrame,
        location: str,
        name: str | None,
        trigger: Mapping[str, str | bool],
        monitor: bool,
    ) -> MicroBatchQuery:
        spark = self.stream.spark
        consumers, has_other_sources = self._owned_consumers(frame)
        registered_consumers = look_up_consumers(consumers)
        require_same_consumers(location, registered_consumers)
        if self.guarantee != "at_least_once":
            require_own_state(spark, self.sink, frame, location, registered_consumers)
        catch_up_with_sink(spark, self.sink, self.guarantee, location, consumers)
        settings = WriteSettings(self.guarantee, self.output_mode, location)
        writer = self.sink.stream_writer(with_initial_batch(frame, location), settings)
        writer = writer.outputMode(self.output_mode)
        writer = writer.trigger(**trigger)  # type: ignore[arg-type]  # overloads
        if name is not None:
            writer = writer.queryName(name)
        with no_data_batches(spark):
            source = self.stream.source
            target = monitor_target(spark, source, self.sink, consumers) if monitor else None
            epochs = expected_epochs(consumers)
            spark_query, on_end = start_monitored(spark, target, writer.start, location)
            query = MicroBatchQuery(
                spark_query,
                location,
                consumers,
                has_other_sources=has_other_sources,
                expected_epochs=epochs,
                on_end=on_end,
            )
        log.info(
            "query %r starts",
            name or query.id,
            extra={
                "action": "query_started",
                "query": name,
                "query_id": query.id,
                "run_id": query.runId,
                "guarantee": self.guarantee,
                "output_mode": self.output_mode,
            },
        )
        stop_on_sigterm(query)
        return query

    def _limit_run(self, frame: DataFrame, location: str) -> LimitRun | None:
        limit = self.stream.row_limit
        if limit is None:
            return None
        if self.output_mode == "complete" and is_per_micro_batch(frame):
            log.info(
                "in output mode complete, limit(%d) after an aggregation is applied by Spark to each "
                "micro-batch, and does not end the query",
                limit.rows,
                extra={"action": "limit_per_trigger", "limit": limit.rows},
            )
            return None
        return LimitRun.of(self.stream.spark, limit, location)

    def _with_row_quota(self, limit_run: LimitRun, frame: DataFrame) -> DataFrame:
        """Make the source read only as many rows as the limit leaves, if it supports that."""
        source = self.stream.source
        has_one_read = len(streaming_reads(frame) or ()) == 1
        options = limit_run.options(frame, of_a_queue=has_one_read and source.takes_row_quota)
        return replace(self.stream, source=source.with_row_quota(options)).to_df() if options else frame

    def _start_continuous(
        self,
        checkpoint: str | os.PathLike[str] | None,
        name: str | None,
        trigger: Trigger,
        monitor: bool,
    ) -> ContinuousQuery:
        if self.output_mode == "complete":
            raise InvalidOptionError(
                "the continuous trigger supports output mode append, not 'complete'",
                condition="INVALID_OPTION.CONFLICT",
                option="output_mode",
            )
        stream = self.stream
        location = None if checkpoint is None else _checkpoint_location(stream.spark, checkpoint)
        if location is not None:
            require_same_consumers(location, look_up_consumers(stream.source.owned_consumers(stream.spark)))
        query = start_continuous(
            stream.spark,
            stream.source,
            stream.transforms,
            self.sink,
            self.guarantee,
            self.output_mode,
            checkpoint=location,
            name=name,
            trigger=trigger,
            monitored=monitor,
        )
        stop_on_sigterm(query)
        return query

    def _check_guarantee(self, frame: DataFrame, location: str) -> None:
        if self.guarantee == "at_least_once":
            return
        Checkpoint(location).require_readable(self.guarantee)
        operator = None if self.guarantee == "exactly_once" else first_gathering_operator(frame)
        if operator is not None:
            raise CommitRefusedError(
                "guarantee=idempotent needs transformations that always divide rows into the same tasks, and "
                f"this one has {operator}: use guarantee=exactly_once",
                condition="COMMIT_REFUSED.NOT_IDEMPOTENT",
                operator=operator,
            )

    def _owned_consumers(self, frame: DataFrame) -> tuple[tuple[OwnedConsumer, ...], bool]:
        """Return the consumers that the query will own, and whether it reads anything without one."""
        spark, reads = self.stream.spark, streaming_reads(frame)
        if reads is None:
            owned = list[OwnedConsumer | None](self.stream.source.owned_consumers(spark)) or [None]
        else:
            owned = [
                owned_consumer(spark, read.options) if read.format == "penstock" else None for read in reads
            ]
        return tuple(dict.fromkeys(consumer for consumer in owned if consumer is not None)), None in owned


def _log_warnings(report: ModeReport, name: str | None) -> None:
    # All problems of a mode that is not refused are warnings.
    for problem in report.problems:
        log.warning(
            "in output mode %s, %s (%s)",
            report.mode,
            problem.message,
            problem.page,
            extra={
                "action": "output_mode_warning",
                "query": name,
                "output_mode": report.mode,
                "problem": problem.code,
            },
        )


def _checkpoint_location(spark: SparkSession, checkpoint: str | os.PathLike[str] | None) -> str:
    """Return the checkpoint as an absolute path or URL: Spark's workers may run in another directory."""
    if checkpoint is None:
        raise InvalidInputError(
            "a query of micro-batches needs a checkpoint: start(checkpoint='checkpoints/orders'), its own "
            "folder or the URL of one, where Spark keeps the query's progress",
            condition="INVALID_INPUT.CHECKPOINT_MISSING",
            parameter="checkpoint",
        )
    text = path_text("checkpoint", checkpoint)
    if urlsplit(text).scheme:
        return text
    file_system = default_file_system(spark)
    return os.path.abspath(text) if file_system is None else f"{file_system.rstrip('/')}/{text.lstrip('/')}"
