"""``Copy``: the interface of copies, which each kind of table implements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import SchemaMismatchError
from penstock.reconciliation.rows import Key
from penstock.tables.columns import VALID_FROM, VALID_TO

SourceRows = Callable[[Sequence[Key]], pa.Table]
"""Reads the current rows of the source with the given keys."""


class Copy(Protocol):
    """An open copy. Its rows have the types of the source, and the column INVALID."""

    @property
    def label(self) -> str:
        """The name of the copy for messages."""

    @property
    def history(self) -> bool:
        """Whether the copy has earlier versions of rows, which are not compared."""

    @property
    def nan_as_null(self) -> bool:
        """Whether the copy stores NULL instead of NaN."""

    def pages(self, rows: int) -> Iterator[pa.Table]:
        """Yield all rows, in pages of limited size."""

    def find(self, keys: Sequence[Key]) -> Iterator[pa.Table]:
        """Yield the rows with the given keys."""

    def repair(self, keys: Sequence[Key], source_rows: SourceRows) -> int:
        """Make the rows with the given keys equal to the source, while others may write.

        Return the number of rows that were written or deleted.
        """

    def close(self) -> None: ...


def require_columns(schema: pa.Schema, existing: Collection[str], label: str) -> None:
    """Refuse a copy that lacks columns that are compared."""
    missing = [name for name in schema.names if name not in existing]
    if missing:
        names = ", ".join(map(in_quotes, missing))
        raise SchemaMismatchError(
            f"the copy {label} has no column {names}.{did_you_mean(missing[0], existing)} It has "
            f"{', '.join(existing)}. To compare only some columns, name them with columns (--column)",
            condition="SCHEMA_MISMATCH.COPY_LACKS_COLUMNS",
            table=label,
            columns=missing,
        )


def has_history(schema: pa.Schema, existing: Collection[str]) -> bool:
    """Return whether a copy keeps every version of a row (``scd_type=2``)."""
    history_columns = {VALID_FROM, VALID_TO}
    return history_columns <= set(existing) and not history_columns & set(schema.names)
