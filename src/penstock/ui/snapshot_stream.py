"""One snapshot for all viewers of the monitor page, and none while nobody looks."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.errors import condition_of
from penstock.ui.collector import Collector, Snapshot

log = logging.getLogger("penstock.ui")

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
"""A viewer who has waited this long for a snapshot is shown that the store does not answer."""
HEARTBEAT_SECONDS = 15.0
"""A comment is sent after this time when there is nothing else to send."""
FRESH = 0.9
"""A snapshot younger than this share of the interval is as good as a new one."""
MOST_VIEWERS = 100


@dataclass(frozen=True)
class TakenSnapshot:
    """A snapshot, its JSON, and when it was taken."""

    snapshot: Snapshot
    text: bytes
    at: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> TakenSnapshot:
        return cls(snapshot, json.dumps(snapshot, separators=(",", ":")).encode(), time.monotonic())


class SnapshotStream:
    """Snapshots for viewers; used by one event loop.

    Parameters
    ----------
    every
        Seconds between two snapshots.
    """

    def __init__(self, collector: Collector, every: float) -> None:
        self._collector, self._every = collector, every
        self._last: TakenSnapshot | None = None
        self._next: asyncio.Future[TakenSnapshot] | None = None
        self._closing = asyncio.Event()
        self.viewers = 0
        """The number of open event streams."""

    @property
    def full(self) -> bool:
        """Whether there is no room for another event stream."""
        return self.viewers >= MOST_VIEWERS

    def close(self) -> None:
        """End all event streams."""
        self._closing.set()

    async def newest(self) -> TakenSnapshot:
        """Return a fresh snapshot; where the store hangs, a stale one with an error."""
        last = self._last
        if last is not None and time.monotonic() - last.at < self._every * FRESH:
            return last
        if self._next is None or self._next.done():
            self._next = _in_thread(lambda: TakenSnapshot.of(self._collector.collect()))
        try:
            self._last = await asyncio.wait_for(asyncio.shield(self._next), TIMEOUT_SECONDS)
        except TimeoutError:
            why = f"the store has not answered for {TIMEOUT_SECONDS:.0f} s"
            return TakenSnapshot.of(self._collector.without_answer(why))
        return self._last

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events, a snapshot at each interval, until the viewer leaves or the server
        ends.
        """
        self.viewers += 1
        try:
            yield b"retry: 2000\n\n"
            while not self._closing.is_set():
                began = time.monotonic()
                taken = await self.newest()
                yield b"event: snapshot\ndata: " + taken.text + b"\n\n"
                while (left := self._every - (time.monotonic() - began)) > 0 and not self._closing.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), min(left, HEARTBEAT_SECONDS))
                    if left > HEARTBEAT_SECONDS:
                        yield b": still there\n\n"
        finally:
            self.viewers -= 1


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run work in a daemon thread: the program's end does not wait for a database that takes long to fail."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.cancelled():
            set_outcome()

    def run() -> None:
        set_outcome: Callable[[], None]
        try:
            result = work()
        except Exception as error:
            log.exception(
                "a look at the store failed", extra={"action": "look_failed", "error": condition_of(error)}
            )
            set_outcome = partial(future.set_exception, error)
        else:
            set_outcome = partial(future.set_result, result)
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=run, name="penstock-ui-look", daemon=True).start()
    return future
