"""Add partitions and columns to a queue, and widen columns.

When partitions are added, rows with equal keys still share a partition. New columns are nullable and come at
the end, so programs that know fewer columns keep working. Programs that know a narrower type also keep
working, as long as all values fit into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes, refusal
from penstock.arrow.coerce import same_type
from penstock.arrow.key_hash import key_hash
from penstock.arrow.schema import canonical_schema, is_wider, unknown_column
from penstock.errors import InvalidInputError, SchemaMismatchError
from penstock.queue.checks import METADATA_COLUMNS
from penstock.queue.placement import DistinctHashes, KnownKeys, known_keys_of
from penstock.store.database import Database, Transaction
from penstock.store.log import reading
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import MAX_PARTITIONS, QueueRecord

_RESERVED_PREFIXES = ("__penstock_", "__spark_cdc_")
"""Prefixes of the columns that continuous queries and change feeds add to rows."""
_RECREATE_ADVICE = (
    "columns cannot be renamed or dropped, or get any but wider types: create a new queue with the columns "
    "that you want, copy the rows to it with a query, and move the consumers to it"
)
_NO_NESTED_FIELDS = (
    "fields cannot be added inside a column, because existing rows are stored by its fields: add a new column"
)

T = TypeVar("T")


def grow(database: Database, queue: QueueRecord, count: int) -> None:
    """Add ``count`` partitions. All consumers start at the beginning of the new partitions.

    The existing keys are read before anything is locked. The locks block appends to the queue, so they are
    held only while reading the keys that were appended in the meantime.
    """
    hashes, read_ends = (
        _collect_key_hashes(database, queue, DistinctHashes(), {}) if queue.key else (DistinctHashes(), {})
    )

    def work(tx: Transaction) -> None:
        current = catalog.find_queue(tx, queue.name, lock=True)
        if current.queue_id != queue.queue_id:
            raise catalog.dropped(queue)
        total = current.partitions + count
        if total > MAX_PARTITIONS:
            raise InvalidInputError(
                f"a queue has at most {MAX_PARTITIONS} partitions: {queue.name!r} has {current.partitions}, "
                f"so {count} more cannot be added"
            )
        registrations = consumers.lock_registrations(tx, current)
        catalog.lock_partitions(tx, current)
        if current.key:
            _store_known_keys(
                tx,
                current,
                _collect_key_hashes(_OpenTransaction(database, tx), current, hashes.copy(), read_ends)[0],
            )
        catalog.set_partition_count(tx, current, total)
        consumers.add_partition_positions(tx, registrations, current.partitions, total)

    database.run(work)


def _store_known_keys(tx: Transaction, queue: QueueRecord, hashes: DistinctHashes) -> None:
    known: KnownKeys = known_keys_of(queue.partitions, [hashes.distinct()])
    tx.run("insert_key_home", queue_id=queue.queue_id, partitions=known.partitions, hashes=known.bits)


def _collect_key_hashes(
    source: Database | _OpenTransaction, queue: QueueRecord, hashes: DistinctHashes, read_ends: dict[int, int]
) -> tuple[DistinctHashes, dict[int, int]]:
    """Add the hashes of the keys in rows after ``read_ends`` to ``hashes``. Return them and the new ends."""
    ends = dict(read_ends)
    for partition in source.run(lambda tx: catalog.partitions(tx, queue), write=False):
        start = max(partition.first_index, read_ends.get(partition.partition, 0))
        ends[partition.partition] = partition.next_index
        unread = reading.Range(partition.partition, start, partition.next_index)
        chunks = reading.read(cast(Database, source), queue, [unread], columns=queue.key, on_lost="skip")
        for chunk in chunks:
            hashes.add(key_hash(chunk.batch, queue.key))
    return hashes, ends


class _OpenTransaction:
    """A substitute for a database that runs all work in one open transaction."""

    def __init__(self, database: Database, tx: Transaction) -> None:
        self.uuid, self.storages = database.uuid, database.storages
        self._tx = tx

    def run(self, work: Callable[[Transaction], T], *, write: bool = True, single: bool = False) -> T:
        return work(self._tx)


def new_columns(columns: object) -> pa.Schema:
    """Return the columns to add, in canonical form.

    ``columns`` is a ``pyarrow.Schema``, a PySpark ``StructType``, one or several Arrow fields, or pairs of a
    name and an Arrow type.
    """
    canonical = wider_columns(columns)
    for field in canonical:
        if not field.nullable:
            raise SchemaMismatchError(
                f"column {in_quotes(field.name)} is NOT NULL, but existing rows have no value in it: "
                "add it as nullable",
                condition="SCHEMA_MISMATCH.NOT_NULL",
                column=field.name,
            )
        if field.name.lower() in METADATA_COLUMNS or field.name.lower().startswith(_RESERVED_PREFIXES):
            raise SchemaMismatchError(
                f"column {in_quotes(field.name)} has a name that is reserved for readers of the queue: "
                "choose another one",
                condition="SCHEMA_MISMATCH.RESERVED_COLUMN",
                column=field.name,
            )
    return canonical


def wider_columns(columns: object) -> pa.Schema:
    """Return the columns to widen with their new types, in canonical form."""
    return canonical_schema(_as_schema(columns))


def _as_schema(columns: object) -> object:
    if isinstance(columns, pa.Schema) or hasattr(columns, "json"):
        return columns
    try:
        return pa.schema([columns] if isinstance(columns, pa.Field) else columns)
    except TypeError:
        accepted = "Arrow fields such as [pa.field('note', pa.string())], a schema or a StructType"
        raise refusal("columns", columns, accepted) from None


def add_columns(database: Database, queue: QueueRecord, columns: pa.Schema) -> None:
    """Add those columns that the queue does not have yet."""
    _change_columns(database, queue, lambda current: [field for field in columns if _is_new(current, field)])


def widen_columns(database: Database, queue: QueueRecord, columns: pa.Schema) -> None:
    """Give columns wider types, and skip columns that already have them."""
    _change_columns(
        database, queue, lambda current: [column for field in columns for column in _widened(current, field)]
    )


def _change_columns(
    database: Database, queue: QueueRecord, changes: Callable[[QueueRecord], list[pa.Field]]
) -> None:
    """Change columns of a queue.

    This locks only the queue's own record, so it neither waits for appends nor makes them wait.
    """

    def work(tx: Transaction) -> None:
        locked = catalog.find_queue(tx, queue.name, lock=True)
        if locked.queue_id != queue.queue_id:
            raise catalog.dropped(queue)
        # The reloaded record includes changes that other programs made while this one waited for the lock.
        current = catalog.reload_queue(tx, locked)
        changed = changes(current)
        if changed:
            catalog.change_columns(tx, current, changed)

    database.run(work, idempotent=True)


def _widened(queue: QueueRecord, wanted: pa.Field) -> list[pa.Field]:
    """Return a list with the column and its new type; an empty list if it is already that wide."""
    if wanted.name not in queue.schema.names:
        raise unknown_column(wanted.name, queue.schema)
    existing = queue.schema.field(wanted.name)
    is_key = wanted.name in queue.key
    if same_type(existing.type, wanted.type) or is_wider(existing.type, wanted.type, key=is_key):
        return []
    if is_wider(wanted.type, existing.type, key=is_key):
        return [existing.with_type(wanted.type)]
    raise _type_error(
        queue,
        existing,
        wanted,
        f"and cannot become {wanted.type}: a column can get a larger integer or float, or a decimal with "
        f"more digits, which keeps its scale if the column is in the key; {_RECREATE_ADVICE}",
    )


def _type_error(
    queue: QueueRecord, existing: pa.Field, wanted: pa.Field, explanation: str
) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"column {in_quotes(existing.name)} of queue {in_quotes(queue.name)} is {existing.type}, "
        f"{explanation}",
        condition="SCHEMA_MISMATCH.COLUMN_TYPE",
        column=existing.name,
        expected=str(existing.type),
        found=str(wanted.type),
    )


def _is_new(queue: QueueRecord, field: pa.Field) -> bool:
    existing = next((column for column in queue.schema if column.name.lower() == field.name.lower()), None)
    if existing is None:
        _refuse_nested_field(queue, field.name)
        return True
    if existing.name != field.name:
        raise SchemaMismatchError(
            f"queue {in_quotes(queue.name)} has a column {in_quotes(existing.name)}, which is the same name "
            f"to Spark as {in_quotes(field.name)}: choose another one",
            condition="SCHEMA_MISMATCH.DUPLICATE_COLUMN",
            column=field.name,
        )
    if not same_type(existing.type, field.type):
        raise _type_error(queue, existing, field, f"not {field.type}: {_type_advice(existing, field)}")
    if not existing.nullable:
        raise SchemaMismatchError(
            f"column {in_quotes(field.name)} of queue {in_quotes(queue.name)} is NOT NULL: "
            f"{_RECREATE_ADVICE}",
            condition="SCHEMA_MISMATCH.NOT_NULL",
            column=field.name,
        )
    return False


def _type_advice(existing: pa.Field, wanted: pa.Field) -> str:
    if pat.is_nested(existing.type) and pat.is_nested(wanted.type):
        return f"{_NO_NESTED_FIELDS} with another name"
    if is_wider(wanted.type, existing.type):
        return "widen_columns gives it that type"
    return f"add a column with another name; {_RECREATE_ADVICE}"


def _refuse_nested_field(queue: QueueRecord, name: str) -> None:
    outer = name.partition(".")[0]
    if outer != name and outer in queue.schema.names and pat.is_struct(queue.schema.field(outer).type):
        raise SchemaMismatchError(
            f"{in_quotes(name)} would be a field inside the struct {in_quotes(outer)} of queue "
            f"{in_quotes(queue.name)}: {_NO_NESTED_FIELDS}",
            condition="SCHEMA_MISMATCH.COLUMN_TYPE",
            column=name,
        )
