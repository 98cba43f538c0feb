"""Consumers, sinks and checkpoints of a query, synchronized before it starts and after it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark.sql import SparkSession

from penstock.commit.offsets import QueueOffset, batch_ranges
from penstock.commit.owner import follow, level
from penstock.continuous.connectors.protocol import ContinuousSink
from penstock.continuous.driver.checkpoint_log import CheckpointLog
from penstock.continuous.driver.recovery import catch_up
from penstock.errors import condition_of
from penstock.queue.open_stores import open_store
from penstock.queue.store import Store, connect
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.connectors import OwnedConsumer, Sink

log = logging.getLogger("penstock.pipeline")

_POLL_SECONDS = 0.02
_RELEASE_SECONDS = 5.0


def catch_up_with_sink(
    spark: SparkSession, sink: Sink, guarantee: str, location: str, consumers: Sequence[OwnedConsumer]
) -> None:
    """Log in a checkpoint the last epoch or micro-batch if the sink has it and the checkpoint does not.

    The driver of a continuous query may die between the two, and a machine may lose its power with what Spark
    wrote last.

    Raises
    ------
    CheckpointMismatch, CheckpointRewound, OwnerFenced
        When the sink and the checkpoint are of different times.
    """
    # After the very first epoch, the checkpoint may have the query's id and nothing else.
    if guarantee == "at_least_once" or Checkpoint(location).read("metadata") is None:
        return
    if isinstance(sink, ContinuousSink):
        logs = CheckpointLog(location)
        record = sink.record(spark, logs.query_id)
        if record is not None:
            catch_up(logs, record, lambda offset: move_consumer(consumers, offset))


def move_consumer(consumers: Sequence[OwnedConsumer], offset: Any) -> None:
    """Move the consumer of an epoch that the sink has."""
    parsed = QueueOffset.of(offset)
    for owned in consumers:
        if parsed is not None and (parsed.queue, parsed.consumer) == (owned.queue, owned.consumer):
            store = open_store(owned.url)
            follow(store.database, store.uuid, parsed)


def sync_consumers(called: str, checkpoint: str, consumers: Sequence[OwnedConsumer]) -> None:
    """Move the consumers to where the checkpoint's commit log ends, once the query no longer owns them.

    An error is logged and not raised: how the query itself ended is what counts.

    Parameters
    ----------
    called
        The query's name or id.
    """
    offsets: list[QueueOffset] = []
    if consumers:
        with _logging_errors(called):
            offsets = _committed(checkpoint)
    for owned in consumers:
        with _logging_errors(called), connect(owned.url, create=False) as store:
            _await_release(store, owned)
            for offset in offsets:
                if (offset.queue, offset.consumer) == (owned.queue, owned.consumer):
                    level(store.database, store.uuid, offset)
            store.tend(store.queue(owned.queue).record, ())


@contextmanager
def _logging_errors(called: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning(
            "query %r has ended, and the next run moves its consumer to where its checkpoint ends: %s",
            called,
            error,
            extra={"action": "level_failed", "query": called, "error": condition_of(error)},
        )


def _committed(location: str) -> list[QueueOffset]:
    checkpoint = Checkpoint(location)
    last = checkpoint.last_commit()
    return [] if last is None else batch_ranges(checkpoint.offsets(last), ())


def _await_release(store: Store, owned: OwnedConsumer) -> None:
    """Wait for Spark to end the process that owns the consumer, a moment after the query."""
    registration = store.consumer(owned.consumer).registration(owned.queue)
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    deadline = time.monotonic() + _RELEASE_SECONDS
    while lock.held_elsewhere() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
