"""Run of a pump in one process, from the stored position until the pump is stopped or fenced."""

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
from penstock.pump.reports import Reports, Unreported
from penstock.pump.targets import Targets
from penstock.queue.store import Store
from penstock.redaction import redacted_message
from penstock.store.database import Transaction
from penstock.store.records import pumps

log = logging.getLogger("penstock.pump")

T = TypeVar("T")

_READ_TIMEOUT = 0.5
"""How many seconds to wait for rows before checking whether the pump should stop."""
_BACKFILL_READ_TIMEOUT = 0.02
_REQUEST_CHECK_SECONDS = 2.0
"""How often to check for requested backfills and recoveries."""
_HEARTBEAT_SECONDS = 2.0
_MAX_PAUSE = 30.0
_END_TIMEOUT = 2.0
"""How long to retry recording that the pump has ended if the store does not answer."""
TEMPORARY_ERRORS = (ServerGone, SlotInUse, StoreUnavailableError, CommitOutcomeUnknownError)
"""Errors after which the pump retries."""


class RetryPauses:
    """Pauses between attempts while the server or the store does not answer, which get longer."""

    def __init__(self, name: str, stopping: threading.Event) -> None:
        self._name, self._stopping = name, stopping
        self._failures = 0

    def reset(self) -> None:
        """Record that the server and the store answer."""
        self._failures = 0

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return the result of ``work``; after a temporary error, wait and return None."""
        try:
            return work()
        except TEMPORARY_ERRORS as error:
            self._failures += 1
            pause = min(0.5 * 2 ** min(self._failures, 10), _MAX_PAUSE)
            log.warning(
                "pump %s tries again in %.0f s: %s",
                self._name,
                pause,
                redacted_message(error),
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
    """Run of a pump in the process that owns it."""

    settings: PumpSettings
    store: Store
    owner: str
    stopping: threading.Event
    reports: Reports
    pauses: RetryPauses

    def __post_init__(self) -> None:
        self._fenced = threading.Event()
        """Set when another process has become the owner."""
        self._finished = threading.Event()
        self._next_request_check = 0.0

    def run(self) -> None:
        """Append until the pump is stopped; wait while the server or the store does not answer.

        Raises
        ------
        PenstockError
            When a user must act, for example after a schema change that the queues do not support.
        ProducerFencedError
            When another process has taken the pump over.
        """
        self._run_transaction(self.reports.begin)
        heartbeats = threading.Thread(
            target=self._send_heartbeats, name=f"pump {self.settings.name}", daemon=True
        )
        heartbeats.start()
        failure: BaseException | None = None
        try:
            while not self._should_stop():
                self.pauses.attempt(self._run_session)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._finished.set()
            heartbeats.join(_END_TIMEOUT)
            with suppress(PenstockError):
                self.store.database.run(
                    lambda tx: self._record_end(tx, failure), idempotent=True, timeout=_END_TIMEOUT
                )

    def _record_end(self, tx: Transaction, failure: BaseException | None) -> None:
        pumps.release_pump(tx, self.settings.name, self.owner)
        self.reports.report(tx, self.reports.take())
        self.reports.end(tx, failure)

    def _run_session(self) -> None:
        """Append from the stored position, or recover, with one connection to the server."""
        # The name has the store's id, so that a pump of a copied store does not end the original's
        # connection.
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
        self.reports.sink = f"queues {plan.queue_list()}"
        readers = TableReaders(
            feed.settings,
            feed.server,
            plan.tables,
            plan.publication,
            together=plan.together is not None,
            changes=settings.schema_changes,
            backfills=backfills.table_backfills,
            left_out=planner.skipped,
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
            appender.append(step, store_position=True)
            if self._should_stop():
                return
        appender.rewind(follower.start(appender.place, recovery.application, appender.last_commit_position()))
        if follower.check():
            # Rows of a new timeline must not be mistaken for rows of the previous timeline.
            appender.store_publication_state()
        version = appender.position.version
        log.info(
            "pump %s follows slot %s from commit %d on",
            self.settings.name,
            feed.slot.name,
            version,
            extra={"action": "pump_follows", "pump": self.settings.name, "version": version},
        )
        backfills.start()
        is_recovery_requested = recovery.request() is not None
        while not self._should_stop():
            if is_recovery_requested and not appender.position.part_rows:
                recovery.decline()
                is_recovery_requested = False
            is_busy = bool(backfills.tables or deletions.tables)
            log_step = follower.read(_BACKFILL_READ_TIMEOUT if is_busy else _READ_TIMEOUT)
            if log_step is not None:
                for change in backfills.changes():
                    appender.add_state_change(change)
                appender.append(log_step)
                appender.confirm(follower, log_step, reserve_positions=is_busy)
                self.pauses.reset()
            if is_busy and not appender.position.part_rows:
                self._append_chunk(follower, appender, backfills, deletions)
                self._append_deletes(follower, appender, deletions)
            if follower.check():
                appender.store_publication_state()
            if not appender.position.part_rows and (
                follower.has_new_tables or self._has_new_requests(backfills)
            ):
                # The next session starts with the new tables.
                return
            self.reports.warnings = tuple(feed.warnings())

    def _append_chunk(
        self, follower: SlotFollower, appender: Appender, backfills: Backfills, deletions: Deletions
    ) -> None:
        """Append the next chunk of a backfill, between two commits."""
        place = follower.place
        # The position does not cover commits, or parts of a commit, whose rows are all held back. Changes
        # that are appended with the chunk must not be appended from the log again after a restart.
        if place.part_version:
            return
        version = max(appender.place.version, place.version)
        chunk = backfills.step(appender.readers, follower.reached, version)
        if chunk is None:
            return
        appender.add_state_change(chunk.change)
        appender.append(chunk.step, store_position=True)
        if chunk.progress is None:
            deletions.add(chunk.table)
            log.info(
                "pump %s has backfilled %s",
                self.settings.name,
                chunk.table,
                extra={"action": "backfill_complete", "pump": self.settings.name, "table": chunk.table},
            )

    def _append_deletes(self, follower: SlotFollower, appender: Appender, deletions: Deletions) -> None:
        """Append the next deletes of a recovery, between two commits."""
        deletes = deletions.step(appender.readers, follower.reached, appender.place.version)
        if deletes is None:
            return
        if deletes.change is not None:
            appender.add_state_change(deletes.change)
        appender.append(deletes.step, store_position=True)

    def _has_new_requests(self, backfills: Backfills) -> bool:
        """Return whether a backfill or recovery was requested; check this every few seconds."""
        now = time.monotonic()
        if now < self._next_request_check:
            return False
        self._next_request_check = now + _REQUEST_CHECK_SECONDS
        record = self.store.database.run(
            lambda tx: pumps.require_owned(tx, self.settings.name, self.owner), write=False
        )
        requested = backfills_of(record.name, record.state)
        if RecoveryRequest.of(record.name, record.state) is not None:
            return True
        return any(
            backfill.started_at != backfills.requested_at.get(table) for table, backfill in requested.items()
        )

    # Heartbeats, in their own thread.

    def _send_heartbeats(self) -> None:
        while not self._finished.wait(_HEARTBEAT_SECONDS):
            unreported = self.reports.take()
            try:
                is_owner = self._run_transaction(partial(self._record_heartbeat, unreported=unreported))
            except Exception as error:
                self.reports.give_back(unreported)
                # If another process takes over meanwhile, the next append is refused.
                log.debug(
                    "the heartbeat failed: %s", redacted_message(error), extra={"action": "pump_beat_failed"}
                )
                continue
            if not is_owner:
                self._fenced.set()
                return

    def _record_heartbeat(self, tx: Transaction, unreported: Unreported) -> bool:
        if not pumps.send_heartbeat(tx, self.settings.name, self.owner):
            return False
        self.reports.report(tx, unreported)
        return True

    def _should_stop(self) -> bool:
        if self._fenced.is_set():
            raise pumps.pump_fenced_error(self.settings.name)
        return self.stopping.is_set()

    def _run_transaction(self, work: Callable[[Transaction], T]) -> T:
        return self.store.database.run(work, idempotent=True)
