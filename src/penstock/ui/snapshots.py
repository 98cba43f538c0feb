"""Snapshots of a store for the monitor page, with rates from the changes between two of them.

One snapshot serves all viewers, and none are taken without viewers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import penstock
from penstock.errors import PenstockError, StoreNotFoundError, condition_of
from penstock.instants import now_micros
from penstock.json_text import Json
from penstock.redaction import redacted_message, secrets_of, sentence
from penstock.store.records.queries import MAX_QUERIES
from penstock.ui.checkpoints import Checkpoints
from penstock.ui.consumers import Consumers
from penstock.ui.history import step_for
from penstock.ui.queries import Queries
from penstock.ui.queues import DeadLetters, Queues
from penstock.ui.reading import (
    MAX_CONSUMERS,
    MAX_PARTITIONS,
    MAX_QUEUES,
    CommitRow,
    StoreState,
    iso,
    open_read_only,
    read_store,
)
from penstock.ui.unreadable import UnreadableRecords, record_name

log = logging.getLogger("penstock.ui")

_MESSAGE_CHARACTERS = 500
_LIST_KEYS = ("queues", "consumers", "queries", "ledger", "dead_letters", "notes")
_LIMITS_TEXT = {
    "queues": f"the first {MAX_QUEUES:,} by name, with {MAX_PARTITIONS:,} partitions at most",
    "consumers": f"the {MAX_CONSUMERS:,} that are most behind, with {MAX_PARTITIONS:,} partitions at most",
    "queries": f"the {MAX_QUERIES:,} that have reported last",
}
"""The records that the page shows, by kind."""
_KINDS = {"sqlite": "sqlite", "postgres": "postgresql"}

Snapshot = Json


class Collector:
    """Collector of snapshots of a store, one at a time. Not thread-safe."""

    def __init__(
        self,
        url: str,
        checkpoints: Sequence[str] = (),
        *,
        every: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._every, self._clock = url, every, clock
        self._secrets = secrets_of(url)
        self._database = open_read_only(url)
        self._checkpoints = Checkpoints(checkpoints, clock)
        self._uuid: str | None = None
        self._is_failing = False
        self._reset()
        self._last: Snapshot = {
            **self._header(now_micros()),
            **{key: [] for key in _LIST_KEYS},
            "unreadable": 0,
            "left_out": dict.fromkeys(_LIMITS_TEXT, 0),
        }

    @property
    def url(self) -> str:
        return str(self._database.url)

    def close(self) -> None:
        self._database.close()

    def collect(self) -> Snapshot:
        """Return a new snapshot; if the store does not answer, the last one with the reason."""
        try:
            snapshot = self._snapshot(self._read())
        except PenstockError as error:
            # Log only once each time that the store becomes unavailable.
            if not self._is_failing:
                log.warning(
                    "the page shows the last known state: %s",
                    redacted_message(error),
                    extra={"action": "look_failed", "error": condition_of(error)},
                )
            self._is_failing = True
            return self.stale_snapshot(error.message)
        except Exception as error:
            # The page continues and reports unexpected records, whichever program wrote them.
            if not self._is_failing:
                log.exception(
                    "the store has a record that the page cannot read",
                    extra={"action": "look_failed", "error": condition_of(error)},
                )
            self._is_failing = True
            return self.stale_snapshot(
                f"it has a record that the page cannot read: {type(error).__name__}, see the log"
            )
        self._is_failing = False
        self._last = snapshot
        return self._last

    def stale_snapshot(self, reason: str) -> Snapshot:
        """Return the last snapshot, with the reason why there is no newer one."""
        store = {**self._last["store"], "error": sentence(reason, _MESSAGE_CHARACTERS, self._secrets)}
        return {**self._last, "store": store}

    def _read(self) -> StoreState:
        try:
            state = read_store(self._database, self._queries.since)
        except StoreNotFoundError:
            # The file was restored or replaced, and may exist again under its name.
            database = open_read_only(self._url, timeout=0)
            self._database.close()
            self._database = database
            state = read_store(database, 0)
        if state.uuid != self._uuid:
            self._uuid = state.uuid
            self._reset()
        return state

    def _reset(self) -> None:
        self._queues, self._consumers = Queues(), Consumers(self._clock)
        self._queries, self._dead_letters = Queries(), DeadLetters(self._secrets)

    def _snapshot(self, state: StoreState) -> Snapshot:
        self._checkpoints.update()
        unreadable = UnreadableRecords()
        queues = self._queues.update(state, unreadable)
        consumers = self._consumers.update(state, unreadable)
        queries = self._queries.update(state.queries, state.now, self._checkpoints.readable, unreadable)
        rows_with_history = [*queues, *consumers, *queries]
        step = step_for(len(rows_with_history))
        for row in rows_with_history:
            row["history"] = row["history"].every_nth(step)
        snapshot = {
            **self._header(state.now),
            "queues": queues,
            "consumers": consumers,
            "queries": queries,
            "ledger": _commits(state, unreadable),
            "dead_letters": self._dead_letters.update(state, self._database, unreadable),
        }
        own_notes = [sentence(note, _MESSAGE_CHARACTERS, self._secrets) for note in unreadable.notes]
        omitted = {
            "queues": state.queues.omitted,
            "consumers": state.consumers.omitted,
            "queries": state.queries.omitted,
        }
        own_notes += [
            f"{kind} that are not shown: {count:,}. The page shows {_LIMITS_TEXT[kind]}"
            for kind, count in omitted.items()
            if count
        ]
        notes = [*own_notes, *self._queries.notes, *self._checkpoints.notes]
        return {**snapshot, "notes": notes, "unreadable": unreadable.count, "left_out": omitted}

    def _header(self, now: int) -> Snapshot:
        return {
            "version": penstock.__version__,
            "taken_at": iso(now),
            "every_seconds": self._every,
            "store": {"url": self.url, "kind": _KINDS[self._database.dialect], "error": None},
        }


def _commits(state: StoreState, unreadable: UnreadableRecords) -> list[Json]:
    names = state.queries.names

    def build_row(commit: CommitRow) -> Json:
        return {
            "sink": _sink_name(commit.sink),
            "app_id": commit.app_id,
            "query": names.get(commit.app_id),
            "batch": commit.batch_id,
            "rows": commit.row_count,
            "committed_at": iso(commit.committed_at),
        }

    return unreadable.build_rows(
        state.commits, build_row, lambda commit: record_name("a commit to", commit.sink)
    )


def _sink_name(name: str) -> str:
    """Shorten a sink's name in the ledger, ``queue:name:generation`` or ``table:"schema"."name"``."""
    kind, _, rest = name.partition(":")
    if kind == "queue":
        return rest.rpartition(":")[0]
    return rest if kind == "table" else name


def _as_json(snapshot: Snapshot) -> bytes:
    return json.dumps(snapshot, separators=(",", ":"), allow_nan=False).encode()


T = TypeVar("T")

TIMEOUT_SECONDS = 5.0
"""The time after which a viewer waiting for a snapshot is shown that the store does not answer."""
HEARTBEAT_SECONDS = 15.0
"""The time after which a comment is sent if there is nothing else to send."""
FRESH_SHARE = 0.9
"""The share of the interval for which a snapshot counts as new."""
MAX_VIEWERS = 100


@dataclass(frozen=True)
class EncodedSnapshot:
    snapshot: Snapshot
    text: bytes
    at: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> EncodedSnapshot:
        return cls(snapshot, _as_json(snapshot), time.monotonic())


class SnapshotStream:
    """Snapshots for viewers; used by one event loop."""

    def __init__(self, collector: Collector, every: float) -> None:
        self._collector, self._every = collector, every
        self._last: EncodedSnapshot | None = None
        self._pending: asyncio.Future[EncodedSnapshot] | None = None
        self._closing = asyncio.Event()
        self.viewers = 0
        """The number of open event streams."""

    def admit(self) -> bool:
        """Add a viewer; return False if there are too many."""
        if self.viewers >= MAX_VIEWERS:
            return False
        self.viewers += 1
        return True

    def leave(self) -> None:
        """Remove an admitted viewer."""
        self.viewers -= 1

    def close(self) -> None:
        self._closing.set()

    async def newest(self) -> EncodedSnapshot:
        """Return a fresh snapshot; if the store hangs, a stale one with an error."""
        last = self._last
        if last is not None and time.monotonic() - last.at < self._every * FRESH_SHARE:
            return last
        if self._pending is None or self._pending.done():
            self._pending = _in_thread(lambda: EncodedSnapshot.of(self._collector.collect()))
        try:
            self._last = await asyncio.wait_for(asyncio.shield(self._pending), TIMEOUT_SECONDS)
        except TimeoutError:
            reason = f"the store has not answered for {TIMEOUT_SECONDS:.0f} s"
            return EncodedSnapshot.of(self._collector.stale_snapshot(reason))
        return self._last

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events, one snapshot each, until the viewer leaves or the server ends."""
        yield b"retry: 2000\n\n"
        while not self._closing.is_set():
            started = time.monotonic()
            encoded = await self.newest()
            yield b"event: snapshot\ndata: " + encoded.text + b"\n\n"
            while (
                remaining := self._every - (time.monotonic() - started)
            ) > 0 and not self._closing.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), min(remaining, HEARTBEAT_SECONDS))
                if remaining > HEARTBEAT_SECONDS:
                    yield b": still there\n\n"


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run work in a daemon thread, so that exiting does not wait for a database that takes long to fail."""
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
                "the store cannot be read", extra={"action": "look_failed", "error": condition_of(error)}
            )
            set_outcome = partial(future.set_exception, error)
        else:
            set_outcome = partial(future.set_result, result)
        # The loop may have ended in the meantime.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=run, name="penstock-ui-look", daemon=True).start()
    return future
