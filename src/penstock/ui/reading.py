"""Reading the state of a store at one time, in a few statements however many queues and consumers it has.

A program that may write to the store can write any number of long records. So each kind of record has a
limit, which ordinary stores do not reach. Of the other records, only their number is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from penstock.errors import PenstockError
from penstock.instants import moment_of, moment_text
from penstock.store.database import MAX_CLOCK_SKEW, Database, Row, Transaction
from penstock.store.records import catalog, queries
from penstock.store.records.catalog import QueueRecord, QueueSummary
from penstock.store.records.consumers import owner_lock_name
from penstock.store.records.queries import MAX_PROGRESS_ROWS
from penstock.store.store_schema import open_database, require_version

MAX_QUEUES = 2000
"""The maximum number of queues on the page, which shows the first ones by name."""
MAX_CONSUMERS = 2000
"""The maximum number of registrations of consumers on the page, which shows the ones with the largest lag."""
MAX_PARTITIONS = 100_000
"""The maximum number of partitions that are read, for all queues and for all consumers."""
MAX_REPORTS = 90_000
"""The maximum number of reports that are read together, unless ``MIN_REPORTS`` requires more."""
MIN_REPORTS = 100
"""The number of each query's newest reports that are always read, for the percentiles of micro-batches."""
_MAX_COMMITS = 50
_TIMEOUT = 2.0

T = TypeVar("T")


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
    """A consumer on a queue, with the number of its offsets."""

    consumer_id: int
    queue_id: int
    consumer: str
    queue: str
    vital: bool
    epoch: int
    app_id: str | None
    positions: int


class PositionRow(Protocol):
    """A consumer's offset in a partition, the partition's rows [log_start, log_end), and the segment of the
    first waiting row (None if no row waits).
    """

    consumer_id: int
    queue_id: int
    partition: int
    next_index: int
    safe_index: int
    log_start: int
    log_end: int
    log_bytes: int
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
    """Progress of a query, without its texts."""

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
    watermark: int | None
    finalized_until: int | None
    state_rows: int | None
    state_bytes: int | None
    is_micro_batch: bool


class ProgressTexts(Protocol):
    """The texts of a query's newest progress, as JSON."""

    query_id: str
    reported_at: int
    durations: str
    warnings: str | None


class CommitRow(Protocol):
    sink: str
    app_id: str
    batch_id: int
    row_count: int
    committed_at: int


@dataclass(frozen=True)
class QueuesState:
    summaries: Sequence[QueueSummary]
    unreadable: Sequence[PenstockError]
    """The errors of the queues whose records cannot be read."""
    partitions: Sequence[PartitionRow]
    omitted: int
    """The number of queues that were not read."""

    @property
    def records(self) -> list[QueueRecord]:
        return [outline.record for outline in self.summaries]

    def partitions_by_queue(self) -> dict[int, list[PartitionRow]]:
        partitions: dict[int, list[PartitionRow]] = {record.queue_id: [] for record in self.records}
        for row in self.partitions:
            partitions[row.queue_id].append(row)
        return partitions


@dataclass(frozen=True)
class ConsumersState:
    registrations: Sequence[RegistrationRow]
    positions: Sequence[PositionRow]
    owned: frozenset[tuple[int, int]]
    """Consumer and queue ids of the registrations that a living process owns."""
    omitted: int
    """The number of registrations that were not read."""


@dataclass(frozen=True)
class QueriesState:
    queries: Sequence[QueryRow]
    progress: Sequence[ProgressRow]
    texts: Sequence[ProgressTexts]
    omitted: int
    """The number of queries that were not read."""

    @property
    def names(self) -> dict[str, str | None]:
        """The names of the queries by id, which is also the app id unless the query sets another one."""
        return {row.query_id: row.name for row in self.queries}


@dataclass(frozen=True)
class StoreState:
    uuid: str
    now: int
    """Microseconds since 1970, by the store's clock."""
    queues: QueuesState
    consumers: ConsumersState
    queries: QueriesState
    commits: Sequence[CommitRow]


def open_read_only(url: str, *, timeout: float = _TIMEOUT) -> Database:
    """Open the database of an existing store to read it unchanged."""
    return open_database(url, create=False, timeout=timeout, keep_journal_mode=True)


def read_store(database: Database, since: int) -> StoreState:
    """Read the store, with the progress reported after ``since`` (microseconds since 1970)."""

    def read(tx: Transaction) -> StoreState:
        store = tx.one("read_store")
        require_version(database, store.version)
        return StoreState(
            uuid=store.uuid,
            now=tx.now(),
            queues=read_queues(tx, MAX_QUEUES),
            consumers=_read_consumers(tx, store.uuid),
            queries=read_queries(tx, since),
            commits=cast("list[CommitRow]", tx.all("newest_commits", most=_MAX_COMMITS)),
        )

    return database.run(read, write=False, timeout=0)


def read_queues(tx: Transaction, most: int) -> QueuesState:
    """Read the first queues by name."""
    outlined = catalog.summarize_queues(tx, most)
    included = _within_partition_limit(outlined.summaries, lambda outline: outline.partition_rows)
    ids = json.dumps([outline.record.queue_id for outline in included])
    return QueuesState(
        included,
        outlined.errors,
        cast("list[PartitionRow]", tx.all("partitions_of_queues", queues=ids)),
        omitted=outlined.total - len(outlined.errors) - len(included),
    )


def _read_consumers(tx: Transaction, uuid: str) -> ConsumersState:
    rows = tx.all("registrations_most_behind", most=MAX_CONSUMERS)
    included = _within_partition_limit(cast("list[RegistrationRow]", rows), lambda row: row.positions)
    ids = json.dumps([(row.consumer_id, row.queue_id) for row in included])
    return ConsumersState(
        included,
        cast("list[PositionRow]", tx.all("positions_of_registrations", registrations=ids)),
        _owned_registrations(tx, uuid, included),
        omitted=_total_rows(rows) - len(included),
    )


def _total_rows(rows: Sequence[Row]) -> int:
    """Return the number of rows that a list would have without the limit."""
    return int(rows[0].total) if rows else 0


def _within_partition_limit(items: Iterable[T], partitions: Callable[[T], int]) -> list[T]:
    """Return the first items whose total number of partitions is within the limit."""
    included, remaining = [], MAX_PARTITIONS
    for item in items:
        if partitions(item) <= remaining:
            remaining -= partitions(item)
            included.append(item)
    return included


def read_queries(tx: Transaction, since: int) -> QueriesState:
    """Read the queries that have reported last, with the newest progress that was reported after ``since``.

    A time in the future comes from a wrong clock, and would hide all reports until then.
    """
    upto = tx.now() + MAX_CLOCK_SKEW
    rows = queries.reported_queries(tx)
    most = min(max(MAX_REPORTS // max(len(rows), 1), MIN_REPORTS), MAX_PROGRESS_ROWS)
    return QueriesState(
        cast("list[QueryRow]", rows),
        cast("list[ProgressRow]", queries.progress_since(tx, since, upto=upto, max_rows_per_query=most)),
        cast("list[ProgressTexts]", queries.newest_texts(tx, since, upto=upto)),
        omitted=_total_rows(rows) - len(rows),
    )


def _owned_registrations(
    tx: Transaction, uuid: str, registrations: Sequence[RegistrationRow]
) -> frozenset[tuple[int, int]]:
    names = {
        owner_lock_name(uuid, row.consumer, row.queue_id): (row.consumer_id, row.queue_id)
        for row in registrations
        if row.epoch
    }
    return frozenset(names[name] for name in tx.owners_alive(names))


def iso(micros: int | None) -> str | None:
    """Return an instant (microseconds since 1970) as ISO 8601 with Z, in milliseconds."""
    return None if micros is None else moment_text(moment_of(int(micros)), "milliseconds")


def seconds_between(earlier: int | None, later: int) -> float | None:
    """Return the seconds between two instants; 0 if the first one is later."""
    return None if earlier is None else round(max(later - earlier, 0) / 1e6, 3)
