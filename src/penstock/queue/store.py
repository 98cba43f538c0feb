"""Stores with their queues, consumers and producers. ``connect`` opens a store, and ``open_store`` opens it
once per process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from penstock.arguments import column_names, path_text, require
from penstock.arrow.key_hash import check_key
from penstock.arrow.schema import canonical_schema
from penstock.errors import (
    ConsumerInUseError,
    InvalidInputError,
    PenstockError,
    StoreError,
    condition_of,
)
from penstock.objects.location import parse_location, stored_location
from penstock.queue.checks import check_name
from penstock.queue.consumer import Consumer
from penstock.queue.maintenance import (
    STAGING_AGE,
    Maintainer,
    Retention,
    clean_ledger,
    clean_objects,
    clean_staging,
    limits_of,
)
from penstock.queue.producer import Producer
from penstock.queue.queue import Queue
from penstock.redaction import redacted_message
from penstock.store.database import RETRY_SECONDS, Database, Transaction
from penstock.store.forks import ForkSafeLock
from penstock.store.log import object_check, object_owner
from penstock.store.log.object_check import ObjectsCheck
from penstock.store.records import catalog, consumers
from penstock.store.records.consumers import Registration
from penstock.store.records.locations import require_same_store
from penstock.store.sqlite.database import file_identity
from penstock.store.store_schema import VERSION, open_database
from penstock.store.url import StoreUrl, parse_url

log = logging.getLogger("penstock.queue")

CONNECT_TIMEOUT = 2.0
IN_DATABASE = "database"
"""The location of payloads in the store's own database."""


@dataclass(frozen=True)
class StoreInfo:
    """A store's size."""

    url: str
    uuid: str
    version: int
    queues: int
    consumers: int
    rows: int
    bytes: int
    commits: int
    staged_segments: int
    staged_bytes: int


class Store:
    """A database with queues and consumers. It is safe to use from several threads. Get one from
    ``connect``.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.maintainer = Maintainer(database)

    @property
    def uuid(self) -> str:
        """The store's UUID, which is the same for every URL of the store."""
        return self._database.uuid

    @property
    def url(self) -> str:
        """The store's URL without its password."""
        return str(self._database.url)

    @property
    def database(self) -> Database:
        return self._database

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish pending maintenance and close the connections."""
        self.maintainer.close()
        self._database.close()

    def create_queue(
        self,
        name: str,
        schema: object,
        *,
        partitions: int = 1,
        key: Sequence[str] = (),
        retention: Retention | None = None,
        contract: str | None = None,
        payloads: str | os.PathLike[str] | None = None,
    ) -> Queue:
        """Create a queue.

        Parameters
        ----------
        name
            Any Unicode text of 1 to 255 characters.
        schema
            A ``pyarrow.Schema`` or a PySpark ``StructType``.
        partitions
            The number of partitions, 1 to 10,000. Rows are in order within a partition.
        key
            The key columns. Rows with equal keys share a partition.
        retention
            Which rows to keep; by default, all rows.
        contract
            The contract of a change feed, as JSON: see ``QueueFeed.create``.
        payloads
            Where to keep the rows of appends of at least 64 KiB compressed: ``s3://bucket/prefix``,
            ``gs://bucket/prefix``, ``az://container/prefix``, a folder, or ``database``, which is the store's
            own database. Each process that appends or reads takes the credentials from its environment.
            :meth:`set_payloads` sets the default.

        Raises
        ------
        AlreadyExistsError, UnsupportedTypeError, SchemaMismatchError, InvalidNameError, InvalidInputError
        InvalidUrlError, MissingDependencyError, StoreUnavailableError, StoreReadOnlyError
            When the payloads cannot be kept there.
        """
        check_name("queue", name)
        if type(partitions) is not int or not 1 <= partitions <= catalog.MAX_PARTITIONS:
            raise InvalidInputError(
                f"a queue has 1 to {catalog.MAX_PARTITIONS} partitions, not {partitions!r}"
            )
        canonical = canonical_schema(schema)
        columns = column_names("key", key)
        if columns:
            check_key(canonical, columns)
        limits = limits_of(Retention() if retention is None else retention)
        location = self._location(payloads)

        def create(tx: Transaction) -> catalog.QueueRecord:
            require_same_store(tx, self.uuid)
            return catalog.create_queue(
                tx,
                name,
                canonical,
                partitions=partitions,
                key=columns,
                retention=limits,
                contract=contract,
                payloads=location,
            )

        record = self._database.run(create)
        log.info(
            "queue %r is created, with %d partitions",
            name,
            partitions,
            extra={"action": "queue_created", "queue": name, "partitions": partitions},
        )
        return self._queue(record)

    def _location(self, payloads: str | os.PathLike[str] | None) -> str | None:
        """Check that a location for a new queue's payloads is usable, and return it."""
        if payloads == IN_DATABASE:
            return None
        if payloads is not None:
            location = parse_location(payloads)
        else:
            default = self._database.run(lambda tx: tx.one("read_store"), write=False).payloads
            if default is None:
                return None
            location = stored_location(default)
        storage = self._database.storages.at(location)
        object_owner.claim(self._database, storage)
        return location

    def set_payloads(self, location: str | os.PathLike[str]) -> None:
        """Set where queues that are created from now on keep the rows of large appends.

        Parameters
        ----------
        location
            Like ``payloads`` of :meth:`create_queue`. In a new store it is ``database``.

        Raises
        ------
        InvalidUrlError, MissingDependencyError, StoreUnavailableError, StoreReadOnlyError
            When the payloads cannot be kept there.
        """
        url = self._location(path_text("location", location))

        def set_location(tx: Transaction) -> None:
            require_same_store(tx, self.uuid)
            tx.run("set_store_payloads", payloads=url)

        self._database.run(set_location, idempotent=True)
        log.info(
            "new queues keep large payloads in %s",
            url or "the database",
            extra={"action": "payloads_set", "storage": url},
        )

    def queue(self, name: str) -> Queue:
        """Return an existing queue.

        Parameters
        ----------
        name
            The queue's name.

        Raises
        ------
        QueueNotFoundError
        """
        check_name("queue", name)
        return self._queue(self._database.run(lambda tx: catalog.find_queue(tx, name), write=False))

    def queues(self) -> list[str]:
        """Return the names of all queues."""
        return [record.name for record in self._database.run(catalog.list_queues, write=False)]

    def drop_queue(self, name: str, *, force: bool = False) -> None:
        """Drop a queue and its rows and offsets.

        Parameters
        ----------
        name
            The queue's name.
        force
            Whether to drop it even if a vital consumer is registered.

        Raises
        ------
        QueueNotFoundError
        ConsumerInUseError
            When a running query owns one of its consumers, or, without ``force``, a vital consumer is
            registered.
        """
        check_name("queue", name)

        def work(tx: Transaction) -> None:
            record = catalog.find_queue(tx, name, lock=True)
            for registration in consumers.registrations_of(tx, record):
                self._refuse_drop(tx, record, registration, force)
            catalog.drop_queue(tx, record)

        self._database.run(work)
        log.info("queue %r is dropped", name, extra={"action": "queue_dropped", "queue": name})

    def _refuse_drop(
        self, tx: Transaction, record: catalog.QueueRecord, registration: Registration, force: bool
    ) -> None:
        if tx.owner_alive(registration.lock_name(self.uuid)):
            raise ConsumerInUseError(
                f"a running query reads queue {record.name!r} through consumer {registration.consumer!r}: "
                "stop the query first",
                condition="CONSUMER_IN_USE.RUNNING_QUERY",
            )
        if registration.vital and not force:
            raise ConsumerInUseError(
                f"queue {record.name!r} has the vital consumer {registration.consumer!r}: "
                "unregister it, or drop with force",
                condition="CONSUMER_IN_USE.VITAL",
            )

    def _queue(self, record: catalog.QueueRecord) -> Queue:
        return Queue(self._database, record, self.maintainer)

    def create_consumer(self, name: str) -> Consumer:
        """Create a consumer. Register it on queues next.

        Parameters
        ----------
        name
            Any Unicode text of 1 to 255 characters.

        Raises
        ------
        AlreadyExistsError, InvalidNameError
        """
        check_name("consumer", name)
        self._database.run(lambda tx: consumers.create_consumer(tx, name))
        log.info("consumer %r is created", name, extra={"action": "consumer_created", "consumer": name})
        return self._consumer(name)

    def consumer(self, name: str) -> Consumer:
        """Return an existing consumer.

        Parameters
        ----------
        name
            The consumer's name.

        Raises
        ------
        ConsumerNotFoundError
        """
        check_name("consumer", name)
        self._database.run(lambda tx: consumers.find_consumer(tx, name), write=False)
        return self._consumer(name)

    def consumers(self) -> list[str]:
        """Return the names of all consumers."""
        return self._database.run(consumers.list_consumers, write=False)

    def registrations(self) -> list[Registration]:
        """Return all registrations of all consumers."""
        return self._database.run(consumers.list_registrations, write=False)

    def drop_consumer(self, name: str) -> None:
        """Drop a consumer and its offsets.

        Parameters
        ----------
        name
            The consumer's name.

        Raises
        ------
        ConsumerInUseError
            When a running query owns the consumer.
        ConsumerNotFoundError
        """
        check_name("consumer", name)

        def work(tx: Transaction) -> None:
            for registration in consumers.list_registrations(tx):
                if registration.consumer == name and tx.owner_alive(registration.lock_name(self.uuid)):
                    raise ConsumerInUseError(
                        f"a running query on queue {registration.queue!r} owns consumer {name!r}: "
                        "stop the query first",
                        condition="CONSUMER_IN_USE.RUNNING_QUERY",
                    )
            consumers.drop_consumer(tx, name)

        self._database.run(work)
        log.info("consumer %r is dropped", name, extra={"action": "consumer_dropped", "consumer": name})

    def _consumer(self, name: str) -> Consumer:
        return Consumer(self._database, name, self.maintainer)

    def producer(self, queue: str, session: str) -> Producer:
        """Open a producer session. Programs that opened it earlier can no longer append.

        Parameters
        ----------
        queue
            The queue's name.
        session
            The session's name, which must be the same in each run of the program, for example the program's
            name and instance number.

        Raises
        ------
        QueueNotFoundError
        """
        check_name("producer session", session)
        return Producer(self._database, self.queue(queue), session)

    def schedule_maintenance(self, queue: catalog.QueueRecord, to_compact: Iterable[int]) -> None:
        """Schedule the compaction of a queue's partitions with many small segments and the deletion of its
        old rows.
        """
        self.maintainer.after_change(queue, to_compact)

    def maintain(self) -> None:
        """Run all maintenance now: compact small segments, apply retentions, and clean up old staged rows,
        ledger entries and objects.

        The ledger loses the entries of dropped queues. Of queries that have not committed for 30 days it
        keeps only the newest entries.
        """
        errors: list[PenstockError] = []
        for name in self.queues():
            try:
                self.queue(name).maintain()
            except PenstockError as error:
                # The unreadable record of one queue does not stop the maintenance of the others.
                log.warning(
                    "maintenance of queue %r failed: %s",
                    name,
                    redacted_message(error),
                    extra={"action": "maintenance_failed", "queue": name, "error": condition_of(error)},
                )
                errors.append(error)
        self.clean_up()
        clean_ledger(self._database)
        try:
            self.clean_up_objects()
        except StoreError as error:
            errors.append(error)
        if errors:
            raise errors[0]

    def clean_up(self, older_than: timedelta = STAGING_AGE) -> int:
        """Delete the rows that dead tasks have staged, and return the number of deleted segments.

        Background maintenance also deletes staged rows older than a day, at most once an hour. Staged rows of
        running queries are kept. A query counts as running if it owns a consumer of this store and has
        committed a micro-batch, or if it has staged rows within the last day. If the staged rows of a commit
        were deleted, the commit is refused, and none of its rows are visible. A query then repeats the
        micro-batch. You must run a batch write again.

        Parameters
        ----------
        older_than
            The minimum age of the staged rows to delete.
        """
        require("older_than", older_than, timedelta, "a timedelta")
        return clean_staging(self._database, older_than)

    def clean_up_objects(self, *, take_over: bool = False) -> int:
        """Delete objects that have had no rows for a day, of queues with ``payloads``; return how many.

        Compaction, retention and dropped queues leave such objects behind, and so do processes that died
        before their rows were appended. Background maintenance also deletes them, about once an hour.

        Parameters
        ----------
        take_over
            Whether to delete objects even if another copy of this store has deleted some. Only one copy may
            delete objects. After restoring a backup, pass True to make this copy the one to keep.

        Raises
        ------
        StoreError
            When another copy of the store has cleaned up since this copy was made.
        StoreUnavailableError, StoreReadOnlyError
        """
        return clean_objects(self._database, take_over=take_over).objects

    def check_objects(self, *, read: bool = False) -> list[ObjectsCheck]:
        """Compare the objects of queues with ``payloads`` with the store's records, queue by queue.

        If a queue's objects cannot be listed or read, the result for that queue has the reason in ``error``.

        Parameters
        ----------
        read
            Whether to read the rows in all objects, too, and to compare their checksums.
        """
        return object_check.check_objects(self._database, read=read)

    def info(self) -> StoreInfo:
        """Return the store's size."""

        def work(tx: Transaction) -> StoreInfo:
            totals = tx.one("store_totals")
            staged = tx.all("staged_apps")
            return StoreInfo(
                url=self.url,
                uuid=self.uuid,
                version=VERSION,
                queues=len(tx.all("list_queues")),
                consumers=len(consumers.list_consumers(tx)),
                rows=int(totals.row_count),
                bytes=int(totals.bytes),
                commits=tx.one("count_ledger").commits,
                staged_segments=sum(app.segments for app in staged),
                staged_bytes=sum(int(app.bytes) for app in staged),
            )

        return self._database.run(work, write=False)


def connect(url: str, *, create: bool = True, timeout: float = CONNECT_TIMEOUT) -> Store:
    """Open a store. By default, create it if it does not exist.

    Parameters
    ----------
    url
        ``sqlite:///relative.db``, ``sqlite:////absolute.db``, or
        ``postgresql://user@host/database?schema=penstock``. A new SQLite file is readable by its owner
        only, unless the URL has another mode: ``?mode=0640``.
    create
        Whether to create the store if it does not exist. If False, raise an error.
    timeout
        How many seconds to retry if the database does not respond. Once the store is open, each operation is
        retried for 20 seconds.

    Raises
    ------
    InvalidUrlError, MissingDependencyError, StoreNotFoundError, StoreTooNewError, StoreUnavailableError,
    StoreReadOnlyError, StoreUnsafeError
    """
    require("timeout", timeout, float | int, "a number of seconds")
    return Store(open_database(url, create=create, timeout=timeout))


@dataclass(frozen=True)
class _OpenStore:
    store: Store
    file: tuple[int, int] | None


_open: dict[tuple[str, int], _OpenStore] = {}
_guard = ForkSafeLock()


def open_store(url: str, *, verify: bool = False) -> Store:
    """Return the store at a URL, which each process opens only once.

    ``verify`` checks that the database still holds the same store. Spark reuses its Python workers, and the
    store may have been dropped and recreated since the last use.
    """
    # A forked worker must not share its parent's connections.
    cache_key = (url, os.getpid())
    with _guard:
        opened = _open.get(cache_key)
        if opened is not None and not _is_same_store(opened, url, verify):
            opened.store.close()
            opened = None
        if opened is None:
            store = connect(url, create=False, timeout=RETRY_SECONDS)
            opened = _open[cache_key] = _OpenStore(store, _file(parse_url(url)))
        return opened.store


def _is_same_store(opened: _OpenStore, url: str, verify: bool) -> bool:
    # Tasks call this for every read and write, so it must be cheap.
    if opened.store.database.dialect == "sqlite":
        return opened.file == _file(parse_url(url))
    if not verify:
        return True
    try:
        row = opened.store.database.run(lambda tx: tx.one("read_store"), write=False)
    except StoreError:
        return False
    return row is not None and row.uuid == opened.store.uuid


def _file(url: StoreUrl) -> tuple[int, int] | None:
    return file_identity(url.target) if url.dialect == "sqlite" else None
