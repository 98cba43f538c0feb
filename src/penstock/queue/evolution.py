"""Adding partitions to a queue, in such a way that equal keys stay together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes, refusal
from penstock.arrow.coerce import same_type
from penstock.arrow.key_hash import key_hash
from penstock.arrow.schema import canonical_schema
from penstock.errors import InvalidInput, SchemaMismatch
from penstock.queue.checks import SERVICE_COLUMNS
from penstock.queue.placement import Hashes, Home, home_of
from penstock.store.database import Database, Transaction
from penstock.store.log import partition_log
from penstock.store.records import catalog, consumers
from penstock.store.records.catalog import QueueRecord

MAX_PARTITIONS = 4096


def grow(database: Database, queue: QueueRecord, count: int) -> None:
    """Add ``count`` partitions; every consumer stands at the start of the new ones.

    The keys that are in the queue are read before anything is locked, and only those that came meanwhile under the locks,
    which hold up the queue's appends.

    Raises
    ------
    InvalidInput
        When the queue would have more partitions than it may.
    """
    seen, upto = _gather(database, queue, Hashes(), {}) if queue.key else (Hashes(), {})

    def work(tx: Transaction) -> None:
        current = catalog.find_queue(tx, queue.name, lock=True)
        if current.queue_id != queue.queue_id:
            raise catalog.dropped(queue)
        total = current.partitions + count
        if total > MAX_PARTITIONS:
            raise InvalidInput(
                f"a queue has {MAX_PARTITIONS} partitions at the most: {queue.name!r} has {current.partitions} and "
                f"cannot get {count} more"
            )
        registrations = consumers.lock_registrations(tx, current)
        catalog.lock_partitions(tx, current)
        if current.key:
            _remember(tx, current, _gather(_Inside(tx), current, seen.copy(), upto)[0])
        catalog.grow(tx, current, total)
        consumers.add_partition_positions(tx, registrations, current.partitions, total)

    database.run(work)


def _remember(tx: Transaction, queue: QueueRecord, seen: Hashes) -> None:
    home: Home = home_of(queue.partitions, [seen.distinct()])
    tx.run("insert_key_home", queue_id=queue.queue_id, partitions=home.partitions, hashes=home.bits)


def _gather(
    source: Any, queue: QueueRecord, seen: Hashes, upto: dict[int, int]
) -> tuple[Hashes, dict[int, int]]:
    """The hashes of the keys in rows from ``upto`` on, added to ``seen``; and where those rows end."""
    ends = dict(upto)
    for there in source.run(lambda tx: catalog.partitions(tx, queue), write=False):
        start = max(there.first_index, upto.get(there.partition, 0))
        ends[there.partition] = there.next_index
        chunks = partition_log.read(
            source, queue, there.partition, start, there.next_index, columns=queue.key, on_lost="skip"
        )
        for chunk in chunks:
            seen.add(key_hash(chunk.batch, queue.key))
    return seen, ends


class _Inside:
    """A database whose every run is the transaction in hand."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    def run(self, work: Callable[[Transaction], Any], *, write: bool = True) -> Any:
        return work(self._tx)


# ---- columns: Adding columns to a queue: behind those that it has and nullable, so that whoever knows fewer of them goes on.

_HELPERS = ("__penstock_", "__spark_cdc_")
"""What the names of columns begin with that continuous queries and change feeds have for themselves."""
_OTHERWISE = (
    "columns are not renamed, dropped or changed: make a new queue with the columns that are wanted, copy the rows with a query, and "
    "move the consumers to it"
)


def new_columns(given: Any) -> pa.Schema:
    """The columns to add, in canonical form.

    Parameters
    ----------
    given
        A ``pyarrow.Schema`` or a PySpark ``StructType``; or Arrow fields, one or several, or pairs of a name and an Arrow type.

    Raises
    ------
    InvalidInput, UnsupportedType
    SchemaMismatch
        When a column is not nullable, or has a name that readers have for themselves.
    """
    columns = canonical_schema(_schema(given))
    for field in columns:
        if not field.nullable:
            raise SchemaMismatch(
                f"column {in_quotes(field.name)} is NOT NULL, and the rows that are there have nothing in it: add it as nullable",
                column=field.name,
            )
        if field.name.lower() in SERVICE_COLUMNS or field.name.lower().startswith(_HELPERS):
            raise SchemaMismatch(
                f"column {in_quotes(field.name)} has a name that readers of the queue may use for columns of their own: choose another "
                "one",
                column=field.name,
            )
    return columns


def _schema(given: Any) -> Any:
    if isinstance(given, pa.Schema) or hasattr(given, "json"):
        return given
    try:
        return pa.schema([given] if isinstance(given, pa.Field) else given)
    except TypeError:
        raise refusal(
            "columns", given, "Arrow fields such as [pa.field('note', pa.string())], a schema or a StructType"
        ) from None


def add_columns(database: Database, queue: QueueRecord, columns: pa.Schema) -> None:
    """Add those columns that the queue does not have yet.

    It locks the queue's row alone, and so neither waits for appends nor holds them up.

    Raises
    ------
    SchemaMismatch
        When the queue has a column of that name that is another one.
    """

    def work(tx: Transaction) -> None:
        locked = catalog.find_queue(tx, queue.name, lock=True)
        if locked.queue_id != queue.queue_id:
            raise catalog.dropped(queue)
        # What somebody else has added before the lock was free.
        current = catalog.reread(tx, locked)
        added = [field for field in columns if _is_new(current, field)]
        if added:
            catalog.add_columns(tx, current, added)

    database.run(work, idempotent=True)


def _is_new(queue: QueueRecord, field: pa.Field) -> bool:
    there = next((each for each in queue.schema if each.name.lower() == field.name.lower()), None)
    if there is None:
        _refuse_inside(queue, field.name)
        return True
    if there.name != field.name:
        raise SchemaMismatch(
            f"queue {in_quotes(queue.name)} has a column {in_quotes(there.name)}, which is the same name to Spark as "
            f"{in_quotes(field.name)}: choose another one",
            column=field.name,
        )
    if not same_type(there.type, field.type):
        raise SchemaMismatch(
            f"queue {in_quotes(queue.name)} has a column {in_quotes(field.name)} as {there.type}, not as {field.type}: "
            f"{_instead(there, field)}",
            column=field.name,
            expected=str(there.type),
            found=str(field.type),
        )
    if not there.nullable:
        raise SchemaMismatch(
            f"queue {in_quotes(queue.name)} has a column {in_quotes(field.name)} that is NOT NULL: {_OTHERWISE}",
            column=field.name,
        )
    return False


def _instead(there: pa.Field, wanted: pa.Field) -> str:
    if pat.is_nested(there.type) and pat.is_nested(wanted.type):
        return (
            "nothing is added inside a column, since the rows that are there are stored by its fields: add a column beside it, or "
            "give the new one another name"
        )
    return f"add one of another name beside it; {_OTHERWISE}"


def _refuse_inside(queue: QueueRecord, name: str) -> None:
    outer = name.partition(".")[0]
    if outer != name and outer in queue.schema.names and pat.is_struct(queue.schema.field(outer).type):
        raise SchemaMismatch(
            f"column {in_quotes(outer)} of queue {in_quotes(queue.name)} is a struct, and {in_quotes(name)} would be a field inside it: "
            "nothing is added inside a column, since the rows that are there are stored by its fields; add a column beside it",
            column=name,
        )
