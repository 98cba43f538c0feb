"""Snapshots of a store for the monitor page: what changed between two of them becomes rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import penstock
from penstock.errors import PenstockError, StoreNotFoundError, condition_of
from penstock.instants import now_micros
from penstock.json_text import Json
from penstock.redaction import secrets_of, sentence
from penstock.ui.checkpoints import Checkpoints
from penstock.ui.consumers import Consumers
from penstock.ui.dead_letters import DeadLetters
from penstock.ui.history import step_for
from penstock.ui.queries import Queries
from penstock.ui.queues import Queues
from penstock.ui.reading import StoreState, iso, open_read_only, read_store

log = logging.getLogger("penstock.ui")

_MESSAGE_CHARACTERS = 500
_LISTS = ("queues", "consumers", "queries", "ledger", "dead_letters", "notes")
_KINDS = {"sqlite": "sqlite", "postgres": "postgresql"}

Snapshot = Json


class Collector:
    """Takes snapshots of a store, one at a time; not for several threads at once.

    Parameters
    ----------
    url
        The store, which must exist.
    checkpoints
        Checkpoints to show as well.
    every
        Seconds between two snapshots, for the page to know.
    clock
        Seconds, from any start.

    Raises
    ------
    InvalidUrlError, StoreNotFoundError, StoreUnavailableError, StoreTooNewError, MissingDependencyError
    """

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
        self._last: Snapshot = {**self._header(now_micros()), **{key: [] for key in _LISTS}}

    @property
    def url(self) -> str:
        """The store's URL without its password."""
        return str(self._database.url)

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def collect(self) -> Snapshot:
        """Return a new snapshot; where the store does not answer, the last one with the reason."""
        try:
            state = self._read()
        except PenstockError as error:
            # Log it once for each time that the store goes away.
            if not self._is_failing:
                log.warning(
                    "the page shows what was last known: %s",
                    error,
                    extra={"action": "look_failed", "error": condition_of(error)},
                )
            self._is_failing = True
            return self.without_answer(error.message)
        except Exception as error:
            # The page survives whatever somebody has written into the store, and reports it.
            if not self._is_failing:
                log.exception(
                    "the store holds something that the page cannot read",
                    extra={"action": "look_failed", "error": condition_of(error)},
                )
            self._is_failing = True
            return self.without_answer(
                f"it holds something that the page cannot read: {type(error).__name__}, see the log"
            )
        self._is_failing = False
        self._last = self._snapshot(state)
        return self._last

    def without_answer(self, why: str) -> Snapshot:
        """Return the last snapshot, with the reason why there is no newer one."""
        store = {**self._last["store"], "error": sentence(why, _MESSAGE_CHARACTERS, self._secrets)}
        return {**self._last, "store": store}

    def _read(self) -> StoreState:
        try:
            state = read_store(self._database, self._queries.since)
        except StoreNotFoundError:
            # The file was put back or replaced, and may exist again under its name.
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
        self._queries, self._letters = Queries(), DeadLetters(self._secrets)

    def _snapshot(self, state: StoreState) -> Snapshot:
        self._checkpoints.update()
        queues, consumers = self._queues.update(state), self._consumers.update(state)
        queries = self._queries.update(state, self._checkpoints.readable)
        step = step_for(self._queues.count + self._consumers.count + self._queries.count)
        return {
            **self._header(state.now),
            "queues": _with_histories(queues, self._queues.histories(state, step)),
            "consumers": _with_histories(consumers, self._consumers.histories(step)),
            "queries": _with_histories(queries, self._queries.histories(step)),
            "ledger": _commits(state),
            "dead_letters": self._letters.update(state, self._database),
            "notes": [*self._queries.notes, *self._checkpoints.notes],
        }

    def _header(self, now: int) -> Snapshot:
        return {
            "version": penstock.__version__,
            "taken_at": iso(now),
            "every_seconds": self._every,
            "store": {"url": self.url, "kind": _KINDS[self._database.dialect], "error": None},
        }


def _with_histories(rows: list[Json], histories: list[list[Json]]) -> list[Json]:
    return [{**row, "history": history} for row, history in zip(rows, histories, strict=True)]


def _commits(state: StoreState) -> list[Json]:
    """Return the newest commits of the ledger, newest first."""
    names = state.query_names
    return [
        {
            "sink": _sink_name(row.sink),
            "app_id": row.app_id,
            "query": names.get(row.app_id),
            "batch": row.batch_id,
            "rows": row.row_count,
            "committed_at": iso(row.committed_at),
        }
        for row in state.commits
    ]


def _sink_name(name: str) -> str:
    """Shorten a sink's name in the ledger, ``queue:name:generation`` or ``table:"schema"."name"``."""
    kind, _, rest = name.partition(":")
    if kind == "queue":
        return rest.rpartition(":")[0]
    return rest if kind == "table" else name
