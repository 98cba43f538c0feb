"""Checks of the rows of a batch, and the errors that SQL, Delta and Iceberg tables share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.arguments import brief, did_you_mean, in_quotes
from penstock.errors import InvalidInputError, InvalidOptionError, TableRefusedError
from penstock.feeds.contract import CHANGE_TYPE, COMMIT_VERSION
from penstock.spark.schemas import is_split, required_sequence, row_id_columns, sequence_column

_DAY = 86_400_000_000
_FIRST_DAYS = {"postgres": (1, -719_162), "sqlite": (-32767, -12_687_428)}
"""First supported year of each database, and its first day in days since 1970. PostgreSQL rejects signs."""
_END_DAY = 11_248_738
"""The first day of the year 32768, in days since 1970; Arrow cannot format years from then on."""
_ORDERED_DAYS = (-719_162, 2_932_897)
"""The first days of the years 1 and 10000: as text, times of other years sort differently."""


def tie_breakers(schema: StructType, sequence_by: str) -> tuple[str, ...]:
    """Return the columns that order changes with the same key and ``sequence_by`` value, from the feed's
    column metadata.

    They are needed if a commit may change a row more than once; most feeds have no such columns.
    """
    order_in_commit, required_column = sequence_column(schema), required_sequence(schema)
    if order_in_commit == sequence_by:
        raise InvalidOptionError(
            f"sequence_by={in_quotes(order_in_commit)} orders changes only inside one commit, so changes of "
            "later commits would be dropped as old: leave sequence_by out, which orders by commit and then "
            "by that column",
            condition="INVALID_OPTION.LOSES_CHANGES",
            option="sequence_by",
        )
    if order_in_commit is None and required_column is not None:
        raise InvalidInputError(
            "a commit of this feed may change a row several times, and the column that orders its changes, "
            f"{in_quotes(required_column)}, is not among the rows: select it too, or read net changes "
            "(deduplication_mode='netChanges', net_window='commit')",
            condition="INVALID_INPUT.CHANGE_COLUMN_MISSING",
            parameter="apply_changes",
        )
    if is_split(schema) and sequence_by == COMMIT_VERSION:
        raise InvalidOptionError(
            f"changes with the same {in_quotes(COMMIT_VERSION)} may arrive in several micro-batches, and the "
            "later ones would be dropped as old: leave version out of the DebeziumFeed, or set sequence_by "
            "to a column that orders all changes of a key",
            condition="INVALID_OPTION.LOSES_CHANGES",
            option="sequence_by",
        )
    if order_in_commit is None or COMMIT_VERSION not in schema.names:
        return ()
    return (order_in_commit,) if sequence_by == COMMIT_VERSION else (COMMIT_VERSION, order_in_commit)


def require_row_id(schema: StructType, keys: Sequence[str]) -> None:
    """Refuse keys without a column that identifies the feed's rows."""
    missing = [name for name in row_id_columns(schema) if name not in keys]
    # Another check refuses keys that are not columns.
    if missing and set(keys) <= set(schema.names):
        raise InvalidOptionError(
            f"the feed identifies rows by {', '.join(missing)}, which is not among the keys "
            f"{', '.join(keys)}, so two of its rows with the same keys would overwrite each other: add it to "
            "keys, or have the feed identify rows by these keys (row_id)",
            condition="INVALID_OPTION.LOSES_CHANGES",
            option="keys",
        )


def require_change_columns(names: Collection[str], sequence_by: str) -> None:
    """Refuse rows that are not change rows."""
    for required in (CHANGE_TYPE, sequence_by):
        if required not in names:
            raise InvalidInputError(
                f"apply_changes takes change rows, with the columns {CHANGE_TYPE} and {sequence_by}, and "
                f"these have no {required}.{did_you_mean(required, names)} They have {', '.join(names)}",
                condition="INVALID_INPUT.CHANGE_COLUMN_MISSING",
                parameter="apply_changes",
            )


def present_column() -> Column:
    """Return the column ``present``: 0 for a delete, 1 for an insert or update, null for an unknown type."""
    change_type = F.col(CHANGE_TYPE)
    is_delete, is_upsert = (
        change_type.isin("delete", "update_preimage"),
        change_type.isin("insert", "update_postimage"),
    )
    return F.when(is_delete, 0).when(is_upsert, 1).cast("int").alias("present")


def require_changes(chunk: pa.RecordBatch, sequence_by: str) -> None:
    """Refuse changes with an unknown type, and changes without a sequence."""
    if chunk.column("present").null_count:
        raise TableRefusedError(
            f"a change has a {CHANGE_TYPE} other than insert, delete, update_preimage and update_postimage: "
            "correct or drop such rows before they are written",
            condition="TABLE_REFUSED.UNKNOWN_CHANGE_TYPE",
        )
    if chunk.column("sequence").null_count:
        raise TableRefusedError(
            f"a change has no value in {in_quotes(sequence_by)}, which orders the changes of a key: set "
            "sequence_by to a column that has a value in every row",
            condition="TABLE_REFUSED.NULL_SEQUENCE",
            column=sequence_by,
        )


def first_repeated_key(keys: pa.Table) -> dict[str, object] | None:
    """Return a key that several rows have; None if all keys are distinct."""
    counts = keys.group_by(keys.column_names).aggregate([([], "count_all")])
    repeated = counts.filter(pc.greater(counts["count_all"], 1)).select(keys.column_names)
    first: dict[str, object] | None = next(iter(repeated.slice(0, 1).to_pylist()), None)
    return first


def key_for_messages(key: Mapping[str, object]) -> str:
    """Return a key for messages."""
    return brief(", ".join(f"{in_quotes(name)} = {in_quotes(value)}" for name, value in key.items()))


def require_key_value(array: pa.Array, column: str, table: str) -> None:
    """Refuse nulls in a key column."""
    if array.null_count:
        raise TableRefusedError(
            f"a row has no value in {in_quotes(column)}, which is a key of {table}: fill it, as "
            "coalesce(column, '') does, or drop such rows",
            condition="TABLE_REFUSED.NULL_KEY",
            column=column,
        )


def require_no_nan(array: pa.Array, column: str, table: str, dialect: str) -> None:
    """Refuse NaN in a key or a sequence for SQLite, which would store NULL instead."""
    if dialect != "sqlite" or not pat.is_floating(array.type):
        return
    if pc.any(pc.is_nan(array)).as_py():
        raise TableRefusedError(
            f"a row has NaN in {in_quotes(column)}, which is a key of {table} or orders its changes, and "
            "SQLite would keep it as NULL: replace it, as nanvl(column, 0) does, or drop such rows",
            condition="TABLE_REFUSED.NAN",
            column=column,
        )


def require_writable_times(array: pa.Array, column: str, table: str, dialect: str) -> None:
    """Refuse dates and timestamps that Arrow cannot format as text, or that PostgreSQL cannot parse.

    Arrow formats some of them as wrong dates, without an error.
    """
    first_year, first_day = _FIRST_DAYS[dialect]
    outside = _first_time_outside(array, first_day, _END_DAY)
    if outside is not None:
        raise TableRefusedError(
            f"{in_quotes(column)} has a date outside the years {first_year} to 32767, which cannot be "
            f"written to {table} ({outside}): correct it, or replace it with NULL, "
            f"as if(year(column) between {first_year} and 32767, column, null) does",
            condition="TABLE_REFUSED.DATE_OUT_OF_RANGE",
            column=column,
        )


def require_ordered_times(array: pa.Array, column: str, table: str, dialect: str) -> None:
    """Refuse dates and timestamps in a sequence for SQLite, which would order their text differently."""
    outside = None if dialect != "sqlite" else _first_time_outside(array, *_ORDERED_DAYS)
    if outside is not None:
        raise TableRefusedError(
            f"{in_quotes(column)} orders changes of {table} and has a date outside the years 1 to 9999, "
            f"which SQLite orders differently ({outside}): correct it, or set sequence_by to another column",
            condition="TABLE_REFUSED.DATE_OUT_OF_RANGE",
            column=column,
        )


def _first_time_outside(array: pa.Array, first_day: int, end_day: int) -> str | None:
    """Return a date or timestamp outside a range of days since 1970, for messages; None if there is none."""
    if pat.is_date(array.type):
        values, units_per_day, unit = array.view(pa.int32()), 1, "days"
    elif pat.is_timestamp(array.type):
        values, units_per_day, unit = array.view(pa.int64()), _DAY, "microseconds"
    else:
        return None
    minimum, maximum = pc.min_max(values).as_py().values()
    if minimum is None:
        return None
    for value in (minimum, maximum):
        if not first_day * units_per_day <= value < end_day * units_per_day:
            return f"{value} {unit} since 1970-01-01"
    return None


def ambiguous_order_error(key: str, table: str, sequence_by: str) -> TableRefusedError:
    """Return the error for different changes of a key that have the same position in the order."""
    return TableRefusedError(
        f"the key {key} of {table} has several changes with the same {in_quotes(sequence_by)}, so none of "
        "them is the last: read the feed's net changes (deduplication_mode='netChanges', "
        "net_window='commit'), or name a column as sequence_by that orders all changes of a key",
        condition="TABLE_REFUSED.AMBIGUOUS_ORDER",
        key=key,
    )


def duplicate_keys_error(key: str, table: str) -> TableRefusedError:
    """Return the error for different rows of a micro-batch with the same key, in output mode update."""
    return TableRefusedError(
        f"a micro-batch for {table} has several rows with the key {key}, so none of them is the last: "
        "aggregate by the key, or keep one row of each (max_by, dropDuplicates)",
        condition="TABLE_REFUSED.DUPLICATE_KEYS",
        key=key,
        table=table,
    )
