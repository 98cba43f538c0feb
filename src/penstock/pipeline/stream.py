"""``ps.stream(…).transform(…).write(…).start(…)``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.arguments import did_you_mean, in_quotes, path_text, require
from penstock.changes.reading import read_stream
from penstock.errors import CommitRefused, InvalidInput, InvalidOption
from penstock.feeds.protocol import Changelog
from penstock.limits.per_key import KeyLimit
from penstock.limits.pushdown import is_per_micro_batch
from penstock.limits.rows import STOP, RowLimit
from penstock.modes.checking.check import check as check_modes
from penstock.pipeline.continuous import ContinuousQuery
from penstock.pipeline.continuous_start import AnySink, catch_up_with_sink, start_continuous
from penstock.pipeline.endpoints import ConsoleSink, FunctionSink, QueueSink, QueueSource, RateSource
from penstock.pipeline.failures import plainly
from penstock.pipeline.initial_batch import waking
from penstock.pipeline.limited_query import Limiting, keep_for_each_key
from penstock.pipeline.micro_batches import MicroBatchQuery, expected_epochs
from penstock.pipeline.monitoring.monitor import Place, place_of, started
from penstock.pipeline.offset_sync import QuerySource, bring_level
from penstock.pipeline.query import Query
from penstock.pipeline.settings import no_data_batches
from penstock.pipeline.shutdown import stop_on_sigterm
from penstock.pipeline.trigger import Trigger
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.plans import first_gathering_operator, streaming_reads
from penstock.spark.internals.sessions import check_session, default_file_system
from penstock.spark.options import CONF_PREFIX, GUARANTEES
from penstock.spark.registration import register
from penstock.spark.session_store import default_url
from penstock.tables.sink import TableSink

log = logging.getLogger("penstock.pipeline")

Transform = Callable[[DataFrame], DataFrame]

_TRIGGERS = "one of ps.Trigger.processing_time('10 seconds'), ps.Trigger.available_now() and ps.Trigger.continuous('100 ms')"


@dataclass(frozen=True)
class Stream:
    """A source with the transformations so far; each method returns a new one."""

    spark: SparkSession
    source: QueueSource | RateSource | Changelog | DataFrame
    transforms: tuple[Transform, ...] = ()

    def transform(self, function: Transform) -> Stream:
        """Add a transformation: ordinary DataFrame code, stateful or not.

        Parameters
        ----------
        function
            Takes a DataFrame and returns one.

        Raises
        ------
        InvalidInput
            When it is no function.
        """
        if not callable(function):
            raise InvalidInput(f"transform takes a function of a DataFrame, not {type(function).__name__}")
        return replace(self, transforms=(*self.transforms, function))

    def limit(
        self,
        n: int,
        *,
        on_limit: str | None = None,
        per: Sequence[str] | None = None,
        forget_after: str | None = None,
    ) -> Stream:
        """Let the first ``n`` rows through, counted over all micro-batches and restarts; or the first ``n`` of each key.

        In output mode append, and in complete before an aggregation. After one it is Spark's limit for each micro-batch there, and
        the query runs on.

        Parameters
        ----------
        n
            How many rows.
        on_limit
            ``stop`` (when None): the query ends by itself in the micro-batch that reaches ``n``. ``keep``: it runs on and drops what it
            reads, as a plain ``df.limit(n)`` does.
        per
            The columns of a key, of which each has ``n`` rows of its own; the query does not end by itself then.
        forget_after
            With ``per``: how long after its last row a key is forgotten, such as ``"1 hour"``; for ever when None.

        Raises
        ------
        InvalidInput
            When an argument is of another kind, or the stream has a limit already.
        """
        if any(isinstance(each, RowLimit | KeyLimit) for each in self.transforms):
            raise InvalidInput("the stream has a limit already: a pipeline has one")
        if per is not None:
            if on_limit is not None:
                raise InvalidOption(
                    "on_limit is for a limit of all rows: with per, each key has its own, and the query runs on",
                    option="on_limit",
                )
            return self.transform(KeyLimit.of(n, per, forget_after))
        if forget_after is not None:
            raise InvalidOption("forget_after is for keys: give per=[...] with it", option="forget_after")
        return self.transform(RowLimit(n, on_limit or STOP))

    @property
    def row_limit(self) -> RowLimit | None:
        """The limit of all rows, if there is one."""
        return next((each for each in self.transforms if isinstance(each, RowLimit)), None)

    @property
    def key_limit(self) -> KeyLimit | None:
        """The limit for each key, if there is one."""
        return next((each for each in self.transforms if isinstance(each, KeyLimit)), None)

    def frame(self) -> DataFrame:
        """The transformed streaming DataFrame."""
        frame = self._read()
        for function in self.transforms:
            frame = function(frame)
            if not isinstance(frame, DataFrame):
                raise InvalidInput(
                    f"the transformation {in_quotes(getattr(function, '__name__', function))} returned "
                    f"{type(frame).__name__}, not a DataFrame: does it lack a return?"
                )
        return frame

    def _read(self) -> DataFrame:
        if isinstance(self.source, DataFrame):
            return self.source
        if isinstance(self.source, RateSource):
            return self.spark.readStream.format("rate").options(**self.source.given()).load()
        if not isinstance(self.source, QueueSource):
            return read_stream(self.spark, self.source)
        register(self.spark)
        with plainly():
            return self.spark.readStream.format("penstock").options(**self.source.given()).load()

    def write(self, sink: AnySink, *, guarantee: str | None = None, output_mode: str = "append") -> Pipeline:
        """Say where it goes.

        Parameters
        ----------
        sink
            A :class:`QueueSink`, a :class:`TableSink`, a :class:`ConsoleSink` or a :class:`FunctionSink`.
        guarantee
            Into a queue or a table, ``exactly_once`` by default (the sink's rows and the consumer's move are one transaction), ``idempotent`` (for stateless
            transformations, in output mode append: tasks write for themselves, repeats are skipped) or ``at_least_once``.
        output_mode
            ``append``: a queue only grows. A table takes ``update`` and ``complete`` as well.
        """
        require("sink", sink, AnySink, "a ps.QueueSink, ps.TableSink, ps.ConsoleSink or ps.FunctionSink")
        if guarantee is None:
            guarantee = "exactly_once" if isinstance(sink, QueueSink | TableSink) else "at_least_once"
        if guarantee not in GUARANTEES:
            raise InvalidOption(
                f"guarantee is one of {', '.join(GUARANTEES)}, not {in_quotes(guarantee)}.{did_you_mean(str(guarantee), GUARANTEES)}"
            )
        if isinstance(sink, TableSink):
            sink.check(guarantee, output_mode)
        elif isinstance(sink, ConsoleSink | FunctionSink):
            _require_plain(sink, guarantee)
        elif output_mode != "append":
            raise InvalidOption(
                f"a queue takes output mode append, not {in_quotes(output_mode)}: it only grows"
            )
        return Pipeline(self, sink, guarantee, output_mode)


def _require_plain(sink: ConsoleSink | FunctionSink, guarantee: str) -> None:
    if guarantee != "at_least_once":
        raise InvalidOption(
            f"{type(sink).__name__} takes guarantee at_least_once, not {in_quotes(guarantee)}: it cannot tell rows that it has got before",
            option="guarantee",
        )


def stream(spark: SparkSession, source: QueueSource | RateSource | Changelog | DataFrame) -> Stream:
    """Begin a pipeline.

    Parameters
    ----------
    spark
        The session.
    source
        A :class:`QueueSource`; a change feed, without carry-over rows and otherwise as it is (``changes.read_stream`` has more
        to choose from); or any streaming DataFrame.

    Raises
    ------
    InvalidInput
        When the DataFrame is not a streaming one.
    """
    check_session(spark)
    if isinstance(source, DataFrame) and not source.isStreaming:
        raise InvalidInput("the DataFrame is not a streaming one: read it with spark.readStream")
    if not isinstance(source, DataFrame | QueueSource | RateSource | Changelog):
        raise InvalidInput(
            f"a source is a QueueSource, a RateSource, a change feed or a streaming DataFrame, not {type(source).__name__}"
        )
    return Stream(spark, source)


@dataclass(frozen=True)
class Pipeline:
    """A stream and its sink, ready to start."""

    stream: Stream
    sink: AnySink
    guarantee: str
    output_mode: str

    def start(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        name: str | None = None,
        trigger: Trigger | None = None,
        check: bool = True,
        publish: bool = True,
    ) -> Query:
        """Start the query.

        Parameters
        ----------
        checkpoint
            Where Spark keeps the query's progress: a folder, or the URL of one. The continuous trigger alone does without: it makes
            a temporary one then, which goes when the query ends and stays when it fails.
        name
            The query's name.
        trigger
            One micro-batch after the other when None.
        check
            Whether a query that :func:`penstock.modes.check` finds not allowed or not safe in its output mode is refused.
        publish
            Whether the query tells the store of its sink, or else of its source, how far it has come, for ``penstock ui``: a small
            write a second at the most. Over Spark Connect it does so behind ``ps.publish`` alone.

        Raises
        ------
        InvalidInput
            When an argument is of another kind, or the checkpoint is empty.
        OutputModeRefused
            With the report, when Spark would not start the query in this output mode, or rows might be lost or repeated, or state
            would grow for ever.
        CommitRefused
            When the guarantee or the limit cannot be kept with this checkpoint or this plan.
        """
        require("check", check, bool, "True or False")
        require("trigger", trigger, Trigger | None, _TRIGGERS)
        require("name", name, str | None, "text")
        require("publish", publish, bool, "True or False")
        if trigger is not None and trigger.kind == "continuous":
            return self._start_continuous(checkpoint, name, trigger, publish)
        location = _location(self.stream.spark, checkpoint)
        frame = self.stream.frame()
        if check:
            # What the sink itself refuses it says below.
            check_modes(frame, self.sink.format, trigger).require(self.output_mode)
        self._check(frame, location)
        register(self.stream.spark)
        if (keyed := self.stream.key_limit) is not None:
            keep_for_each_key(self.stream.spark, keyed, location)
        limiting = self._limiting(frame, location)
        if limiting is not None:
            done = limiting.ended(name)
            if done is not None:
                # The run that reached the limit may have been killed right behind its last commit.
                bring_level(name or done.id, location, self._sources(frame)[0])
                return done
            frame = self._limited(limiting, frame)
            limiting.keep()
        sources, others = self._sources(frame)
        catch_up_with_sink(self.stream.spark, self.sink, self.guarantee, location, sources)
        writer = self._writer(waking(frame, location), location).outputMode(self.output_mode)
        wanted = trigger or Trigger.processing_time()
        arguments = wanted.arguments() if limiting is None else limiting.arguments(wanted)
        writer = writer.trigger(**arguments)  # type: ignore[arg-type]  # overloads
        if name is not None:
            writer = writer.queryName(name)
        with no_data_batches(self.stream.spark):
            place = self._place(sources) if publish else None
            expected = expected_epochs(sources)
            running, tell_end = started(self.stream.spark, place, writer.start, location)
            query = MicroBatchQuery(running, location, sources, others=others, expected=expected)
            query.tell_end = tell_end
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
        if limiting is not None:
            limiting.watch(query)
        return query

    def _place(self, sources: Sequence[QuerySource]) -> Place | None:
        """Where the query is told of."""
        return place_of(self.stream.spark, self.stream.source, self.sink, sources)

    def _limiting(self, frame: DataFrame, location: str) -> Limiting | None:
        limit = self.stream.row_limit
        if limit is None:
            return None
        if self.output_mode == "complete" and is_per_micro_batch(frame):
            log.info(
                "in output mode complete limit(%d) behind an aggregation is Spark's, for each micro-batch: the query runs on",
                limit.rows,
                extra={"action": "limit_per_trigger", "limit": limit.rows},
            )
            return None
        return Limiting.of(self.stream.spark, limit, location)

    def _limited(self, limiting: Limiting, frame: DataFrame) -> DataFrame:
        """The same, of which the queue is told how much is left to read."""
        source = self.stream.source
        one = len(streaming_reads(frame) or ()) == 1
        told = limiting.options(frame, of_a_queue=one and isinstance(source, QueueSource))
        if not told or not isinstance(source, QueueSource):
            return frame
        source = replace(source, options={**source.options, **told})
        return replace(self.stream, source=source).frame()

    def _start_continuous(
        self,
        checkpoint: str | os.PathLike[str] | None,
        name: str | None,
        trigger: Trigger,
        publish: bool,
    ) -> ContinuousQuery:
        if self.output_mode == "complete":
            raise InvalidOption(
                "the continuous trigger takes output mode append, not 'complete'", option="output_mode"
            )
        stream = self.stream
        location = None if checkpoint is None else _location(stream.spark, checkpoint)
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
            published=publish,
        )
        stop_on_sigterm(query)
        return query

    def _writer(self, frame: DataFrame, location: str) -> DataStreamWriter:
        if isinstance(self.sink, TableSink):
            write = self.sink.writer(frame, self.guarantee, self.output_mode, location)
            return frame.writeStream.foreachBatch(write).option("checkpointLocation", location)
        if isinstance(self.sink, FunctionSink):
            return frame.writeStream.foreachBatch(self.sink).option("checkpointLocation", location)
        if isinstance(self.sink, ConsoleSink):
            return frame.writeStream.format("console").options(
                **self.sink.given(), checkpointLocation=location
            )
        options = self.sink.given() | {"guarantee": self.guarantee, "checkpointLocation": location}
        return frame.writeStream.format("penstock").options(**options)

    def _check(self, frame: DataFrame, location: str) -> None:
        if self.guarantee == "at_least_once":
            return
        Checkpoint(location).require_readable(self.guarantee)
        culprit = None if self.guarantee == "exactly_once" else first_gathering_operator(frame)
        if culprit is not None:
            raise CommitRefused(
                f"guarantee=idempotent is for transformations whose tasks are cut the same way each time, and this one has "
                f"{culprit}: use guarantee=exactly_once",
                operator=culprit,
            )

    def _sources(self, frame: DataFrame) -> tuple[tuple[QuerySource, ...], bool]:
        """The consumers that the query will own, and whether it reads anything without one."""
        reads = streaming_reads(frame)
        if reads is None:
            source = self.stream.source
            given = source.given() if isinstance(source, QueueSource) else {}
            found = [self._source({name.lower(): value for name, value in given.items()})]
        else:
            found = [self._source(read.options) if read.format == "penstock" else None for read in reads]
        return tuple(dict.fromkeys(each for each in found if each is not None)), None in found

    def _source(self, given: Mapping[str, str]) -> QuerySource | None:
        settings = self.stream.spark.conf
        url = given.get("url") or default_url(self.stream.spark)
        queue = given.get("queue") or given.get("path") or settings.get(CONF_PREFIX + "queue", None)
        consumer = given.get("consumer")
        return QuerySource(url, queue, consumer) if url and queue and consumer else None


def _location(spark: SparkSession, checkpoint: str | os.PathLike[str] | None) -> str:
    """The checkpoint as an absolute path or URL: Spark's workers may stand elsewhere."""
    text = path_text("checkpoint", checkpoint)
    if urlsplit(text).scheme:
        return text
    default = default_file_system(spark)
    return os.path.abspath(text) if default is None else f"{default.rstrip('/')}/{text.lstrip('/')}"
