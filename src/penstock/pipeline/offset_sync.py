"""Consumers brought to where a query's checkpoint ends, once the query has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.commit.offsets import QueueOffset, batch_ranges
from penstock.commit.owner import level
from penstock.errors import condition_of
from penstock.queue.store import Store, connect
from penstock.spark.checkpoint import Checkpoint

log = logging.getLogger("penstock.pipeline")

_POLL_SECONDS = 0.02
_RELEASE_SECONDS = 5.0


@dataclass(frozen=True)
class QuerySource:
    """A consumer that the query owns."""

    url: str = field(repr=False)
    queue: str
    consumer: str


def bring_level(called: str, checkpoint: str, sources: Sequence[QuerySource]) -> None:
    """Bring the consumers to where the checkpoint's commit log ends, once their owner is gone.

    An error is told in the log: the query's own end is what counts.

    Parameters
    ----------
    called
        The query's name or id.
    """
    offsets: list[QueueOffset] = []
    if sources:
        with _warning(called):
            offsets = _committed(checkpoint)
    for source in sources:
        with _warning(called), connect(source.url, create=False) as store:
            _await_release(store, source)
            for offset in offsets:
                if (offset.queue, offset.consumer) == (source.queue, source.consumer):
                    level(store.database, store.uuid, offset)
            store.tend(store.queue(source.queue).record, ())


@contextmanager
def _warning(called: str) -> Iterator[None]:
    """An error in here is told in the log, and the query's own end is what counts."""
    try:
        yield
    except Exception as error:
        log.warning(
            "query %r has ended, and the next run brings its consumer level with its checkpoint: %s",
            called,
            error,
            extra={"action": "level_failed", "query": called, "error": condition_of(error)},
        )


def _committed(location: str) -> list[QueueOffset]:
    checkpoint = Checkpoint(location)
    last = checkpoint.last_commit()
    return [] if last is None else batch_ranges(checkpoint.offsets(last), ())


def _await_release(store: Store, source: QuerySource) -> None:
    """Spark ends the process that owns the consumer a moment after the query."""
    registration = store.consumer(source.consumer).registration(source.queue)
    lock = store.database.owner_lock(registration.lock_name(store.uuid))
    deadline = time.monotonic() + _RELEASE_SECONDS
    while lock.held_elsewhere() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
