"""The running query of a pipeline with micro-batches, which Spark runs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from penstock.commit.offsets import QueueOffset, batch_ranges
from penstock.commit.owner import drain
from penstock.errors import PenstockError, condition_of
from penstock.pipeline.failures import original_error
from penstock.pipeline.offset_sync import sync_consumers
from penstock.pipeline.query import STOP_SECONDS, Query
from penstock.queue.store import connect
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.connectors import OwnedConsumer
from penstock.spark.internals.sessions import JvmError

log = logging.getLogger("penstock.pipeline")

_POLL_SECONDS = 0.02
_QUIET_POLLS = 3
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
        # A source that cannot be drained may never be idle for long.
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
    def status(self) -> dict[str, Any]:
        return self._query.status

    @property
    def lastProgress(self) -> Any:
        return self._query.lastProgress

    @property
    def recentProgress(self) -> list[Any]:
        return self._query.recentProgress

    def explain(self, extended: bool = False) -> None:
        """Print the physical plan of the last micro-batch."""
        self._query.explain(extended)

    def exception(self) -> Exception | None:
        error = self._query.exception()
        return None if error is None else original_error(error)

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        try:
            # Spark's annotation says int; it takes fractions of a second as well.
            ended = self._query.awaitTermination(timeout)  # type: ignore[arg-type]  # see above
        except _FAILURES as error:
            original = original_error(error)
            self._on_end(original)
            raise original from None
        if ended is not False:
            self._sync_consumers()
            self._on_end(None)
        return ended

    def processAllAvailable(self) -> None:
        try:
            self._query.processAllAvailable()
        except _FAILURES as error:
            raise original_error(error) from None

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        finished = False
        called = self.name or self.id
        try:
            finished = not self.isActive or self._drained(timeout)
        except Exception as error:
            # How the query itself ends is what counts.
            log.warning(
                "query %r is stopped without the end of its micro-batch, which the next run repeats: %s",
                called,
                error,
                extra={"action": "drain_failed", "query": called, "error": condition_of(error)},
            )
        finally:
            self._query.stop()
        self._sync_consumers()
        self._on_end(None)
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
            self._sync_consumers()
            self._on_end(None)

    def _drained(self, timeout: float) -> bool:
        """Drain the sources, and wait until the query is idle.

        Return whether it is within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        quiet, left = 0, list(self._sources)
        while self.isActive and quiet < self._quiet_polls:
            if left:
                left = self._drain(left)
            if time.monotonic() > deadline:
                log.warning(
                    "query %r is stopped in the middle of a micro-batch, after %s s; the next run repeats it",
                    self.name or self.id,
                    timeout,
                    extra={"action": "stop_timeout", "query": self.name or self.id, "seconds": timeout},
                )
                return False
            status = self.status
            quiet = quiet + 1 if _idle(status) else 0
            time.sleep(_POLL_SECONDS)
        return True

    def _drain(self, sources: Sequence[OwnedConsumer]) -> list[OwnedConsumer]:
        """Ask the owners of consumers to plan nothing more; return the sources that have yet to be asked.

        Another query may own the consumer by now, so only an owner that is known to be this query's is asked.
        A query that has not begun a micro-batch yet has no owner to ask.
        """
        epochs, left = self._epochs(sources), []
        for source in sources:
            epoch = epochs.get((source.queue, source.consumer))
            if epoch is None:
                left.append(source)
                continue
            with connect(source.url, create=False) as store:
                drain(store.database, source.consumer, source.queue, epoch)
        return left

    def _epochs(self, sources: Sequence[OwnedConsumer]) -> dict[tuple[str, str | None], int]:
        """Return the owner epochs of this run from its progress, or before that from the checkpoint."""
        progress = self._query.lastProgress
        if progress is not None:
            reported = [QueueOffset.of(_json(source.latestOffset)) for source in progress.sources]
            return {
                (offset.queue, offset.consumer): offset.epoch for offset in reported if offset is not None
            }
        expected = {
            (source.queue, source.consumer): self._expected[source]
            for source in sources
            if source in self._expected
        }
        return {
            (offset.queue, offset.consumer): offset.epoch
            for offset in (_begun(self._checkpoint) if expected else ())
            if expected.get((offset.queue, str(offset.consumer))) == offset.epoch
        }

    def _sync_consumers(self) -> None:
        if not self._ended:
            self._ended = True
            log.info(
                "query %r has ended",
                self.name or self.id,
                extra={
                    "action": "query_ended",
                    "query": self.name,
                    "query_id": self.id,
                    "run_id": self.runId,
                },
            )
        sync_consumers(self.name or self.id, self._checkpoint, self._sources)


def expected_epochs(sources: Sequence[OwnedConsumer]) -> dict[OwnedConsumer, int]:
    """Return the owner epochs that a query will have if it starts now and no other one does before."""
    epochs = {}
    for source in sources:
        # The query itself reports what is wrong with a source.
        with suppress(PenstockError), connect(source.url, create=False) as store:
            epochs[source] = store.consumer(source.consumer).registration(source.queue).epoch + 1
    return epochs


def _begun(location: str) -> list[QueueOffset]:
    """Return the offsets of the last micro-batch that a checkpoint has begun."""
    checkpoint = Checkpoint(location)
    last = checkpoint.last_planned()
    return [] if last is None else batch_ranges(checkpoint.offsets(last), ())


def _json(text: str | None) -> object:
    try:
        return json.loads(text or "null")
    except ValueError:
        # Another source's offset need not be JSON.
        return None


def _idle(status: dict[str, Any]) -> bool:
    return not status.get("isTriggerActive") or not status.get("isDataAvailable")
