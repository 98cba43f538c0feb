"""``Pump``: the changes of a PostgreSQL publication in queues, without Spark."""

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
from penstock.pump.run import PumpRun, Waits
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
    """What a pump has done since its process took it over."""

    active: bool
    """False while another process runs the pump, and this one waits to take it over."""
    commits: int
    rows: int
    finalized_until: datetime | None
    """Every commit of the tables before this time, by the server's clock, is in the queues; None if that is
    not known.
    """


class Pump:
    """Moves the changes of the tables of a PostgreSQL publication into queues, without Spark.

    The pump reads a replication slot and appends each commit to the queues of its tables, in one transaction
    of the store that also has the position in the WAL. So no row is lost or repeated when a process or a
    server dies, and the server can remove its WAL, however long Spark is down. A new pump first copies the
    rows that are there (see ``snapshot`` of :class:`PostgresFeed`).

    Each table has a queue of its own, a change feed, which :class:`QueueFeed` reads. A queue that is missing
    is created. Other programs may not append to it.

    One process runs a pump at a time. Others that are started with the same store and name wait, and one of
    them takes over when that one ends, or has sent no heartbeat for 6 seconds.

    Parameters
    ----------
    feed
        The feed, or its URL.
    store
        The URL of the store; it is created if it does not exist.
    queue
        The queue for the rows of all tables, in one form; by default, each table has a queue.
    prefix
        What the names of the queues begin with. A table of the schema ``public`` has the queue of its name,
        another one that of its schema and name, as in ``sales.orders``.
    schema_changes
        What to do when a table gets or loses columns, or the publication gets a table. ``refuse``: end before
        the first commit with such rows. ``evolve``: the queue gets new columns and wider types, and columns
        that are gone are NULL from then on; a new table gets a queue with all of its rows, which are read
        while the pump follows the others (a backfill), and is left out, with a warning, while it has no key.
        ``ignore``: new columns and tables are left out. Columns that are renamed, that get any other type, or
        that leave the key are always refused, and so are such changes of a table without a key, or where one
        queue has the rows of all tables.
    partitions
        The partitions of each queue that is created.
    retention
        How many rows each queue that is created keeps; everything by default.
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

        A server or a store that does not answer is waited for.

        Raises
        ------
        FeedUnavailableError
            When the server refuses, or a table has changed in a way that its queue cannot follow.
        DataLostError
            When the server does not have all that the pump has read, or has removed log that it has not read:
            `penstock pump recover` has it create a new slot and read all rows again.
        CheckpointMismatchError
            When the feed is another one than that of the queues, or on another server.
        ProducerFencedError
            When another process has taken the pump over, as after this one was suspended.
        PumpNotFoundError
            When the pump was removed from the store.
        StoreError
        """
        if not self._running.acquire(blocking=False):
            raise InvalidInputError(f"pump {self.name!r} runs already in this process")
        waits = Waits(self.name, self._stopping)
        try:
            while not self._stopping.is_set() and not waits.repeated(lambda: self._attempt(waits)):
                pass
        finally:
            self._reports = None
            self._running.release()

    def stop(self) -> None:
        """End :meth:`run` when what it is appending is safe; for another thread, or a signal handler.

        A pump that was stopped is not run again: make another one.
        """
        self._stopping.set()

    def status(self) -> PumpStatus:
        """Return what the pump has done since this process took it over."""
        reports = self._reports
        if reports is None:
            return PumpStatus(False, 0, 0, None)
        totals = reports.totals
        until = totals.finalized_until
        moment = None if until is None else moment_of(until)
        return PumpStatus(True, totals.commits, totals.rows, moment)

    def _attempt(self, waits: Waits) -> bool:
        """Run the pump; return True when it was stopped."""
        with closing(connect(self._settings.url)) as store:
            self._run(store, waits)
        return True

    def _run(self, store: Store, waits: Waits) -> None:
        store.database.run(lambda tx: pumps.create_pump(tx, self.name, _NEW, "{}"), idempotent=True)
        owner = str(uuid.uuid4())
        if not self._own(store, owner):
            return
        reports = Reports(store.uuid, self.name, owner, self._settings.feed.name)
        run = PumpRun(self._settings, store, owner, self._stopping, reports, waits)
        self._reports = reports
        log.info("pump %s starts", self.name, extra={"action": "pump_started", "pump": self.name})
        run.all()
        log.info("pump %s has stopped", self.name, extra={"action": "pump_stopped", "pump": self.name})

    def _own(self, store: Store, owner: str) -> bool:
        """Wait until nobody else runs the pump; False if it is stopped before."""
        waits = False

        def own(tx: Transaction) -> bool:
            record = _require(pumps.find_pump(tx, self.name), self.name)
            # An attempt whose outcome was unknown may have succeeded.
            return record.owner == owner or (
                not record.is_alive(tx.now()) and pumps.acquire_pump(tx, record, owner)
            )

        while not self._stopping.is_set():
            if store.database.run(own, idempotent=True):
                return True
            if not waits:
                waits = True
                log.info(
                    "pump %s runs in another process: this one takes over when that one ends",
                    self.name,
                    extra={"action": "pump_stands_by", "pump": self.name},
                )
            self._stopping.wait(_STANDBY_SECONDS)
        return False


def _require(record: PumpRecord | None, name: str) -> PumpRecord:
    if record is None:
        raise pumps.pump_removed_error(name)
    return record
