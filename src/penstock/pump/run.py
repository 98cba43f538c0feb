"""The run of a pump in one process, from the stored position on until it is stopped or fenced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.errors import (
    CheckpointMismatchError,
    CommitOutcomeUnknownError,
    DataLostError,
    FeedUnavailableError,
    PenstockError,
    StoreUnavailableError,
    condition_of,
)
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.following import SlotFollower
from penstock.feeds.postgres.server import ServerGone, SlotInUse
from penstock.feeds.postgres.table_readers import TableReaders
from penstock.pump.appender import Appender
from penstock.pump.backfill_records import backfills_of
from penstock.pump.backfills import Backfills
from penstock.pump.deletions import Deletions
from penstock.pump.planning import Planner, PumpSettings
from penstock.pump.recovery import Recovery
from penstock.pump.recovery_records import RecoveryRequest
from penstock.pump.reports import News, Reports
from penstock.pump.targets import Targets
from penstock.queue.store import Store
from penstock.redaction import shown
from penstock.store.database import Transaction
from penstock.store.records import pumps

log = logging.getLogger("penstock.pump")

T = TypeVar("T")

_WAIT = 0.5
"""Seconds to wait for rows before checking whether the pump should stop."""
_BACKFILL_WAIT = 0.02
_LOOK_SECONDS = 2.0
"""How often to check for requests to read a table again."""
_BEAT_SECONDS = 2.0
_LONGEST_PAUSE = 30.0
_END_SECONDS = 2.0
"""For how long to retry recording that the pump has ended, if the store does not answer."""
AWAY = (ServerGone, SlotInUse, StoreUnavailableError, CommitOutcomeUnknownError)
"""Errors that pass."""


class Waits:
    """Pauses while a server or a store does not answer: longer ones after each failure."""

    def __init__(self, name: str, stopping: threading.Event) -> None:
        self._name, self._stopping = name, stopping
        self._failures = 0

    def reset(self) -> None:
        """Note that the server and the store answer."""
        self._failures = 0

    def repeated(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; after a temporary failure, wait and return None."""
        try:
            return work()
        except AWAY as error:
            self._failures += 1
            pause = min(0.5 * 2 ** min(self._failures, 10), _LONGEST_PAUSE)
            log.warning(
                "pump %s tries again in %.0f s: %s",
                self._name,
                pause,
                shown(error),
                extra={
                    "action": "pump_waits",
                    "pump": self._name,
                    "error": condition_of(error),
                    "seconds": pause,
                },
            )
            self._stopping.wait(pause)
            return None


@dataclass
class PumpRun:
    """The work of the process that owns a pump."""

    settings: PumpSettings
    store: Store
    owner: str
    stopping: threading.Event
    reports: Reports
    waits: Waits

    def __post_init__(self) -> None:
        self._lost = threading.Event()
        """Set when another process owns the pump."""
        self._done = threading.Event()
        self._look_at = 0.0

    def all(self) -> None:
        """Append until the pump is stopped; wait while the server or the store does not answer.

        Raises
        ------
        PenstockError
            When a person has to act, as after a change of a table that the queues cannot follow.
        ProducerFencedError
            When another process has taken the pump over.
        """
        self._run(self.reports.begin)
        beats = threading.Thread(target=self._beat, name=f"pump {self.settings.name}", daemon=True)
        beats.start()
        failure: BaseException | None = None
        try:
            while not self._ends():
                self.waits.repeated(self._session)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._done.set()
            beats.join(_END_SECONDS)
            with suppress(PenstockError):
                self.store.database.run(
                    lambda tx: self._end(tx, failure), idempotent=True, timeout=_END_SECONDS
                )

    def _end(self, tx: Transaction, failure: BaseException | None) -> None:
        pumps.release_pump(tx, self.settings.name, self.owner)
        self.reports.report(tx, self.reports.take())
        self.reports.end(tx, failure)

    def _session(self) -> None:
        """Append from the stored position on, or recover, on one connection to the server."""
        # With the store's id: the copy of a store must not end the original's connection.
        name = f"penstock pump {self.store.uuid[:8]} {self.settings.name}"
        with closing(self.settings.feed.open()) as feed:
            recovery = Recovery(self.settings, self.store, self.owner, feed, name)
            request = recovery.request()
            if request is not None and request.force:
                recovery.run()
                return
            try:
                self._resume(feed, recovery)
            except (CheckpointMismatchError, DataLostError, FeedUnavailableError) as error:
                recovery.handle(error)

    def _resume(self, feed: OpenPostgresFeed, recovery: Recovery) -> None:
        settings = self.settings
        planner = Planner(settings, self.store, self.owner, feed)
        plan, position = planner.plan()
        backfills = Backfills(settings.feed, feed, plan, settings.name)
        deletions = Deletions(feed, plan, self.store, settings.name)
        self.reports.sink = f"queues {plan.listed()}"
        readers = TableReaders(
            feed.settings,
            feed.server,
            plan.tables,
            plan.publication,
            together=plan.together is not None,
            changes=settings.schema_changes,
            backfills=backfills.sieves,
            left_out=planner.left_out,
        )
        follower = SlotFollower(feed, readers)
        appender = Appender(
            self.store.database,
            settings.name,
            self.owner,
            position,
            Targets.opened(self.store, plan.queues, readers.names),
            readers,
            self.reports,
            plan.offset,
        )
        with closing(follower), closing(backfills), closing(deletions):
            self._follow(feed, follower, appender, backfills, deletions, recovery)

    def _follow(
        self,
        feed: OpenPostgresFeed,
        follower: SlotFollower,
        appender: Appender,
        backfills: Backfills,
        deletions: Deletions,
        recovery: Recovery,
    ) -> None:
        for step in follower.copy(appender.place):
            appender.append(step, note=True)
            if self._ends():
                return
        appender.go_back(follower.start(appender.place, recovery.application, appender.last_row()))
        if follower.check():
            # Rows of a new timeline must not be mistaken for those of the one before.
            appender.keep_state()
        version = appender.position.version
        log.info(
            "pump %s follows slot %s from commit %d on",
            self.settings.name,
            feed.slot.name,
            version,
            extra={"action": "pump_follows", "pump": self.settings.name, "version": version},
        )
        backfills.start()
        is_asked = recovery.request() is not None
        while not self._ends():
            if is_asked and not appender.position.part_rows:
                recovery.decline()
                is_asked = False
            is_busy = bool(backfills.tables or deletions.tables)
            received = follower.read(_BACKFILL_WAIT if is_busy else _WAIT)
            if received is not None:
                for change in backfills.changes():
                    appender.change_state(change)
                appender.append(received)
                appender.confirm(follower, received, leaves_room=is_busy)
                self.waits.reset()
            if is_busy and not appender.position.part_rows:
                self._backfill(follower, appender, backfills, deletions)
                self._delete(follower, appender, deletions)
            if follower.check():
                appender.keep_state()
            if not appender.position.part_rows and (
                follower.has_new_tables or self._has_new_requests(backfills)
            ):
                # Another session starts with the new tables.
                return
            self.reports.warnings = tuple(feed.warnings())

    def _backfill(
        self, follower: SlotFollower, appender: Appender, backfills: Backfills, deletions: Deletions
    ) -> None:
        """Append the next chunk of a backfill, between two commits."""
        place = follower.place
        # The position lacks commits, and parts of one, whose rows are all held back. Changes that come with
        # the chunk must not come from the log once more after a restart.
        if place.part_version:
            return
        version = max(appender.place.version, place.version)
        step = backfills.step(appender.readers, follower.reached, version)
        if step is None:
            return
        appender.change_state(step.change)
        appender.append(step.step, note=True)
        if step.progress is None:
            deletions.begin(step.table)
            log.info(
                "pump %s has backfilled %s",
                self.settings.name,
                step.table,
                extra={"action": "backfill_complete", "pump": self.settings.name, "table": step.table},
            )

    def _delete(self, follower: SlotFollower, appender: Appender, deletions: Deletions) -> None:
        """Append the next deletes of a recovery, between two commits."""
        step = deletions.step(appender.readers, follower.reached, appender.place.version)
        if step is None:
            return
        if step.change is not None:
            appender.change_state(step.change)
        appender.append(step.step, note=True)

    def _has_new_requests(self, backfills: Backfills) -> bool:
        """Whether a backfill or a recovery was requested; checked every few seconds."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_SECONDS
        record = self.store.database.run(
            lambda tx: pumps.require_owned(tx, self.settings.name, self.owner), write=False
        )
        asked = backfills_of(record.name, record.state)
        if RecoveryRequest.of(record.name, record.state) is not None:
            return True
        return any(each.started_at != backfills.started.get(table) for table, each in asked.items())

    # In a thread of its own: signs of life.

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_SECONDS):
            news = self.reports.take()
            try:
                alive = self._run(partial(self._sign, news=news))
            except Exception as error:
                self.reports.give_back(news)
                # What it appends is refused if another process takes over meanwhile.
                log.debug("the heartbeat failed: %s", shown(error), extra={"action": "pump_beat_failed"})
                continue
            if not alive:
                self._lost.set()
                return

    def _sign(self, tx: Transaction, news: News) -> bool:
        if not pumps.send_heartbeat(tx, self.settings.name, self.owner):
            return False
        self.reports.report(tx, news)
        return True

    def _ends(self) -> bool:
        if self._lost.is_set():
            raise pumps.pump_fenced_error(self.settings.name)
        return self.stopping.is_set()

    def _run(self, work: Callable[[Transaction], T]) -> T:
        return self.store.database.run(work, idempotent=True)
