"""Snapshots of a store, one after the other: what changed between two of them becomes rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import penstock
from penstock.errors import PenstockError, StoreNotFound, condition_of
from penstock.instants import now_micros
from penstock.redaction import secrets_of, sentence
from penstock.ui import sinks
from penstock.ui.checkpoints import Checkpoints
from penstock.ui.consumers import Consumers
from penstock.ui.history import step_for
from penstock.ui.queries import Queries
from penstock.ui.queues import Queues
from penstock.ui.reading import Seen, iso, look, open_to_look
from penstock.ui.sinks import Letters

log = logging.getLogger("penstock.ui")

_MESSAGE = 500
_LISTS = ("queues", "consumers", "queries", "ledger", "dead_letters", "notes")
_KINDS = {"sqlite": "sqlite", "postgres": "postgresql"}

Snapshot = dict[str, Any]


class Collector:
    """Looks at a store, one look at a time; not for several threads at once.

    Parameters
    ----------
    url
        The store, which has to be there.
    checkpoints
        Checkpoints to look at besides.
    every
        Seconds between two looks, as the page is told.
    clock
        Seconds, from anywhere.

    Raises
    ------
    InvalidUrl, StoreNotFound, StoreUnavailable, StoreTooNew, MissingDependency
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
        self._database = open_to_look(url)
        self._checkpoints = Checkpoints(checkpoints, clock)
        self._uuid: str | None = None
        self._away = False
        self._forget()
        self._last = self._empty()

    @property
    def url(self) -> str:
        """The store's URL without its password."""
        return str(self._database.url)

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def collect(self) -> Snapshot:
        """A snapshot; where the store does not answer, the last one with the reason."""
        try:
            seen = self._look()
        except PenstockError as error:
            # Once for each time that it goes away.
            if not self._away:
                log.warning(
                    "the page shows what was last known: %s",
                    error,
                    extra={"action": "look_failed", "error": condition_of(error)},
                )
            self._away = True
            return self.without_answer(error.message)
        except Exception as error:
            # Whatever somebody has written there: the page goes on, and says so.
            if not self._away:
                log.exception(
                    "the store holds something that the page cannot read",
                    extra={"action": "look_failed", "error": condition_of(error)},
                )
            self._away = True
            return self.without_answer(
                f"it holds something that the page cannot read: {type(error).__name__}, see the log"
            )
        self._away = False
        self._last = self._snapshot(seen)
        return self._last

    def without_answer(self, why: str) -> Snapshot:
        """The last snapshot, with the reason why there is no newer one."""
        store = {**self._last["store"], "error": sentence(why, _MESSAGE, self._secrets)}
        return {**self._last, "store": store}

    def _look(self) -> Seen:
        try:
            seen = look(self._database, self._queries.since)
        except StoreNotFound:
            # The file was put back, or replaced: it may be there under its name again.
            database = open_to_look(self._url, patience=0)
            self._database.close()
            self._database = database
            seen = look(database, 0)
        if seen.uuid != self._uuid:
            self._uuid = seen.uuid
            self._forget()
        return seen

    def _forget(self) -> None:
        self._queues, self._consumers = Queues(), Consumers(self._clock)
        self._queries, self._letters = Queries(), Letters(self._secrets)

    def _snapshot(self, seen: Seen) -> Snapshot:
        self._checkpoints.look()
        queues, consumers = self._queues.told(seen), self._consumers.told(seen)
        queries = self._queries.told(seen, self._checkpoints.found)
        step = step_for(self._queues.count + self._consumers.count + self._queries.count)
        return {
            **self._about(seen.now),
            "queues": _with(queues, self._queues.histories(seen, step)),
            "consumers": _with(consumers, self._consumers.histories(step)),
            "queries": _with(queries, self._queries.histories(step)),
            "ledger": sinks.told(seen),
            "dead_letters": self._letters.told(seen, self._database),
            "notes": [*self._queries.notes, *self._checkpoints.notes],
        }

    def _about(self, now: int) -> Snapshot:
        return {
            "version": penstock.__version__,
            "taken_at": iso(now),
            "every_seconds": self._every,
            "store": {"url": self.url, "kind": _KINDS[self._database.dialect], "error": None},
        }

    def _empty(self) -> Snapshot:
        lists: Snapshot = {key: [] for key in _LISTS}
        return {**self._about(now_micros()), **lists}


def _with(told: list[Snapshot], histories: list[list[Any]]) -> list[Snapshot]:
    return [{**each, "history": history} for each, history in zip(told, histories, strict=True)]
