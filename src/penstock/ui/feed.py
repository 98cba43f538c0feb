"""One look at the store for all viewers, and none when nobody looks."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import condition_of
from penstock.ui.collector import Collector, Snapshot

log = logging.getLogger("penstock.ui")

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds that a viewer waits for a look before it is told that the store does not answer."""
HEARTBEAT = 15.0
"""Seconds after which a line without meaning is sent, when there is nothing else."""
FRESH = 0.9
"""A snapshot younger than this share of the time between two looks is as good as a new one."""
MOST_VIEWERS = 100


@dataclass(frozen=True)
class Taken:
    """A snapshot, and as JSON."""

    snapshot: Snapshot
    text: bytes
    at: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> Taken:
        return cls(snapshot, json.dumps(snapshot, separators=(",", ":")).encode(), time.monotonic())


class Feed:
    """Snapshots for viewers, from one event loop.

    Parameters
    ----------
    every
        Seconds between two snapshots.
    """

    def __init__(self, collector: Collector, every: float) -> None:
        self._collector, self._every = collector, every
        self._last: Taken | None = None
        self._look: asyncio.Future[Taken] | None = None
        self._closing = asyncio.Event()
        self.viewers = 0
        """Event streams that are open."""

    @property
    def full(self) -> bool:
        """Whether there is room for no more event streams."""
        return self.viewers >= MOST_VIEWERS

    def close(self) -> None:
        """End all event streams."""
        self._closing.set()

    async def newest(self) -> Taken:
        """A snapshot that is not older than what is between two of them; a stale one that says so where the store hangs."""
        last = self._last
        if last is not None and time.monotonic() - last.at < self._every * FRESH:
            return last
        if self._look is None or self._look.done():
            self._look = _beside(lambda: Taken.of(self._collector.collect()))
        try:
            self._last = await asyncio.wait_for(asyncio.shield(self._look), PATIENCE)
        except TimeoutError:
            return Taken.of(
                self._collector.without_answer(f"the store has not answered for {PATIENCE:.0f} s")
            )
        return self._last

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: a snapshot at once and then one at each interval, until the viewer goes or the server ends."""
        self.viewers += 1
        try:
            yield b"retry: 2000\n\n"
            while not self._closing.is_set():
                began = time.monotonic()
                taken = await self.newest()
                yield b"event: snapshot\ndata: " + taken.text + b"\n\n"
                while (left := self._every - (time.monotonic() - began)) > 0 and not self._closing.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), min(left, HEARTBEAT))
                    if left > HEARTBEAT:
                        yield b": still there\n\n"
        finally:
            self.viewers -= 1


def _beside(work: Callable[[], T]) -> asyncio.Future[T]:
    """Do work in a thread that nobody waits for when the program ends: a database may take long to say that it is gone."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # there is one where there is no error

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            log.exception(
                "a look at the store failed", extra={"action": "look_failed", "error": condition_of(caught)}
            )
            error = caught
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="penstock-ui-look", daemon=True).start()
    return future
