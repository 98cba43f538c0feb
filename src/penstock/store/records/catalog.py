"""Queues and their partitions: create, find, list, grow, drop."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.arrow.schema import schema_to_bytes
from penstock.errors import (
    AlreadyExistsError,
    CommitRefusedError,
    InvalidUrlError,
    QueueNotFoundError,
    StoreError,
)
from penstock.json_text import parse_record, require_numbered, unreadable_record
from penstock.objects.location import stored_location
from penstock.store.database import Row, Transaction
from penstock.store.records.locations import record_location
from penstock.store.records.queue_columns import FIRST_COLUMNS, QueueColumns
from penstock.store.records.staged import delete_staged_payloads

QUEUE_SINK = "queue:"


@dataclass(frozen=True)
class RetentionLimits:
    """How much of each partition to keep: rows, age in microseconds and compressed bytes. None means no
    limit.
    """

    rows: int | None = None
    age: int | None = None
    bytes: int | None = None

    @property
    def unlimited(self) -> bool:
        return self.rows is None and self.age is None and self.bytes is None


@dataclass(frozen=True)
class QueueRecord:
    """One queue."""

    queue_id: int
    name: str
    columns: QueueColumns
    key: tuple[str, ...]
    partitions: int
    retention: RetentionLimits
    created_at: int
    contract: str | None = None
    """The contract of a change feed, as JSON. Such a queue accepts only whole commits."""
    payloads: str | None = None
    """The location of its large payloads: a URL, or None for the database."""

    @property
    def generation(self) -> int:
        """The number that distinguishes the queue from earlier queues of the same name."""
        return self.queue_id

    @cached_property
    def schema(self) -> pa.Schema:
        return self.columns.schema


MAX_PARTITIONS = 10_000
MAX_PARTITION_ROWS = 1 << 40
"""More rows than a partition can hold."""
_CHECK_VIOLATION = "23514"


class PartitionRecord(NamedTuple):
    """One partition, with rows [first_index, next_index)."""

    partition: int
    first_index: int
    next_index: int
    last_timestamp: int
    """The timestamp of the newest row, in microseconds since 1970."""
    last_clock: int
    """The timestamp of the newest append that got its timestamp from the clock. Later appends got timestamps
    just after the previous row, since the clock had not advanced.
    """
    bytes: int
    segments: int

    @property
    def rows(self) -> int:
        return self.next_index - self.first_index


def _record(row: Row) -> QueueRecord:
    return QueueRecord(
        queue_id=row.queue_id,
        name=row.name,
        columns=QueueColumns(
            bytes(row.schema or b""), None if row.added_columns is None else bytes(row.added_columns)
        ),
        key=_key_columns(row),
        partitions=_checked_partition_count(row),
        retention=_retention_limits(row),
        created_at=row.created_at,
        contract=row.contract,
        payloads=_payload_location(row),
    )


def _retention_limits(row: Row) -> RetentionLimits:
    limits = (row.retention_rows, row.retention_age, row.retention_bytes)
    if any(limit is not None and limit < 0 for limit in limits):
        raise unreadable_record(f"the retention of queue {row.name!r}", ValueError(f"it is {limits}"))
    return RetentionLimits(*limits)


def _checked_partition_count(row: Row) -> int:
    """Refuse a number of partitions that would keep maintenance busy for ever, or with which no row can be
    placed.
    """
    if not 1 <= row.partitions <= MAX_PARTITIONS:
        reason = ValueError(f"it is {row.partitions}, and a queue has 1 to {MAX_PARTITIONS}")
        raise unreadable_record(f"the number of partitions of queue {row.name!r}", reason)
    return int(row.partitions)


def _payload_location(row: Row) -> str | None:
    if row.payloads is None:
        return None
    try:
        return stored_location(row.payloads)
    except InvalidUrlError as error:
        raise unreadable_record(f"the location of the payloads of queue {row.name!r}", error) from error


def _key_columns(row: Row) -> tuple[str, ...]:
    what = f"the key of queue {row.name!r}"
    columns = parse_record(row.key_columns, what, list)
    if not all(isinstance(column, str) for column in columns):
        raise unreadable_record(what, ValueError("it is not a list of names"))
    return tuple(columns)


def create_queue(
    tx: Transaction,
    name: str,
    schema: pa.Schema,
    *,
    partitions: int,
    key: Sequence[str],
    retention: RetentionLimits,
    contract: str | None = None,
    payloads: str | None = None,
) -> QueueRecord:
    row = tx.one(
        "insert_queue",
        name=name,
        queue_id=secrets.randbits(40),
        schema=schema_to_bytes(schema),
        key_columns=json.dumps(list(key)),
        partitions=partitions,
        contract=contract,
        payloads=payloads,
        now=tx.now(),
        **_retention_parameters(retention),
    )
    if row is None:
        raise AlreadyExistsError(
            f"queue {name!r} already exists: open it, drop it first, or choose another name",
            queue=name,
        )
    _insert_partitions(tx, row.queue_id, 0, partitions)
    if payloads is not None:
        record_location(tx, payloads, tx.now())
    return find_queue(tx, name)


def _insert_partitions(tx: Transaction, queue_id: int, first: int, total: int) -> None:
    tx.run_many("insert_partition", {"partition": range(first, total)}, queue_id=queue_id, total=total)


def set_partition_count(tx: Transaction, queue: QueueRecord, total: int) -> None:
    """Add partitions until there are ``total``. The caller must hold the locks of the queue and of all its
    partitions.
    """
    tx.run("set_partitions", queue_id=queue.queue_id, partitions=total)
    tx.run("set_total", queue_id=queue.queue_id, total=total)
    _insert_partitions(tx, queue.queue_id, queue.partitions, total)


def change_columns(tx: Transaction, queue: QueueRecord, fields: Sequence[pa.Field]) -> None:
    """Add columns at the end, or widen columns. The caller must hold the queue's lock.

    Appends continue in the meantime. Their rows have the columns that their writers know, and each payload
    records which columns it has.
    """
    tx.run("set_added_columns", queue_id=queue.queue_id, columns=queue.columns.extended_with(fields))


def _retention_parameters(limits: RetentionLimits) -> dict[str, int | None]:
    return {"retention_rows": limits.rows, "retention_age": limits.age, "retention_bytes": limits.bytes}


def find_queue(tx: Transaction, name: str, *, lock: bool = False) -> QueueRecord:
    row = tx.one("lock_queue" if lock and tx.write else "find_queue", name=name)
    if row is None:
        names = [queue.name for queue in tx.all("list_queues")]
        raise QueueNotFoundError(
            f"there is no queue {in_quotes(name)}."
            + (did_you_mean(name, names) or " Create it with store.create_queue or `penstock queue create`"),
            queue=name,
        )
    return _record(row)


def require_same_layout(tx: Transaction, queue: QueueRecord) -> None:
    """Refuse rows for a queue that was recreated, or whose keys belong to other partitions now.

    Only a micro-batch without rows needs this. An append checks it when it locks the partitions.
    """
    current = find_queue(tx, queue.name)
    if current.queue_id != queue.queue_id:
        raise CommitRefusedError(
            f"queue {queue.name!r} was recreated while rows were written to it, so none of them are "
            "visible: write them again; a restarted query repeats the micro-batch",
            condition="COMMIT_REFUSED.QUEUE_CHANGED",
            queue=queue.name,
        )
    if queue.key and current.partitions != queue.partitions:
        raise partitions_added(queue)


class QueueSink(Protocol):
    """The identity of a queue as a sink."""

    @property
    def name(self) -> str: ...

    @property
    def generation(self) -> int: ...


def queue_sink(queue: QueueSink) -> str:
    """Return the name of a queue in the ledger. A recreated queue is a different sink."""
    return f"{QUEUE_SINK}{queue.name}:{queue.generation}"


def describe_sink(sink: str) -> str:
    """Return the name of a sink as messages show it."""
    if not sink.startswith(QUEUE_SINK):
        return sink
    return f"queue {sink.removeprefix(QUEUE_SINK).rpartition(':')[0]!r}"


class QueueChanged(CommitRefusedError):
    """The queue changed between the preparation of rows and their append: it got more partitions, or its
    store was restored without some of its columns.
    """

    condition = "COMMIT_REFUSED.QUEUE_CHANGED"


def partitions_added(queue: QueueRecord) -> QueueChanged:
    return QueueChanged(
        f"queue {queue.name!r} got more partitions while rows were written to it, so none of these rows are "
        "visible: repeat the append, or restart the query, which repeats the micro-batch",
        queue=queue.name,
    )


def require_columns(tx: Transaction, queue: QueueRecord, ids: Iterable[int]) -> None:
    """Refuse rows with columns that the queue lacks because its store was restored from an older backup.

    Raises
    ------
    QueueChanged
        If the queue lacks the columns with one of these ids.
    QueueNotFoundError
        If the queue was dropped.
    """
    added_ids = set(ids) - {FIRST_COLUMNS}
    if added_ids and not added_ids <= set(reload_queue(tx, queue).columns.ids):
        raise QueueChanged(
            f"queue {queue.name!r} lacks columns or column types of these rows, because its store was "
            "restored from an older backup. None of the rows are visible. Add or widen the columns again if "
            "they are needed. Then repeat the append, or restart the query, which repeats the micro-batch",
            queue=queue.name,
        )


def reload_queue(tx: Transaction, queue: QueueRecord) -> QueueRecord:
    """Read the queue's current record. A recreated queue of the same name is a different one."""
    row = tx.one("find_queue_by_id", queue_id=queue.queue_id)
    if row is None:
        raise dropped(queue)
    return _record(row)


def dropped(queue: QueueRecord) -> QueueNotFoundError:
    return QueueNotFoundError(f"queue {queue.name!r} was dropped", queue=queue.name)


class ListedQueue(NamedTuple):
    """The fields that identify a queue."""

    name: str
    generation: int


def list_queues(tx: Transaction) -> list[ListedQueue]:
    """Return what identifies each queue, without the rest of its record, which may be long or unreadable."""
    return [ListedQueue(row.name, row.queue_id) for row in tx.all("list_queues")]


@dataclass(frozen=True)
class QueueSummary:
    """A queue in a list: its record, without the contract and any long schema, and its counts."""

    record: QueueRecord
    partition_rows: int
    registrations: int


@dataclass(frozen=True)
class QueueSummaries:
    """The summaries of the first queues by name."""

    summaries: list[QueueSummary]
    errors: list[StoreError]
    """The errors of queues whose records cannot be read."""
    total: int
    """The number of all queues."""


def summarize_queues(tx: Transaction, max_queues: int) -> QueueSummaries:
    rows = tx.all("outline_queues", most=max_queues)
    summaries = QueueSummaries([], [], rows[0].total if rows else 0)
    for row in rows:
        try:
            summaries.summaries.append(QueueSummary(_record(row), row.partition_rows, row.registrations))
        except StoreError as error:
            summaries.errors.append(error)
    return summaries


def set_retention(tx: Transaction, queue: QueueRecord, limits: RetentionLimits) -> None:
    tx.run("set_retention", queue_id=queue.queue_id, **_retention_parameters(limits))


def drop_queue(tx: Transaction, queue: QueueRecord) -> None:
    """Drop a locked queue as soon as no other transaction uses its consumers, sessions or partitions."""
    # All code takes these locks in this order.
    tx.all("lock_registrations", queue_id=queue.queue_id)
    for statement in ("delete_registrations", "delete_producers"):
        tx.run(statement, queue_id=queue.queue_id)
    delete_staged_payloads(tx, tx.all("delete_queue_staged", queue_id=queue.queue_id))
    # Do not call lock_partitions(), so that a queue whose partitions are unreadable can be dropped.
    tx.all("lock_partitions", queue_id=queue.queue_id)
    tx.run("keep_dropped_payloads", queue_id=queue.queue_id, now=tx.now())
    for statement in ("delete_queue_payloads", "delete_queue_segments", "delete_queue"):
        tx.run(statement, queue_id=queue.queue_id)
    tx.run("delete_sink_ledger", sink=queue_sink(queue))


def partitions(tx: Transaction, queue: QueueRecord) -> list[PartitionRecord]:
    records = _partition_records(tx.tuples("read_partitions", queue_id=queue.queue_id), queue)
    require_numbered((record.partition for record in records), f"queue {queue.name!r}")
    return records


def _partition_records(rows: Sequence[tuple[int, ...]], queue: QueueRecord) -> list[PartitionRecord]:
    records = [PartitionRecord(*row) for row in rows]
    for record in records:
        if not 0 <= record.first_index <= record.next_index <= record.first_index + MAX_PARTITION_ROWS:
            raise unreadable_record(
                f"partition {record.partition} of queue {queue.name!r}",
                ValueError(f"it has the rows [{record.first_index}, {record.next_index})"),
            )
    return records


@contextmanager
def within_limits(record_name: str) -> Iterator[None]:
    """Raise an error that names the record if a statement in the block would exceed a limit of the schema.
    This happens only if another program has written a number close to the limit.
    """
    try:
        yield
    except Exception as error:
        error_codes = getattr(error, "sqlstate", None), getattr(error, "sqlite_errorcode", None)
        is_check_violation = (
            error_codes[0] == _CHECK_VIOLATION or error_codes[1] == sqlite3.SQLITE_CONSTRAINT_CHECK
        )
        if is_check_violation or isinstance(error, OverflowError):
            raise unreadable_record(record_name, ValueError("a number in it is at its limit")) from error
        raise


def lock_partitions(tx: Transaction, queue: QueueRecord) -> list[PartitionRecord]:
    """Lock all partitions in ascending order, and return them."""
    statement = "lock_partitions" if tx.write else "read_partitions"
    return _partition_records(tx.tuples(statement, queue_id=queue.queue_id), queue)


def lock_partition(tx: Transaction, queue: QueueRecord, partition: int) -> PartitionRecord:
    """Return a partition. A write transaction keeps it locked until the transaction ends."""
    statement = "lock_partition" if tx.write else "read_partition"
    rows = tx.tuples(statement, queue_id=queue.queue_id, partition=partition)
    if not rows:
        raise dropped(queue)
    return _partition_records(rows, queue)[0]
