"""Instants as the page gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.instants import moment_of, moment_text
from penstock.store.database import Database, Transaction
from penstock.store.records import catalog, queries
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.consumers import owner_name
from penstock.store.store_schema import open_database, require_version


def iso(micros: int | None) -> str | None:
    """An instant (microseconds since 1970) as ISO 8601 with Z, in milliseconds."""
    return None if micros is None else moment_text(moment_of(int(micros)), "milliseconds")


def seconds(earlier: int | None, later: int) -> float | None:
    """Seconds between two instants, 0 where the first is the later one."""
    return None if earlier is None else round(max(later - earlier, 0) / 1e6, 3)


# ---- reading: The store at one moment, in a few statements however many queues and consumers there are.

COMMITS = 50
PATIENCE = 2.0


@dataclass(frozen=True)
class Seen:
    """What one transaction has read; rows are as their statements give them.

    Parameters
    ----------
    now
        Microseconds since 1970, by the store's clock.
    owned
        Consumer and queue ids of the registrations that a living process owns.
    progress
        That which was told since the moment that was asked for.
    """

    uuid: str
    now: int
    queues: tuple[QueueRecord, ...]
    partitions: list[Any]
    registrations: list[Any]
    positions: list[Any]
    owned: frozenset[tuple[int, int]]
    queries: list[Any]
    progress: list[Any]
    commits: list[Any]

    @property
    def names(self) -> dict[str, str | None]:
        """What the queries are called, by the app id that they have where they set no other."""
        return {row.query_id: row.name for row in self.queries}


def open_to_look(url: str, *, patience: float = PATIENCE) -> Database:
    """The database of a store that is there, to look at and to leave as it is.

    Raises
    ------
    InvalidUrl, StoreNotFound, StoreUnavailable, StoreTooNew, MissingDependency
    """
    return open_database(url, create=False, patience=patience, as_it_is=True)[0]


def look(database: Database, since: int) -> Seen:
    """Read the store.

    Parameters
    ----------
    since
        Progress of queries is wanted that was told later than this, in microseconds since 1970.

    Raises
    ------
    StoreError
    """
    return database.run(lambda tx: _look(tx, database, since), write=False, patience=0)


def _look(tx: Transaction, database: Database, since: int) -> Seen:
    store = tx.one("read_store")
    require_version(database, store.version)
    registrations = tx.all("all_registrations")
    return Seen(
        uuid=store.uuid,
        now=tx.now(),
        queues=tuple(catalog.list_queues(tx)),
        partitions=tx.all("all_partitions"),
        registrations=registrations,
        positions=tx.all("all_positions"),
        owned=_owned(tx, store.uuid, registrations),
        queries=queries.reported_queries(tx),
        progress=queries.progress_since(tx, since),
        commits=tx.all("newest_commits", most=COMMITS),
    )


def _owned(tx: Transaction, uuid: str, registrations: list[Any]) -> frozenset[tuple[int, int]]:
    names = {
        owner_name(uuid, row.consumer, row.queue_id): (row.consumer_id, row.queue_id)
        for row in registrations
        if row.epoch
    }
    return frozenset(names[name] for name in tx.owners_alive(names))
