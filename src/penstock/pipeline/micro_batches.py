"""The running query of a pipeline with micro-batches, which Spark runs.

Before it starts, its checkpoint catches up with its sink. After it has ended, its consumers move to where the
checkpoint ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from penstock.commit.offsets import QueueOffset
from penstock.commit.owner import move_past_commit, raise_safe_offset, request_drain
from penstock.continuous.connectors.protocol import ContinuousSink
from penstock.continuous.driver.checkpoint_log import CheckpointLog, catch_up, require_not_behind
from penstock.errors import NotRegisteredError, PenstockError, condition_of
from penstock.json_text import Json, parse_json
from penstock.pipeline.query import STOP_SECONDS, Query, check_timeout, wait_in_slices
from penstock.queue.store import Store, connect, open_store
from penstock.redaction import shown
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.connectors import OwnedConsumer, Sink
from penstock.spark.error_boundary import original_error
from penstock.spark.internals.sessions import JvmError

log = logging.getLogger("penstock.pipeline")

_POLL_SECONDS = 0.02
_QUIET_POLLS = 3
_RELEASE_SECONDS = 5.0
# A failure of the query, and the end of Spark's JVM.
_FAILURES = (StreamingQueryException, JvmError, ConnectionError)


class MicroBatchQuery(Query):
    """A query of a pipeline that Spark runs in micro-batches."""

    def __init__(
        self,
        query: StreamingQuery,
        checkpoint: str,
        sources: Sequence[OwnedConsumer],
        *,
        others: bool = False,
        expected: Mapping[OwnedConsumer, int] | None = None,
        on_end: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        self._query = query
        self._checkpoint = checkpoint
        self._sources, self._others = sources, others
        self._expected = expected or {}
        self._ended = False
        # Sources that cannot be drained may never be idle for long.
        self._quiet_polls = 1 if others or not sources else _QUIET_POLLS
        self._on_end = on_end

    @property
    def id(self) -> str:
        return str(self._query.id)

    @property
    def runId(self) -> str:
        return str(self._query.runId)

    @property
    def name(self) -> str | None:
        return self._query.name

    @property
    def isActive(self) -> bool:
        return self._query.isActive

    @property
    def status(self) -> Json:
        return self._query.status

    @property
    def lastProgress(self) -> StreamingQueryProgress | None:
        return self._query.lastProgress

    @property
    def recentProgress(self) -> list[StreamingQueryProgress]:
        return self._query.recentProgress

    def explain(self, extended: bool = False) -> None:
        """Print the physical plan of the last micro-batch."""
        self._query.explain(extended)

    def exception(self) -> Exception | None:
        error = self._query.exception()
        return None if error is None else original_error(error)

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        try:
            ended = wait_in_slices(self._wait, timeout)
        except _FAILURES as error:
            original = original_error(error)
            self._on_end(original)
            raise original from None
        if ended:
            self._has_ended()
        return None if timeout is None else ended

    def _wait(self, seconds: float) -> bool | None:
        # Spark's annotation says int, but it accepts fractions of a second.
        return self._query.awaitTermination(seconds)  # type: ignore[arg-type]  # see above

    def processAllAvailable(self) -> None:
        try:
            self._query.processAllAvailable()
        except _FAILURES as error:
            raise original_error(error) from None

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        check_timeout(timeout)
        finished = False
        try:
            finished = not self.isActive or self._drained(timeout)
        except Exception as error:
            # Only how the query itself ended matters.
            log.warning(
                "query %r stopped before its micro-batch ended, and the next run repeats it: %s",
                self._called,
                shown(error),
                extra={"action": "drain_failed", "query": self._called, "error": condition_of(error)},
            )
        finally:
            self._query.stop()
        self._has_ended()
        return finished

    def finish(self) -> None:
        """Stop a query that has all its rows.

        Queues finish the micro-batch in flight. Another source might never stop, so its micro-batch is
        interrupted.
        """
        if self._sources and not self._others:
            self.stop()
        else:
            self._query.stop()
            self._has_ended()

    def _drained(self, timeout: float) -> bool:
        """Drain the sources; return whether the query became idle within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        quiet, left = 0, list(self._sources)
        while self.isActive and quiet < self._quiet_polls:
            if left:
                left = self._drain(left)
            if time.monotonic() > deadline:
                log.warning(
                    "query %r is stopped in the middle of a micro-batch, after %s s; the next run repeats it",
                    self._called,
                    timeout,
                    extra={"action": "stop_timeout", "query": self._called, "seconds": timeout},
                )
                return False
            status = self.status
            busy = status.get("isTriggerActive") and status.get("isDataAvailable")
            quiet = 0 if busy else quiet + 1
            time.sleep(_POLL_SECONDS)
        return True

    def _drain(self, sources: Sequence[OwnedConsumer]) -> list[OwnedConsumer]:
        """Ask the owners of consumers to plan no more micro-batches; return the sources still to be asked.

        Another query may own a consumer by now, so only an owner that is known to be this query's is asked. A
        query that has not begun a micro-batch yet has no owner to ask.
        """
        offsets, left = self._planned(sources), []
        for source in sources:
            offset = offsets.get((source.queue, source.consumer))
            if offset is None:
                left.append(source)
                continue
            with connect(source.url, create=False) as store:
                request_drain(store.database, offset)
        return left

    def _planned(self, sources: Sequence[OwnedConsumer]) -> dict[tuple[str, str | None], QueueOffset]:
        """Return an offset of each source that an owner in this run has made: from the run's progress, or,
        before there is any, from the checkpoint.
        """
        progress = self._query.lastProgress
        if progress is not None:
            reported = [QueueOffset.of(_json(source.latestOffset)) for source in progress.sources]
            return {(offset.queue, offset.consumer): offset for offset in reported if offset is not None}
        expected = {
            (source.queue, source.consumer): self._expected[source]
            for source in sources
            if source in self._expected
        }
        if not expected:
            return {}
        checkpoint = Checkpoint(self._checkpoint)
        return {
            (offset.queue, offset.consumer): offset
            for offset in checkpoint.ranges(checkpoint.last_planned())
            if expected.get((offset.queue, str(offset.consumer))) == offset.epoch
        }

    @property
    def _called(self) -> str:
        return self.name or self.id

    def _has_ended(self) -> None:
        if not self._ended:
            self._ended = True
            log.info(
                "query %r has ended",
                self._called,
                extra={
                    "action": "query_ended",
                    "query": self.name,
                    "query_id": self.id,
                    "run_id": self.runId,
                },
            )
        sync_consumers(self._called, self._checkpoint, self._sources)
        self._on_end(None)


def expected_epochs(sources: Sequence[OwnedConsumer]) -> dict[OwnedConsumer, int]:
    """Return the owner epochs that a query will get if it starts now and no other query starts first.

    Raises NotRegisteredError when a consumer is not registered on its queue.
    """
    epochs = {}
    for source in sources:
        try:
            with connect(source.url, create=False) as store:
                epochs[source] = store.consumer(source.consumer).registration(source.queue).epoch + 1
        except NotRegisteredError:
            raise
        except PenstockError:
            # The query itself reports all other problems of a source.
            continue
    return epochs


def catch_up_with_sink(
    spark: SparkSession, sink: Sink, guarantee: str, location: str, consumers: Sequence[OwnedConsumer]
) -> None:
    """Log the last epoch or micro-batch in a checkpoint if the sink has it and the checkpoint does not.

    The driver of a continuous query may have died in between, or a power failure may have lost what Spark
    wrote last. A query that is ``at_least_once`` repeats the epoch instead.
    """
    # After the very first epoch, the checkpoint may have only the query's id.
    if not isinstance(sink, ContinuousSink) or Checkpoint(location).read("metadata") is None:
        return
    logs = CheckpointLog(location)
    record = sink.record(spark, logs.query_id())
    if record is None:
        return
    if guarantee == "at_least_once":
        require_not_behind(logs, record)
    else:
        catch_up(logs, record, lambda offset: move_consumer(consumers, offset))


def move_consumer(consumers: Sequence[OwnedConsumer], offset: object) -> None:
    """Move the consumer past an epoch that the sink has."""
    parsed = QueueOffset.of(offset)
    for owned in consumers:
        if parsed is not None and (parsed.queue, parsed.consumer) == (owned.queue, owned.consumer):
            move_past_commit(open_store(owned.url).database, parsed)


def sync_consumers(called: str, location: str, consumers: Sequence[OwnedConsumer]) -> None:
    """Move the consumers to where the checkpoint's commit log ends, once the query no longer owns them.

    An error is logged, not raised, since only how the query itself ended matters.
    """
    offsets: list[QueueOffset] = []
    if consumers:
        with _logging_errors(called):
            checkpoint = Checkpoint(location)
            offsets = checkpoint.ranges(checkpoint.last_commit())
    for owned in consumers:
        with _logging_errors(called), connect(owned.url, create=False) as store:
            _await_release(store, owned)
            for offset in offsets:
                if (offset.queue, offset.consumer) == (owned.queue, owned.consumer):
                    raise_safe_offset(store.database, offset, moved_by_sink=owned.moved_by_sink)
            store.schedule_maintenance(store.queue(owned.queue).record, ())


@contextmanager
def _logging_errors(called: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning(
            "query %r has ended, but its consumer could not be moved to the end of its checkpoint; the next "
            "run does that: %s",
            called,
            shown(error),
            extra={"action": "level_failed", "query": called, "error": condition_of(error)},
        )


def _await_release(store: Store, owned: OwnedConsumer) -> None:
    """Wait until Spark ends the process that owns the consumer, a moment after the query."""
    registration = store.consumer(owned.consumer).registration(owned.queue)
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    deadline = time.monotonic() + _RELEASE_SECONDS
    while lock.held_elsewhere() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _json(text: str | None) -> object:
    try:
        return parse_json(text or "null")
    except ValueError:
        # The offset of another source may not be JSON.
        return None
