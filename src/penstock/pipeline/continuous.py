"""Pipelines with the continuous trigger: how they start, and the running query."""

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
_RETAIN = "spark.sql.streaming.minBatchesToRetain"
_BACKLOG = "spark.sql.streaming.continuous.epochBacklogQueueSize"


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
            f"the continuous trigger has guarantee {' or '.join(_GUARANTEES)}, not {in_quotes(guarantee)}",
            condition="INVALID_OPTION.CONFLICT",
            option="guarantee",
        )
    transforms, limit = _without_limit(transforms)
    if limit is None and checkpoint is not None:
        require_no_limit(checkpoint)
    continuous_source, continuous_sink = _connectors(spark, source, sink)
    register(spark)
    reads = continuous_source.continuous_driver(spark)
    # The frame that a continuous query passes to transforms has the methods of a DataFrame.
    functions = cast(Sequence[ContinuousTransform], transforms)
    engine = SparkEngine(spark, reads, functions, name or "continuous query")
    temporary = tempfile.mkdtemp(prefix="penstock-continuous-") if checkpoint is None else None
    logs = CheckpointLog(checkpoint or str(temporary))

    def remove_temporary() -> None:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    try:
        writes = continuous_sink.continuous_driver(spark, logs.query_id(), guarantee, output_mode)
        writes.check(engine.schema)
        # A lower limit that ends the query immediately does not replace the one stored with the checkpoint.
        if limit is not None and limit.rows >= logs.rows_passed(logs.last_commit()):
            store_record(logs, limit.rows)
    except Exception:
        remove_temporary()
        raise
    retain, backlog = int(str(spark.conf.get(_RETAIN))), int(str(spark.conf.get(_BACKLOG)))
    target = monitor_target(spark, source, sink) if monitored else None
    query_id, run_id = logs.query_id(), str(uuid.uuid4())
    monitor = None if target is None else ContinuousMonitor(target, query_id, run_id, name, checkpoint)
    # The session's listener gets the same events.
    session_listener(spark, listen=False).claim(run_id, None)
    execution = ContinuousExecution(
        name,
        reads,
        writes,
        engine,
        logs,
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
    return ContinuousQuery(execution, reads)


def _connectors(spark: SparkSession, source: Source, sink: Sink) -> tuple[ContinuousSource, ContinuousSink]:
    """Refuse a session, a source or a sink that continuous queries do not support."""
    if not is_classic(spark):
        raise ContinuousRefusedError(
            "a continuous query is one Spark job that its driver controls, and a Spark Connect session does "
            "not reach it: use a classic session, or penstock.Trigger.processing_time",
            condition="CONTINUOUS_REFUSED.CLASSIC_SESSION_NEEDED",
        )
    if not isinstance(source, ContinuousSource):
        raise ContinuousRefusedError(
            f"data source {source.kind} does not support continuous processing: read a queue with "
            "penstock.QueueSource or a penstock.RateSource, or use penstock.Trigger.processing_time",
            condition="CONTINUOUS_REFUSED.SOURCE",
            source=source.kind,
        )
    if not isinstance(sink, ContinuousSink):
        raise ContinuousRefusedError(
            f"{type(sink).__name__} only takes micro-batches: use penstock.Trigger.processing_time",
            condition="CONTINUOUS_REFUSED.SINK",
            sink=type(sink).__name__,
        )
    return source, sink


def _without_limit(transforms: Sequence[Transform]) -> tuple[Sequence[Transform], RowLimit | None]:
    """Return the transformations before a limit, and the limit, which the engine itself applies."""
    last = transforms[-1] if transforms else None
    limit = last if isinstance(last, RowLimit) else None
    before = transforms if limit is None else transforms[:-1]
    if any(isinstance(transform, KeyLimit) for transform in before):
        raise ContinuousRefusedError(
            "the continuous trigger has no limit(n, per=[…]), which keeps state: use "
            "penstock.Trigger.processing_time or penstock.Trigger.available_now",
            condition="CONTINUOUS_REFUSED.LIMIT",
        )
    if any(isinstance(transform, RowLimit) for transform in before):
        raise ContinuousRefusedError(
            "with the continuous trigger limit(n) counts the rows that are written: put it after the last "
            "transform",
            condition="CONTINUOUS_REFUSED.LIMIT",
        )
    return before, limit


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
        self._raise()
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
        self._raise()
        return reached

    def processAllAvailable(self) -> None:
        ends = self._source.end_offsets()
        self.execution.await_offsets(lambda at: all(at.get(part, 0) >= end for part, end in ends.items()))
        self._raise()

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        check_timeout(timeout)
        return self.execution.stop(timeout)

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error from None
