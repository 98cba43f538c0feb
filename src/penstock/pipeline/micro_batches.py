"""Running queries of pipelines with micro-batches, which Spark executes.

Before a query starts, its checkpoint catches up with its sink. After the query has ended, its consumers move
to the end of its checkpoint.
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
from penstock.redaction import redacted_message
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.connectors import OwnedConsumer, Sink
from penstock.spark.error_boundary import original_error
from penstock.spark.internals.sessions import JvmError

log = logging.getLogger("penstock.pipeline")

_POLL_SECONDS = 0.02
_QUIET_POLLS = 3
_RELEASE_SECONDS = 5.0
# Raised when the query has failed, or Spark's JVM has ended.
_FAILURES = (StreamingQueryException, JvmError, ConnectionError)


class MicroBatchQuery(Query):
    """A pipeline's query that Spark runs in micro-batches."""

    def __init__(
        self,
        query: StreamingQuery,
        checkpoint: str,
        consumers: Sequence[OwnedConsumer],
        *,
        has_other_sources: bool = False,
        expected_epochs: Mapping[OwnedConsumer, int] | None = None,
        on_end: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        self._query = query
        self._checkpoint = checkpoint
        self._consumers, self._has_other_sources = consumers, has_other_sources
        self._expected_epochs = expected_epochs or {}
        self._ended = False
        # Sources that cannot be drained may never stay idle.
        self._quiet_polls = 1 if has_other_sources or not consumers else _QUIET_POLLS
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
            ended = wait_in_slices(self._await_slice, timeout)
        except _FAILURES as error:
            original = original_error(error)
            self._on_end(original)
            raise original from None
        if ended:
            self._handle_end()
        return None if timeout is None else ended

    def _await_slice(self, seconds: float) -> bool | None:
        # Spark's annotation says int, but Spark accepts fractions of a second.
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
            finished = not self.isActive or self._wait_until_drained(timeout)
        except Exception as error:
            # The query is stopped anyway.
            log.warning(
                "query %r was stopped before its micro-batch ended; the next run repeats it: %s",
                self._label,
                redacted_message(error),
                extra={"action": "drain_failed", "query": self._label, "error": condition_of(error)},
            )
        finally:
            self._query.stop()
        self._handle_end()
        return finished

    def finish(self) -> None:
        """Stop a query that has all its rows.

        If it only reads queues, it finishes its micro-batch. Other sources might never stop, so the
        micro-batch is interrupted.
        """
        if self._consumers and not self._has_other_sources:
            self.stop()
        else:
            self._query.stop()
            self._handle_end()

    def _wait_until_drained(self, timeout: float) -> bool:
        """Drain the queues; return whether the query became idle within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        quiet_polls, to_ask = 0, list(self._consumers)
        while self.isActive and quiet_polls < self._quiet_polls:
            if to_ask:
                to_ask = self._request_drains(to_ask)
            if time.monotonic() > deadline:
                log.warning(
                    "query %r was stopped within a micro-batch, after %s s; the next run repeats it",
                    self._label,
                    timeout,
                    extra={"action": "stop_timeout", "query": self._label, "seconds": timeout},
                )
                return False
            status = self.status
            busy = status.get("isTriggerActive") and status.get("isDataAvailable")
            quiet_polls = 0 if busy else quiet_polls + 1
            time.sleep(_POLL_SECONDS)
        return True

    def _request_drains(self, consumers: Sequence[OwnedConsumer]) -> list[OwnedConsumer]:
        """Ask the owners of consumers to plan no more micro-batches; return the consumers still to ask for.

        Another query may own a consumer by now, so only this query's own owners are asked. Before its first
        micro-batch, a query has no owner that could be asked.
        """
        offsets, to_ask = self._owned_offsets(consumers), []
        for owned in consumers:
            offset = offsets.get((owned.queue, owned.consumer))
            if offset is None:
                to_ask.append(owned)
                continue
            with connect(owned.url, create=False) as store:
                request_drain(store.database, offset)
        return to_ask

    def _owned_offsets(self, consumers: Sequence[OwnedConsumer]) -> dict[tuple[str, str | None], QueueOffset]:
        """Return an offset of each consumer from its owner in this run: from the run's progress or, before
        the first progress, from the checkpoint.
        """
        progress = self._query.lastProgress
        if progress is not None:
            reported = [QueueOffset.of(_parse_or_none(source.latestOffset)) for source in progress.sources]
            return {(offset.queue, offset.consumer): offset for offset in reported if offset is not None}
        expected = {
            (source.queue, source.consumer): self._expected_epochs[source]
            for source in consumers
            if source in self._expected_epochs
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
    def _label(self) -> str:
        return self.name or self.id

    def _handle_end(self) -> None:
        if not self._ended:
            self._ended = True
            log.info(
                "query %r has ended",
                self._label,
                extra={
                    "action": "query_ended",
                    "query": self.name,
                    "query_id": self.id,
                    "run_id": self.runId,
                },
            )
        sync_consumers(self._label, self._checkpoint, self._consumers)
        self._on_end(None)


def expected_epochs(consumers: Sequence[OwnedConsumer]) -> dict[OwnedConsumer, int]:
    """Return the owner epochs that a query gets if it starts now and no other query starts first.

    Raises NotRegisteredError if a consumer is not registered on its queue.
    """
    epochs = {}
    for owned in consumers:
        try:
            with connect(owned.url, create=False) as store:
                epochs[owned] = store.consumer(owned.consumer).registration(owned.queue).epoch + 1
        except NotRegisteredError:
            raise
        except PenstockError:
            # The query itself reports all other problems.
            continue
    return epochs


def catch_up_with_sink(
    spark: SparkSession, sink: Sink, guarantee: str, location: str, consumers: Sequence[OwnedConsumer]
) -> None:
    """Log the sink's last epoch or micro-batch in the checkpoint if it is missing there.

    A continuous query's driver may have died between the two commits, or a power failure may have lost what
    Spark wrote last. With ``at_least_once``, the query repeats the epoch instead.
    """
    # A checkpoint without the query's id is new. After the very first epoch, it may have only this id.
    if not isinstance(sink, ContinuousSink) or Checkpoint(location).read("metadata") is None:
        return
    checkpoint_log = CheckpointLog(location)
    sink_record = sink.record(spark, checkpoint_log.query_id())
    if sink_record is None:
        return
    if guarantee == "at_least_once":
        require_not_behind(checkpoint_log, sink_record)
    else:
        catch_up(checkpoint_log, sink_record, lambda offset: move_consumer(consumers, offset))


def move_consumer(consumers: Sequence[OwnedConsumer], offset: object) -> None:
    """Move the offset's consumer past an epoch that the sink has."""
    parsed = QueueOffset.of(offset)
    for owned in consumers:
        if parsed is not None and (parsed.queue, parsed.consumer) == (owned.queue, owned.consumer):
            move_past_commit(open_store(owned.url).database, parsed)


def sync_consumers(label: str, location: str, consumers: Sequence[OwnedConsumer]) -> None:
    """Move consumers to the end of the checkpoint's commit log, once the query no longer owns them.

    Errors are logged, not raised: they must not hide how the query itself ended.
    """
    offsets: list[QueueOffset] = []
    if consumers:
        with _logging_errors(label):
            checkpoint = Checkpoint(location)
            offsets = checkpoint.ranges(checkpoint.last_commit())
    for owned in consumers:
        with _logging_errors(label), connect(owned.url, create=False) as store:
            _wait_for_release(store, owned)
            for offset in offsets:
                if (offset.queue, offset.consumer) == (owned.queue, owned.consumer):
                    raise_safe_offset(store.database, offset, moved_by_sink=owned.moved_by_sink)
            store.schedule_maintenance(store.queue(owned.queue).record, ())


@contextmanager
def _logging_errors(label: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning(
            "query %r has ended, but its consumer could not be moved to the end of its checkpoint; the next "
            "run moves it: %s",
            label,
            redacted_message(error),
            extra={"action": "level_failed", "query": label, "error": condition_of(error)},
        )


def _wait_for_release(store: Store, owned: OwnedConsumer) -> None:
    """Wait until Spark ends the process that owns the consumer, shortly after the query."""
    registration = store.consumer(owned.consumer).registration(owned.queue)
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    deadline = time.monotonic() + _RELEASE_SECONDS
    while lock.held_elsewhere() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _parse_or_none(text: str | None) -> object:
    try:
        return parse_json(text or "null")
    except ValueError:
        # The offset of another source may not be JSON.
        return None
