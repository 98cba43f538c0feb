"""Pipelines with the continuous trigger: their start, and the running query."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from typing import cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress

from penstock.arguments import in_quotes, require
from penstock.continuous.connectors.protocol import ContinuousSink, ContinuousSource, SourceDriver
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.coordinator import Limit
from penstock.continuous.driver.execution import ContinuousExecution, Settings, State
from penstock.continuous.driver.progress import ListenerDispatch
from penstock.continuous.driver.runs import ContinuousTransform, SparkEngine
from penstock.errors import ContinuousRefusedError, InvalidOptionError
from penstock.json_text import Json
from penstock.limits.per_key import KeyLimit
from penstock.limits.record import store_record
from penstock.limits.rows import STOP, RowLimit
from penstock.limits.run import require_no_limit
from penstock.pipeline.monitor import ContinuousMonitor, monitor_target, session_listener
from penstock.pipeline.query import STOP_SECONDS, Query, Trigger, check_timeout, wait_in_slices
from penstock.spark.connectors import Sink, Source
from penstock.spark.error_boundary import original_error
from penstock.spark.internals.listeners import ListenerBus
from penstock.spark.internals.sessions import is_classic
from penstock.spark.session import register

Transform = Callable[[DataFrame], DataFrame]

_GUARANTEES = ("exactly_once", "at_least_once")
_RETAIN_SETTING = "spark.sql.streaming.minBatchesToRetain"
_BACKLOG_SETTING = "spark.sql.streaming.continuous.epochBacklogQueueSize"


def start_continuous(
    spark: SparkSession,
    source: Source,
    transforms: Sequence[Transform],
    sink: Sink,
    guarantee: str,
    output_mode: str,
    *,
    checkpoint: str | None,
    name: str | None,
    trigger: Trigger,
    monitored: bool = True,
) -> ContinuousQuery:
    if guarantee not in _GUARANTEES:
        raise InvalidOptionError(
            f"the continuous trigger takes guarantee {' or '.join(_GUARANTEES)}, not {in_quotes(guarantee)}",
            condition="INVALID_OPTION.CONFLICT",
            option="guarantee",
        )
    transforms, limit = _without_limit(transforms)
    if limit is None and checkpoint is not None:
        require_no_limit(checkpoint)
    continuous_source, continuous_sink = _connectors(spark, source, sink)
    register(spark)
    source_driver = continuous_source.continuous_driver(spark)
    # Transforms of a continuous query get a ContinuousFrame, which has the methods of a DataFrame.
    continuous_transforms = cast(Sequence[ContinuousTransform], transforms)
    engine = SparkEngine(spark, source_driver, continuous_transforms, name or "continuous query")
    temporary_folder = tempfile.mkdtemp(prefix="penstock-continuous-") if checkpoint is None else None
    checkpoint_log = CheckpointLog(checkpoint or str(temporary_folder))

    def remove_temporary() -> None:
        if temporary_folder is not None:
            shutil.rmtree(temporary_folder, ignore_errors=True)

    try:
        sink_driver = continuous_sink.continuous_driver(
            spark, checkpoint_log.query_id(), guarantee, output_mode
        )
        sink_driver.check(engine.schema)
        # A lower limit that ends the query immediately does not replace the stored one.
        if limit is not None and limit.rows >= checkpoint_log.rows_passed(checkpoint_log.last_commit()):
            store_record(checkpoint_log, limit.rows)
    except Exception:
        remove_temporary()
        raise
    retain, backlog = int(str(spark.conf.get(_RETAIN_SETTING))), int(str(spark.conf.get(_BACKLOG_SETTING)))
    target = monitor_target(spark, source, sink) if monitored else None
    query_id, run_id = checkpoint_log.query_id(), str(uuid.uuid4())
    monitor = None if target is None else ContinuousMonitor(target, query_id, run_id, name, checkpoint)
    # The session's listener gets the same events, but must not report them a second time.
    session_listener(spark, listen=False).claim(run_id, None)
    execution = ContinuousExecution(
        name,
        source_driver,
        sink_driver,
        engine,
        checkpoint_log,
        Settings(trigger.seconds, retain, backlog),
        limit=None if limit is None else Limit(limit.rows, limit.on_limit == STOP),
        run_id=run_id,
        listeners=ListenerDispatch(
            name or query_id, ListenerBus(spark, query_id, run_id), original_error, monitor
        ),
        clean_up=remove_temporary,
    )
    execution.start()
    if execution.failure is not None:
        raise original_error(execution.failure) from None
    return ContinuousQuery(execution, source_driver)


def _connectors(spark: SparkSession, source: Source, sink: Sink) -> tuple[ContinuousSource, ContinuousSink]:
    """Refuse a session, a source or a sink that continuous queries do not support; return the last two."""
    if not is_classic(spark):
        raise ContinuousRefusedError(
            "a continuous query is a Spark job that this process controls, which a Spark Connect session "
            "cannot do: use a classic session, or penstock.Trigger.processing_time",
            condition="CONTINUOUS_REFUSED.CLASSIC_SESSION_NEEDED",
        )
    if not isinstance(source, ContinuousSource):
        raise ContinuousRefusedError(
            f"data source {source.kind} does not support continuous processing: read a penstock.QueueSource "
            "or a penstock.RateSource, or use penstock.Trigger.processing_time",
            condition="CONTINUOUS_REFUSED.SOURCE",
            source=source.kind,
        )
    if not isinstance(sink, ContinuousSink):
        raise ContinuousRefusedError(
            f"{type(sink).__name__} only supports micro-batches: use penstock.Trigger.processing_time",
            condition="CONTINUOUS_REFUSED.SINK",
            sink=type(sink).__name__,
        )
    return source, sink


def _without_limit(transforms: Sequence[Transform]) -> tuple[Sequence[Transform], RowLimit | None]:
    """Return the transforms without the limit, and the limit, which the engine itself applies."""
    last = transforms[-1] if transforms else None
    limit = last if isinstance(last, RowLimit) else None
    other_transforms = transforms if limit is None else transforms[:-1]
    if any(isinstance(transform, KeyLimit) for transform in other_transforms):
        raise ContinuousRefusedError(
            "the continuous trigger does not support limit(n, per=[…]), which keeps state: use "
            "penstock.Trigger.processing_time or penstock.Trigger.available_now",
            condition="CONTINUOUS_REFUSED.LIMIT",
        )
    if any(isinstance(transform, RowLimit) for transform in other_transforms):
        raise ContinuousRefusedError(
            "with the continuous trigger, limit(n) counts the rows that are written: put it after the last "
            "transform",
            condition="CONTINUOUS_REFUSED.LIMIT",
        )
    return other_transforms, limit


class ContinuousQuery(Query):
    """A query of a pipeline that runs with the continuous trigger."""

    def __init__(self, execution: ContinuousExecution, source: SourceDriver) -> None:
        self.execution, self._source = execution, source

    @property
    def id(self) -> str:
        return self.execution.id

    @property
    def runId(self) -> str:
        return self.execution.run_id

    @property
    def name(self) -> str | None:
        return self.execution.name

    @property
    def state(self) -> str:
        """INITIALIZING, ACTIVE, RECONFIGURING or TERMINATED."""
        return self.execution.state.value

    @property
    def isActive(self) -> bool:
        return self.execution.state is not State.TERMINATED

    @property
    def status(self) -> Json:
        active = self.execution.state is State.ACTIVE
        ending = self.execution.end_reason
        message = self.state if ending is None else f"{self.state}: {ending}"
        return {"message": message, "isDataAvailable": active, "isTriggerActive": active}

    @property
    def lastProgress(self) -> StreamingQueryProgress | None:
        return self.execution.progress.last

    @property
    def recentProgress(self) -> list[StreamingQueryProgress]:
        return self.execution.progress.recent

    def exception(self) -> Exception | None:
        error = self.execution.failure
        return None if error is None else original_error(error)

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        ended = wait_in_slices(self.execution.join, timeout)
        self._raise_error()
        return None if timeout is None else ended

    def awaitEpoch(self, number: int, timeout: float | None = None) -> bool:
        """Wait until an epoch is committed; return whether it is.

        Parameters
        ----------
        number
            The epoch's number.
        timeout
            Seconds to wait; for ever when None.

        Raises
        ------
        InvalidInputError
            When the timeout is not a number of seconds.
        """
        require("number", number, int, "the number of an epoch")
        check_timeout(timeout)
        reached = self.execution.await_epoch(number, timeout)
        self._raise_error()
        return reached

    def processAllAvailable(self) -> None:
        ends = self._source.end_offsets()
        self.execution.await_offsets(
            lambda offsets: all(offsets.get(partition, 0) >= end for partition, end in ends.items())
        )
        self._raise_error()

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        check_timeout(timeout)
        return self.execution.stop(timeout)

    def _raise_error(self) -> None:
        error = self.exception()
        if error is not None:
            raise error from None
