"""Adding columns to a queue: behind those that it has and nullable, so that whoever knows fewer of them goes on."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from penstock.arguments import in_quotes, refusal
from penstock.arrow.casts import same_type
from penstock.arrow.schema import canonical_schema
from penstock.errors import SchemaMismatch
from penstock.queue.names import SERVICE_COLUMNS
from penstock.store.database import Database, Transaction
from penstock.store.records import catalog
from penstock.store.records.catalog import QueueRecord

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
