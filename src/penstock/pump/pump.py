"""``Pump``: copies the changes of a PostgreSQL publication to queues, without Spark."""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime

from penstock.arguments import refusal, require
from penstock.errors import InvalidInputError
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.table_readers import CHANGES, REFUSE
from penstock.instants import moment_of
from penstock.pump.planning import PumpSettings
from penstock.pump.reports import Reports
from penstock.pump.run import PumpRun, RetryPauses
from penstock.pump.targets import QueueSettings
from penstock.queue.checks import check_name
from penstock.queue.maintenance import Retention
from penstock.queue.store import Store, connect
from penstock.store.database import Transaction
from penstock.store.records import pumps
from penstock.store.records.pumps import PumpPosition, PumpRecord

log = logging.getLogger("penstock.pump")

_STANDBY_SECONDS = 1.0
_NEW = PumpPosition(0, 0)


@dataclass(frozen=True)
class PumpStatus:
    """Status of a pump since this process took it over."""

    active: bool
    """False while another process runs the pump and this one waits to take it over."""
    commits: int
    rows: int
    finalized_until: datetime | None
    """All commits of the tables before this time of the server's clock are in the queues; None if unknown."""


class Pump:
    """Copies the changes of the tables of a PostgreSQL publication to queues, without Spark.

    The pump reads a replication slot and appends each commit to the queues of its tables, in one transaction
    of the store that also stores the WAL position. So no row is lost or repeated when a process or a server
    dies, and the server can remove its WAL however long Spark is down. A new pump first copies the existing
    rows (see ``snapshot`` of :class:`PostgresFeed`).

    Each table has its own queue, a change feed that :class:`QueueFeed` reads. Missing queues are created.
    Other programs must not append to them.

    One process runs a pump at a time. Other processes with the same store and name wait, and one of them
    takes over when the running one ends, or has sent no heartbeat for 6 seconds.

    Parameters
    ----------
    feed
        The feed, or its URL.
    store
        The URL of the store; it is created if it does not exist.
    queue
        One queue for the rows of all tables; by default, each table has its own queue.
    prefix
        The prefix of the queues' names. The queue of a table in the schema ``public`` has the name of the
        table; for other schemas it includes the schema, as in ``sales.orders``.
    schema_changes
        What to do when columns are added to a table or dropped, or a table is added to the publication.
        ``refuse``: end before the first commit with such rows. ``evolve``: the queue gets new columns and
        wider types, and dropped columns are NULL from then on; a new table gets a queue with all of its rows,
        which are read while the pump follows the other tables (a backfill). A new table without a key is
        skipped with a warning. ``ignore``: new columns and tables are not read. Renamed columns, any other
        type, and columns that are removed from the key are always refused, and so are all these changes of a
        table without a key, or if one queue has the rows of all tables.
    partitions
        The number of partitions of each created queue.
    retention
        The retention of each created queue; by default all rows are kept.
    name
        The pump's name in the store; by default that of the slot.

    Raises
    ------
    InvalidUrlError, InvalidNameError, InvalidInputError, MissingDependencyError
    """

    def __init__(
        self,
        feed: PostgresFeed | str,
        store: str,
        *,
        queue: str | None = None,
        prefix: str = "",
        schema_changes: str = REFUSE,
        partitions: int = 1,
        retention: Retention | None = None,
        name: str | None = None,
    ) -> None:
        require("feed", feed, PostgresFeed | str, "a PostgresFeed, or its URL")
        require("store", store, str, "the URL of a store, such as 'sqlite:///shop.db'")
        require("prefix", prefix, str, "text")
        if queue is not None:
            check_name("queue", queue)
            if prefix:
                raise InvalidInputError("a prefix is for a queue for each table: leave it out, or the queue")
        if schema_changes not in CHANGES:
            raise refusal("schema_changes", schema_changes, f"one of {', '.join(CHANGES)}")
        feed = PostgresFeed(feed) if isinstance(feed, str) else feed
        self.name = check_name("pump", feed.slot if name is None else name)
        self._settings = PumpSettings(
            self.name, feed, store, queue, prefix, schema_changes, QueueSettings(partitions, retention)
        )
        self._stopping = threading.Event()
        self._running = threading.Lock()
        self._reports: Reports | None = None

    def run(self) -> None:
        """Append changes until :meth:`stop` is called; first wait while another process runs the pump.

        If the server or the store does not answer, the pump waits and retries.

        Raises
        ------
        FeedUnavailableError
            When the server refuses, or a table was changed in a way that its queue does not support.
        DataLostError
            When the server lacks changes that the pump has read, or has removed log that the pump has not
            read: after `penstock pump recover`, the pump creates a new slot and reads all rows again.
        CheckpointMismatchError
            When the feed differs from the feed of the queues, or is on another server.
        ProducerFencedError
            When another process has taken the pump over, for example after this one was suspended.
        PumpNotFoundError
            When the pump was removed from the store.
        StoreError
        """
        if not self._running.acquire(blocking=False):
            raise InvalidInputError(f"pump {self.name!r} is already running in this process")
        pauses = RetryPauses(self.name, self._stopping)
        try:
            while not self._stopping.is_set() and not pauses.attempt(lambda: self._attempt(pauses)):
                pass
        finally:
            self._reports = None
            self._running.release()

    def stop(self) -> None:
        """End :meth:`run` after the append in progress; for another thread or a signal handler.

        A stopped pump cannot be run again: create another one.
        """
        self._stopping.set()

    def status(self) -> PumpStatus:
        """Return the status of the pump since this process took it over."""
        reports = self._reports
        if reports is None:
            return PumpStatus(False, 0, 0, None)
        totals = reports.totals
        until = totals.finalized_until
        moment = None if until is None else moment_of(until)
        return PumpStatus(True, totals.commits, totals.rows, moment)

    def _attempt(self, pauses: RetryPauses) -> bool:
        """Run the pump; return True when it was stopped."""
        with closing(connect(self._settings.url)) as store:
            self._run(store, pauses)
        return True

    def _run(self, store: Store, pauses: RetryPauses) -> None:
        store.database.run(lambda tx: pumps.create_pump(tx, self.name, _NEW, "{}"), idempotent=True)
        owner = str(uuid.uuid4())
        if not self._take_over(store, owner):
            return
        reports = Reports(store.uuid, self.name, owner, self._settings.feed.name)
        pump_run = PumpRun(self._settings, store, owner, self._stopping, reports, pauses)
        self._reports = reports
        log.info("pump %s starts", self.name, extra={"action": "pump_started", "pump": self.name})
        pump_run.run()
        log.info("pump %s has stopped", self.name, extra={"action": "pump_stopped", "pump": self.name})

    def _take_over(self, store: Store, owner: str) -> bool:
        """Wait until no other process runs the pump, and become its owner; return False if stopped first."""
        is_standing_by = False

        def try_to_own(tx: Transaction) -> bool:
            record = _require_pump(pumps.find_pump(tx, self.name), self.name)
            # This process is the owner if an earlier attempt, whose outcome was unknown, succeeded.
            return record.owner == owner or (
                not record.is_alive(tx.now()) and pumps.acquire_pump(tx, record, owner)
            )

        while not self._stopping.is_set():
            if store.database.run(try_to_own, idempotent=True):
                return True
            if not is_standing_by:
                is_standing_by = True
                log.info(
                    "pump %s runs in another process: this one takes over when that one ends",
                    self.name,
                    extra={"action": "pump_stands_by", "pump": self.name},
                )
            self._stopping.wait(_STANDBY_SECONDS)
        return False


def _require_pump(record: PumpRecord | None, name: str) -> PumpRecord:
    if record is None:
        raise pumps.pump_removed_error(name)
    return record
