"""Unchanged TOAST values, which a change row omits because the change did not touch them.

PostgreSQL omits long values from an update that does not touch them, unless the table's replica identity is
FULL. The sink table then keeps the stored value of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructType,
    VariantType,
)

from penstock.arguments import in_quotes
from penstock.errors import InvalidInputError, TableRefusedError
from penstock.feeds.contract import CHANGE_COLUMNS, CHANGE_TYPE
from penstock.spark.schemas import feed_column, quote_column, unchanged_column

MISSING_COLUMNS = "unknown"
"""The column of a projected row with the numbers of the columns whose value is missing, such as ",2,,5,";
null if all columns have a value.
"""
_KEY_CHANGED, _COMPUTED = "!", "?"
_TOASTABLE_TYPES = (ArrayType, BinaryType, DecimalType, MapType, StringType, StructType, VariantType)


@dataclass(frozen=True)
class UnchangedValues:
    """The feed's column that lists the omitted values of a change, and the columns that may have them."""

    column: str
    columns_by_source: tuple[tuple[str, tuple[int, ...]], ...]
    """The numbers of the table's columns, by the name of their column in the feed."""
    computed: tuple[str, ...]
    """The columns that may be computed from omitted values."""

    @classmethod
    def of(cls, schema: StructType, keys: Sequence[str]) -> UnchangedValues | None:
        """Read the column metadata of a schema; return None if the feed never omits values."""
        column = unchanged_column(schema)
        if column is None:
            _require_no_values_left_out(schema, keys)
            return None
        columns_by_source: dict[str, list[int]] = {}
        computed = []
        data = [field for field in schema if field.name not in (*CHANGE_COLUMNS, column)]
        for number, field in enumerate(data):
            name = feed_column(field)
            if name is None or _has_feed_values(field.dataType):
                computed.append(field.name)
            elif field.name not in keys and isinstance(field.dataType, _TOASTABLE_TYPES):
                columns_by_source.setdefault(name, []).append(number)
        return cls(
            column,
            tuple((name, tuple(numbers)) for name, numbers in columns_by_source.items()),
            tuple(computed),
        )

    @property
    def omittable_columns(self) -> list[int]:
        """The numbers of all columns whose values may be omitted."""
        return sorted(number for _, numbers in self.columns_by_source for number in numbers)

    def missing_columns(self) -> Column:
        """Return the expression of `MISSING_COLUMNS`; a marker and a column name mean an unknown value."""
        names, change_type = F.col(quote_column(self.column)), F.col(CHANGE_TYPE)
        numbers = F.array_join(F.transform(names, self._listed_numbers), "")
        key_changed = (change_type == "insert") & (numbers != "")
        value = F.when(key_changed, F.concat(F.lit(_KEY_CHANGED), names[0])).otherwise(numbers)
        if self.computed:
            value = F.concat(F.lit(_COMPUTED), names[0])
        left_out = change_type.isin("insert", "update_postimage") & (F.size(names) > 0)
        return F.nullif(F.when(left_out, value), F.lit("")).alias(MISSING_COLUMNS)

    def _listed_numbers(self, name: Column) -> Column:
        numbers_of_name = F.lit(None).cast("string")
        for source_column, numbers in self.columns_by_source:
            numbers_of_name = F.when(name == source_column, "".join(f",{n}," for n in numbers)).otherwise(
                numbers_of_name
            )
        return numbers_of_name

    def require_resolvable(self, missing: pa.Array, table: str) -> None:
        """Refuse changes that omit values which cannot be taken from an earlier row."""
        markers = pc.utf8_slice_codeunits(missing, 0, 1)
        for marker, reason in (
            (_KEY_CHANGED, "the change gives the row another key"),
            (_COMPUTED, f"the computed columns {', '.join(self.computed)} may depend on it"),
        ):
            unresolvable = missing.filter(pc.equal(markers, marker))
            if len(unresolvable):
                raise self._unknown_value_error(unresolvable[0].as_py()[1:], table, reason)

    def not_stored_error(self, name: str, table: str, key: str) -> TableRefusedError:
        """Return the error for a value that the table does not have either."""
        return self._unknown_value_error(
            name, table, f"the table has no row with the key {key} to take it from"
        )

    def _unknown_value_error(self, name: str, table: str, reason: str) -> TableRefusedError:
        return TableRefusedError(
            f"a change of {table} leaves out the unchanged TOAST value of {in_quotes(name)}, and {reason}: "
            "run ALTER TABLE … REPLICA IDENTITY FULL in the source, and start over with a new slot, a new "
            "checkpoint and an empty table",
            condition="TABLE_REFUSED.UNKNOWN_VALUE",
            column=name,
        )


def column_numbers(missing: Iterable[str]) -> list[int]:
    """Return the distinct column numbers in values of `MISSING_COLUMNS`."""
    return sorted({int(number) for numbers in missing for number in numbers.split(",") if number})


def has_value(missing: str, number: int) -> str:
    """Return the SQL condition that a change has a value for a column; it works in every database."""
    return f"coalesce({missing}, '') not like '%,{number},%'"


def _has_feed_values(kind: DataType) -> bool:
    return isinstance(kind, StructType) and any(feed_column(field) is not None for field in kind)


def _require_no_values_left_out(schema: StructType, keys: Sequence[str]) -> None:
    toastable = [
        field.name
        for field in schema
        if feed_column(field) is not None
        and isinstance(field.dataType, _TOASTABLE_TYPES)
        and field.name not in (*CHANGE_COLUMNS, *keys)
    ]
    if toastable:
        raise InvalidInputError(
            f"a change may leave out a long value that it did not touch, as of {in_quotes(toastable[0])}, "
            "and the feed's column that says so, _unchanged, is not among the rows: select it too. It is not "
            "written to the table",
            condition="INVALID_INPUT.CHANGE_COLUMN_MISSING",
            parameter="apply_changes",
        )
