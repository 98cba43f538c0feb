"""One process's turn at a pump: from the position in the store on, until it is stopped or loses the pump."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.arguments import in_quotes
from penstock.errors import (
    CheckpointMismatchError,
    CommitOutcomeUnknownError,
    InvalidInputError,
    PenstockError,
    StoreUnavailableError,
    condition_of,
)
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.catalog import Tables
from penstock.feeds.postgres.feed import OpenPostgresFeed
from penstock.feeds.postgres.following import SlotFollower
from penstock.feeds.postgres.publication import PublicationState
from penstock.feeds.postgres.server import ServerGone, SlotInUse
from penstock.feeds.postgres.table_readers import ALL, TableReaders, tables_by_queue
from penstock.pump.appender import Appender
from penstock.pump.plan import PumpPlan
from penstock.pump.reports import News, Reports
from penstock.pump.targets import QueueSettings, Targets, create_queues, queue_names
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
_LONGEST_PAUSE = 30.0
_END_SECONDS = 2.0
"""For how long a store that does not answer is asked to note that a pump has ended."""
AWAY = (ServerGone, SlotInUse, StoreUnavailableError, CommitOutcomeUnknownError)
"""Errors that pass."""


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
    """One of ``table_readers.CHANGES``."""
    queues: QueueSettings


class Waits:
    """Pauses while a server or a store does not answer: longer ones after each failure."""

    def __init__(self, name: str, stopping: threading.Event) -> None:
        self._name, self._stopping = name, stopping
        self._failures = 0

    def reset(self) -> None:
        """Note that everything answers."""
        self._failures = 0

    def repeated(self, work: Callable[[], T]) -> T | None:
        """Return what work returns; None after a failure that passes, and a pause."""
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
        """Append from the stored position on, on one connection to the server."""
        settings = self.settings
        with closing(settings.feed.open()) as feed:
            record = self._run(lambda tx: pumps.require_owned(tx, settings.name, self.owner))
            plan, position = self._plan(feed, record)
            self.reports.sink = f"queues {plan.listed()}"
            readers = TableReaders(
                feed.settings,
                feed.server,
                plan.tables,
                plan.publication,
                together=plan.together is not None,
                changes=settings.schema_changes,
            )
            targets = Targets.opened(self.store, plan.queues, readers.names)
            follower = SlotFollower(feed, readers)
            database = self.store.database
            appender = Appender(database, settings.name, self.owner, position, targets, readers, self.reports)
            with closing(follower):
                self._follow(feed, follower, appender)

    def _plan(self, feed: OpenPostgresFeed, record: PumpRecord) -> tuple[PumpPlan, PumpPosition]:
        """Return what the pump reads and how far it is; make a plan if it is new."""
        state = record.state
        if not state:
            return self._new_plan(feed, record)
        plan, settings = PumpPlan.from_json(record.name, state), self.settings
        names = list(tables_by_queue(plan.tables, settings.together is not None))
        same = plan.together == settings.together and plan.prefix == settings.prefix
        if plan.feed != feed.identity() or not same or set(names) - set(plan.queues):
            raise CheckpointMismatchError(
                f"the pump {settings.name!r} brings {plan.feed} into {plan.listed()}: start it with the same "
                "feed, queue and prefix, or give this one another name",
                condition="CHECKPOINT_MISMATCH.OTHER_SOURCE",
                pump=settings.name,
            )
        return plan, record.position

    def _new_plan(self, feed: OpenPostgresFeed, record: PumpRecord) -> tuple[PumpPlan, PumpPosition]:
        """Create the slot and the queues, and store the plan when all of it is there."""
        settings, identity = self.settings, feed.describe().identity
        names = self._queue_names(feed.known_tables())
        position = PumpPosition(feed.prepare(), 0)
        tables, publication = feed.known_tables(), PublicationState.from_json(feed.stream_start())
        plans = tables_by_queue(tables, settings.together is not None)
        create_queues(self.store, names, plans, settings.url, settings.queues)
        plan = PumpPlan(identity, settings.together, settings.prefix, names, tables, publication)
        text = json.dumps(plan.to_json())

        def begin(tx: Transaction) -> None:
            pumps.move_pump(tx, record.name, self.owner, record.position, position)
            pumps.set_pump_state(tx, record.name, self.owner, text)

        self._run(begin)
        return plan, position

    def _queue_names(self, tables: Tables) -> dict[str, str]:
        """Return the queues by table; refuse two tables with one."""
        settings = self.settings
        if settings.together is not None:
            return {ALL: settings.together}
        names = queue_names(tables_by_queue(tables, together=False), settings.prefix)
        by_queue: dict[str, str] = {}
        for table, queue in names.items():
            other = by_queue.setdefault(queue, table)
            if other != table:
                raise InvalidInputError(
                    f"the tables {in_quotes(other)} and {in_quotes(table)} would have one queue, "
                    f"{in_quotes(queue)}: read them with two pumps, each with tables=[…] and a slot and a "
                    "prefix of its own",
                    condition="INVALID_INPUT.QUEUE_OF_TWO_TABLES",
                    queue=queue,
                )
        return names

    def _follow(self, feed: OpenPostgresFeed, follower: SlotFollower, appender: Appender) -> None:
        for step in follower.copy(appender.place):
            appender.append(step, note=True)
            if self._ends():
                return
        version = appender.position.version
        store = self.store.uuid[:8]
        # With the store's id: the copy of a store must not end the original's connection.
        follower.start(appender.place, f"penstock pump {store} {self.settings.name}")
        log.info(
            "pump %s follows slot %s from commit %d on",
            self.settings.name,
            feed.slot.name,
            version,
            extra={"action": "pump_follows", "pump": self.settings.name, "version": version},
        )
        while not self._ends():
            received = follower.read(_WAIT)
            if received is not None:
                appender.append(received)
                appender.confirm(follower, received)
                self.waits.reset()
            if follower.check():
                appender.keep_state()
            self.reports.warnings = tuple(feed.warnings())

    # In a thread of its own: signs of life.

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_SECONDS):
            news = self.reports.take()
            try:
                alive = self._run(partial(self._sign, news=news))
            except Exception as error:
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

    def _run(self, work: Callable[[Transaction], T]) -> T:
        return self.store.database.run(work, idempotent=True)
