"""The state of a store at one moment, read in a few statements however many queues and consumers it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from penstock.errors import PenstockError
from penstock.instants import moment_of, moment_text
from penstock.store.database import Database, Transaction
from penstock.store.records import catalog, queries
from penstock.store.records.catalog import QueueRecord
from penstock.store.records.consumers import owner_name
from penstock.store.store_schema import open_database, require_version

_NEWEST_COMMITS = 50
_TIMEOUT = 2.0


class PartitionRow(Protocol):
    queue_id: int
    partition: int
    first_index: int
    next_index: int
    last_timestamp: int
    bytes: int
    segments: int
    oldest: int | None


class RegistrationRow(Protocol):
    consumer_id: int
    queue_id: int
    consumer: str
    vital: bool
    epoch: int
    app_id: str | None


class PositionRow(Protocol):
    """A consumer's offset, with the segment of the first row that waits (None without one)."""

    consumer_id: int
    queue_id: int
    partition: int
    next_index: int
    safe_index: int
    start_index: int
    end_index: int
    first_timestamp: int | None
    last_timestamp: int


class QueryRow(Protocol):
    query_id: str
    run_id: str
    name: str | None
    engine: str
    state: str
    source: str | None
    sink: str | None
    checkpoint: str | None
    spark_ui: str | None
    error_condition: str | None
    error_message: str | None
    error_at: int | None
    started_at: int
    reported_at: int


class ProgressRow(Protocol):
    """Progress of a query; ``durations`` and ``warnings`` are JSON."""

    query_id: str
    run_id: str
    reported_at: int
    batch_id: int
    rows_in: int
    rows_out: int | None
    p50: float | None
    p90: float
    p99: float
    max: float
    duration: float | None
    durations: str
    watermark: int | None
    state_rows: int | None
    state_bytes: int | None
    warnings: str | None


class CommitRow(Protocol):
    sink: str
    app_id: str
    batch_id: int
    row_count: int
    committed_at: int


@dataclass(frozen=True)
class StoreState:
    uuid: str
    now: int
    """Microseconds since 1970, by the store's clock."""
    queues: tuple[QueueRecord, ...]
    unreadable_queues: Sequence[PenstockError]
    """The errors of the queues whose records cannot be read."""
    partitions: Sequence[PartitionRow]
    registrations: Sequence[RegistrationRow]
    positions: Sequence[PositionRow]
    owned: frozenset[tuple[int, int]]
    """Consumer and queue ids of the registrations that a living process owns."""
    queries: Sequence[QueryRow]
    progress: Sequence[ProgressRow]
    commits: Sequence[CommitRow]

    @property
    def query_names(self) -> dict[str, str | None]:
        """The names of the queries by id, which is their app id unless they set another."""
        return {row.query_id: row.name for row in self.queries}

    def partitions_by_queue(self) -> dict[int, list[PartitionRow]]:
        partitions: dict[int, list[PartitionRow]] = {record.queue_id: [] for record in self.queues}
        for row in self.partitions:
            partitions.setdefault(row.queue_id, []).append(row)
        return partitions


def open_read_only(url: str, *, timeout: float = _TIMEOUT) -> Database:
    """Open the database of an existing store to read it unchanged."""
    return open_database(url, create=False, timeout=timeout, as_it_is=True)


def read_store(database: Database, since: int) -> StoreState:
    """Read the store, with the progress reported after ``since`` (microseconds since 1970)."""

    def read(tx: Transaction) -> StoreState:
        store = tx.one("read_store")
        require_version(database, store.version)
        registrations = cast("list[RegistrationRow]", tx.all("all_registrations"))
        records, errors = catalog.outline_queues(tx)
        return StoreState(
            uuid=store.uuid,
            now=tx.now(),
            queues=tuple(records),
            unreadable_queues=errors,
            partitions=cast("list[PartitionRow]", tx.all("all_partitions")),
            registrations=registrations,
            positions=cast("list[PositionRow]", tx.all("all_positions")),
            owned=_owned(tx, store.uuid, registrations),
            queries=cast("list[QueryRow]", queries.reported_queries(tx)),
            progress=cast("list[ProgressRow]", queries.progress_since(tx, since)),
            commits=cast("list[CommitRow]", tx.all("newest_commits", most=_NEWEST_COMMITS)),
        )

    return database.run(read, write=False, timeout=0)


def _owned(
    tx: Transaction, uuid: str, registrations: Sequence[RegistrationRow]
) -> frozenset[tuple[int, int]]:
    names = {
        owner_name(uuid, row.consumer, row.queue_id): (row.consumer_id, row.queue_id)
        for row in registrations
        if row.epoch
    }
    return frozenset(names[name] for name in tx.owners_alive(names))


def iso(micros: int | None) -> str | None:
    """Return an instant (microseconds since 1970) as ISO 8601 with Z, in milliseconds."""
    return None if micros is None else moment_text(moment_of(int(micros)), "milliseconds")


def seconds_between(earlier: int | None, later: int) -> float | None:
    """Return the seconds between two instants, 0 where the first is the later one."""
    return None if earlier is None else round(max(later - earlier, 0) / 1e6, 3)
