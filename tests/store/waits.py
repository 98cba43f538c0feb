"""Helpers that wait for events in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import penstock
from penstock.store.postgres import watch as postgres_watch
from penstock.store.watching import Watch
from tests.support.waiting import wait_until

LONG = 30.0
NEVER = 1000.0


def later(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def ready(watch: Watch, queue: penstock.Queue) -> dict[int, int]:
    """Wait until the watch has nothing left to do, and return the positions after all rows."""
    positions = {part.partition: part.next_index for part in queue.info().partitions}
    assert not watch.wait(positions, 0)
    if isinstance(watch, postgres_watch.PostgresWatch):
        # Transactions of other tests may still be running when the watch begins to listen.
        wait_until(lambda: not watch.wait(positions, 0.01) and watch.misses_no_append)
    return positions
