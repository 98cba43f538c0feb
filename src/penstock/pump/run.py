"""One process's turn at a pump: from the position in the store on, until it is stopped or loses the pump."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from penstock.errors import (
    CheckpointMismatchError,
    PenstockError,
    StoreUnavailableError,
    condition_of,
)
from penstock.feeds.feed_writer import append_commits
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.following import ALL, PlaceInLog, SlotFollower, Step, tables_by_queue
from penstock.feeds.postgres.publication import PublicationState
from penstock.feeds.postgres.server import ServerGone, SlotInUse
from penstock.pump.plan import PumpPlan
from penstock.pump.reports import News, Reports
from penstock.pump.targets import Continued, QueueSettings, Stamps, Targets, queue_names
from penstock.queue.store import Store
from penstock.redaction import shown
from penstock.store.database import Transaction
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpPosition, PumpRecord

log = logging.getLogger("penstock.pump")

T = TypeVar("T")

_WAIT = 0.5
"""Seconds to wait for rows before looking whether the pump is to stop."""
_BEAT_SECONDS = 2.0
_CONFIRM_SECONDS = 1.0
"""How often a position without rows is noted, and confirmed to the server."""
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class PumpSettings:
    """What a pump reads, and where to."""

    name: str
    feed: PostgresFeed
    url: str
    """That of the store."""
    together: str | None
    """The queue for all tables; None for one for each."""
    prefix: str
    schema_changes: str
    """One of ``following.CHANGES``."""
    queues: QueueSettings


@dataclass
class PumpRun:
    """The work of the process that owns a pump."""

    settings: PumpSettings
    store: Store
    owner: str
    stopping: threading.Event
    reports: Reports

    def __post_init__(self) -> None:
        self._lost = threading.Event()
        """Set when another process owns the pump."""
        self._done = threading.Event()
        self._position = PumpPosition(0, 0)

    def all(self) -> None:
        """Append until the pump is stopped; servers that are away are waited for.

        Raises
        ------
        PenstockError
            When somebody has to act, as after a change of a table that the queues cannot follow.
        ProducerFencedError
            When another process has taken the pump over.
        """
        self._run(self.reports.begin)
        beats = threading.Thread(target=self._beat, name=f"pump {self.settings.name}", daemon=True)
        beats.start()
        failure: BaseException | None = None
        try:
            self._sessions()
        except BaseException as error:
            failure = error
            raise
        finally:
            self._done.set()
            beats.join()
            with suppress(PenstockError):
                self._run(lambda tx: self._end(tx, failure))

    def _end(self, tx: Transaction, failure: BaseException | None) -> None:
        pumps.release_pump(tx, self.settings.name, self.owner)
        self.reports.report(tx, self.reports.take())
        self.reports.end(tx, failure)

    def _sessions(self) -> None:
        failures = 0
        while not self._ends():
            before = self.reports.totals.commits
            try:
                self._session()
            except (ServerGone, SlotInUse, StoreUnavailableError) as error:
                failures = 1 if self.reports.totals.commits > before else failures + 1
                pause = min(0.5 * 2**failures, _LONGEST_PAUSE)
                log.warning(
                    "pump %s tries again in %.0f s: %s",
                    self.settings.name,
                    pause,
                    shown(error),
                    extra={
                        "action": "pump_waits",
                        "pump": self.settings.name,
                        "error": condition_of(error),
                        "seconds": pause,
                    },
                )
                self._pause(pause)

    def _session(self) -> None:
        """Append from the stored position on, on one connection to the server."""
        settings = self.settings
        with closing(settings.feed.open()) as feed:
            record = self._run(lambda tx: pumps.require_owned(tx, settings.name, self.owner))
            plan = self._plan(feed, record)
            follower = SlotFollower(
                feed,
                plan.tables,
                plan.publication,
                together=settings.together is not None,
                changes=settings.schema_changes,
            )
            self.reports.sink = f"queues {plan.listed()}"
            targets = Targets(self.store, plan.queues)
            targets.open(follower.plans, settings.url, settings.queues)
            with closing(follower):
                self._follow(feed, follower, targets)

    def _plan(self, feed: OpenPostgresFeed, record: PumpRecord) -> PumpPlan:
        """Return what the pump reads; make a plan if it is new."""
        self._position = record.position
        state = record.state
        if not state:
            return self._new_plan(feed, record)
        plan = PumpPlan.from_json(record.name, state)
        if plan.feed != feed.identity() or plan.together != self.settings.together:
            raise CheckpointMismatchError(
                f"the pump {self.settings.name!r} brings {plan.feed} into {plan.listed()}: give this one "
                "another name",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
                pump=self.settings.name,
            )
        return plan

    def _new_plan(self, feed: OpenPostgresFeed, record: PumpRecord) -> PumpPlan:
        settings, identity = self.settings, feed.describe().identity
        self._position = PumpPosition(feed.prepare(), 0)
        tables, publication = feed.known_tables(), feed.stream_start()
        names = queue_names(tables_by_queue(tables, settings.together is not None), settings.prefix)
        if settings.together is not None:
            names = {ALL: settings.together}
        plan = PumpPlan(identity, settings.together, names, tables, PublicationState.from_json(publication))
        text, position = json.dumps(plan.to_json()), self._position

        def begin(tx: Transaction) -> None:
            pumps.move_pump(tx, record.name, self.owner, record.position, position)
            pumps.set_pump_state(tx, record.name, self.owner, text)

        self._run(begin)
        return plan

    def _follow(self, feed: OpenPostgresFeed, follower: SlotFollower, targets: Targets) -> None:
        at = self._position
        place = PlaceInLog(at.version, at.part_version, at.part_rows)
        for step in follower.copy(place):
            self._append(targets, step)
            if self._ends():
                return
        at = self._position
        place = PlaceInLog(at.version, at.part_version, at.part_rows)
        follower.start(place, f"penstock pump {self.settings.name}")
        log.info(
            "pump %s follows slot %s from commit %d on",
            self.settings.name,
            feed.slot.name,
            at.version,
            extra={"action": "pump_follows", "pump": self.settings.name, "version": at.version},
        )
        confirmed_at = 0.0
        while not self._ends():
            received = follower.read(_WAIT)
            if received is not None:
                self._append(targets, received)
                confirmed_at = self._confirm(follower, received, confirmed_at)
            if follower.check():
                self._keep(follower)
            self.reports.warnings = tuple(feed.warnings())

    def _append(self, targets: Targets, step: Step) -> None:
        """Append the rows of a step and move the pump, in one transaction."""
        before, place = self._position, step.place
        stamps = Stamps(step.rows, before.timestamp)
        ended = place.version > 0
        continues = ended and before.part_rows > 0
        continued = Continued(before.part_version, before.timestamp) if continues else None
        after = PumpPosition(
            place.version if ended else before.version, stamps.last, place.part_version, place.part_rows
        )
        rows = targets.rows(step.rows, after.version, stamps, continued)
        if not rows:
            # Nothing of it is read, or it was appended before. Where it ends is noted with the next rows, or
            # before it is confirmed.
            return
        name = self.settings.name

        def move(tx: Transaction) -> bool:
            return pumps.move_pump(tx, name, self.owner, before, after)

        append_commits(self.store.database, rows, move)
        self._position = after
        times = {moment for each in rows for moment in zip(each.versions, each.timestamps, strict=True)}
        commits = np.array([time for _, time in times], np.int64)
        self.reports.appended(commits, sum(each.rows.num_rows for each in rows))

    def _confirm(self, follower: SlotFollower, step: Step, confirmed_at: float) -> float:
        """Let the server remove what is appended; return when that was done last.

        Where the log goes on without rows of the tables, the pump is moved first: a store that is restored
        must never be behind the slot.
        """
        follower.confirm(self._position.version + 1)
        if step.complete is not None and step.sent_at is not None:
            self.reports.caught_up(step.sent_at)
        now = time.monotonic()
        if step.complete is None or self._position.part_rows or now - confirmed_at < _CONFIRM_SECONDS:
            return confirmed_at
        before = self._position
        after = replace(before, version=max(before.version, step.complete - 1))
        if after != before:
            name = self.settings.name
            self._run(lambda tx: pumps.move_pump(tx, name, self.owner, before, after))
            self._position = after
            follower.confirm(after.version + 1)
        return now

    def _keep(self, follower: SlotFollower) -> None:
        """Keep the state of the publication."""
        publication = follower.state.to_json()

        def keep(tx: Transaction) -> None:
            record = pumps.require_owned(tx, self.settings.name, self.owner)
            text = json.dumps(record.state | {"publication": publication})
            pumps.set_pump_state(tx, record.name, self.owner, text)

        self._run(keep)

    # In a thread of its own: signs of life.

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_SECONDS):
            news = self.reports.take()
            try:
                alive = self._run(partial(self._sign, news=news))
            except PenstockError as error:
                self.reports.give_back(news)
                # What it appends is refused if another process takes over meanwhile.
                log.debug("no sign of life: %s", shown(error), extra={"action": "pump_beat_failed"})
                continue
            if not alive:
                self._lost.set()
                return

    def _sign(self, tx: Transaction, news: News) -> bool:
        if not pumps.beat_pump(tx, self.settings.name, self.owner):
            return False
        self.reports.report(tx, news)
        return True

    def _ends(self) -> bool:
        if self._lost.is_set():
            raise pumps.fenced(self.settings.name)
        return self.stopping.is_set()

    def _pause(self, seconds: float) -> None:
        self.stopping.wait(seconds)

    def _run(self, work: Callable[[Transaction], T]) -> T:
        return self.store.database.run(work, idempotent=True)
