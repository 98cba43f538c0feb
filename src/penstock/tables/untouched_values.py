"""Values that a change did not touch and its feed does not tell: they are those that the row had before.

PostgreSQL leaves long values out of an update that does not touch them, unless the table's replica identity is full.
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
from penstock.errors import InvalidInput, TableRefused
from penstock.feeds.contract import CHANGE_COLUMNS, CHANGE_TYPE
from penstock.spark.column_metadata import feed_column, unchanged_column
from penstock.spark.schemas import quote_column

UNKNOWN = "unknown"
"""Of a shaped row, beside its columns: the numbers of those without a value, as ",2,,5,"; null where all are told."""
_MOVED, _COMPUTED = "!", "?"
_LONG = (ArrayType, BinaryType, DecimalType, MapType, StringType, StructType, VariantType)


@dataclass(frozen=True)
class Unchanged:
    """The column with the names of those that a change does not tell, and where these are among a table's columns."""

    column: str
    places: tuple[tuple[str, tuple[int, ...]], ...]
    """By the feed's name of a column."""
    computed: tuple[str, ...]
    """Columns that may be made of such values."""

    @classmethod
    def of(cls, schema: StructType, keys: Sequence[str]) -> Unchanged | None:
        """What a schema's marks say; None for rows of a feed that tells all values.

        Raises
        ------
        InvalidInput
            When the rows have such values, and not the column that names them.
        """
        column = unchanged_column(schema)
        if column is None:
            _require_none(schema, keys)
            return None
        places: dict[str, list[int]] = {}
        computed = []
        data = [field for field in schema if field.name not in (*CHANGE_COLUMNS, column)]
        for number, field in enumerate(data):
            name = feed_column(field)
            if name is None or _has_values(field.dataType):
                computed.append(field.name)
            elif field.name not in keys and isinstance(field.dataType, _LONG):
                places.setdefault(name, []).append(number)
        return cls(column, tuple((name, tuple(found)) for name, found in places.items()), tuple(computed))

    @property
    def numbers(self) -> list[int]:
        """The places of all columns whose values may be left out."""
        return sorted(number for _, found in self.places for number in found)

    def unknown(self) -> Column:
        """The expression of `UNKNOWN`; for what nobody can know, a sign and a name."""
        names, kind = F.col(quote_column(self.column)), F.col(CHANGE_TYPE)
        listed = F.array_join(F.transform(names, self._numbers), "")
        moved = (kind == "insert") & (listed != "")
        found = F.when(moved, F.concat(F.lit(_MOVED), names[0])).otherwise(listed)
        if self.computed:
            found = F.concat(F.lit(_COMPUTED), names[0])
        there = kind.isin("insert", "update_postimage") & (F.size(names) > 0)
        return F.nullif(F.when(there, found), F.lit("")).alias(UNKNOWN)

    def _numbers(self, name: Column) -> Column:
        found = F.lit(None).cast("string")
        for known, numbers in self.places:
            found = F.when(name == known, "".join(f",{n}," for n in numbers)).otherwise(found)
        return found

    def require_known(self, unknown: pa.Array, table: str) -> None:
        """Refuse changes without values that no row before can have.

        Raises
        ------
        TableRefused
        """
        signs = pc.utf8_slice_codeunits(unknown, 0, 1)
        for sign, why in (
            (_MOVED, "the row has another key from then on"),
            (
                _COMPUTED,
                f"the rows have computed columns, {', '.join(self.computed)}, which may be made of it",
            ),
        ):
            found = unknown.filter(pc.equal(signs, sign))
            if len(found):
                raise self._refusal(found[0].as_py()[1:], table, why)

    def lost(self, name: str, table: str, key: str) -> TableRefused:
        """The error of a value that the row which was changed does not have."""
        return self._refusal(name, table, f"there is no row with the key {key} that has it")

    def _refusal(self, name: str, table: str, why: str) -> TableRefused:
        return TableRefused(
            f"a change of {table} does not tell the value of {in_quotes(name)}, which it did not touch, and {why}. Have the source log "
            "all values (ALTER TABLE … REPLICA IDENTITY FULL); a change that is in its log already stays without them, so start over "
            "with a new slot and checkpoint, and an empty table",
            condition="TABLE_REFUSED.UNKNOWN_VALUE",
            column=name,
        )


def numbers_of(unknown: Iterable[str]) -> list[int]:
    """The columns' numbers in some values of `UNKNOWN`."""
    return sorted({int(number) for each in unknown for number in each.split(",") if number})


def has_value(unknown: str, number: int) -> str:
    """The SQL condition that a change tells the value of a column; both databases and Delta's take it.

    Parameters
    ----------
    unknown
        The column with `UNKNOWN`, in SQL.
    """
    return f"coalesce({unknown}, '') not like '%,{number},%'"


def _has_values(kind: DataType) -> bool:
    return isinstance(kind, StructType) and any(feed_column(field) is not None for field in kind)


def _require_none(schema: StructType, keys: Sequence[str]) -> None:
    long = [
        field.name
        for field in schema
        if feed_column(field) is not None
        and isinstance(field.dataType, _LONG)
        and field.name not in (*CHANGE_COLUMNS, *keys)
    ]
    if long:
        raise InvalidInput(
            f"a change may leave out a long value that it did not touch, as of {in_quotes(long[0])}, and the feed's column that says so, "
            "_unchanged, is not among the rows: select it too. It is not written to the table",
            parameter="apply_changes",
        )
