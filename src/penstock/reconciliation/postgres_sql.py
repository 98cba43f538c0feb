"""SQL that reads ranges of a PostgreSQL table (the source or a copy) by key."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple, TypeAlias

from penstock.feeds.postgres.server import quoted
from penstock.feeds.postgres.table_rows import TO_CSV
from penstock.reconciliation.rows import Key

Bound: TypeAlias = tuple[str, ...]
"""A key in PostgreSQL's text format."""

COLUMN_TYPES_QUERY = """
select a.attname, pg_catalog.format_type(a.atttypid, -1),
    pg_catalog.current_setting('server_encoding') = 'UTF8' and (a.attcollation in (950, 951)
        or a.attcollation = 100 and d.datcollate in ('C', 'POSIX')
        and coalesce(pg_catalog.to_jsonb(d) ->> 'datlocprovider', 'c') = 'c')
from pg_catalog.pg_attribute as a
join pg_catalog.pg_database as d on d.datname = pg_catalog.current_database()
where a.attrelid = :oid::oid and a.attnum > 0 and not a.attisdropped
"""
"""The type of each column for a cast, and whether its text is ordered by UTF-8 bytes."""
SESSION_SETTINGS = (
    "set local datestyle to 'ISO, YMD'; set local intervalstyle to 'postgres'; set local timezone to 'UTC'; "
    "set local extra_float_digits to 1; set local bytea_output to 'hex'; set local row_security to off; "
    "set local enable_bitmapscan to on"
)
"""Settings of a transaction: the text format of values, as in the sessions of a feed, and a plan for ranges.

The store's own statements do not need the latter.
"""


class Checksum(NamedTuple):
    """The number of rows in a range, the sums of their hashes, and their size as text."""

    rows: int
    first: str
    second: str
    bytes: int


@dataclass(frozen=True)
class PostgresTable:
    """Builder of statements that read a table."""

    relation: str
    """The relation after FROM."""
    condition: str
    """The condition that selects the rows to compare; empty for all rows."""
    columns: tuple[str, ...]
    key: tuple[str, ...]
    types: Mapping[str, str]
    """The SQL types of columns, including those of the key."""

    @property
    def _keys(self) -> str:
        return ", ".join(map(quoted, self.key))

    @property
    def _columns(self) -> str:
        return ", ".join(map(quoted, self.columns))

    def rows(self, after: Bound | None, upto: Bound | None, limit: int | None = None) -> str:
        """Return a COPY statement for the rows of a range, in key order if a limit is set."""
        order = "" if limit is None else f" ORDER BY {self._keys} LIMIT {limit}"
        return f"COPY (SELECT {self._columns} FROM {self._range(after, upto)}{order}) TO STDOUT {TO_CSV}"

    def bound(self, after: Bound | None, upto: Bound | None, count: int) -> str:
        """Return a query for the key of the nth row of a range, which returns no row if there are fewer."""
        texts = ", ".join(f"concat({quoted(name)}) AS k{number}" for number, name in enumerate(self.key))
        return (
            f"SELECT {texts} FROM {self._range(after, upto)} ORDER BY {self._keys} OFFSET {count - 1} LIMIT 1"
        )

    def checksum(self, after: Bound | None, upto: Bound | None) -> str:
        """Return a query for the `Checksum` of a range.

        The text of a whole row is unambiguous: values are quoted, and NULL is empty. OFFSET 0 prevents that
        the text is computed for each use.
        """
        rows = (
            f'SELECT ROW({self._columns})::text COLLATE "C" AS line FROM {self._range(after, upto)} OFFSET 0'
        )
        sums = ", ".join(
            f"coalesce(sum(hashtextextended(line, {seed})), 0)::text AS sum{seed}" for seed in (0, 1)
        )
        size = "coalesce(sum(octet_length(line)), 0)::bigint AS bytes"
        return f"SELECT count(*), {sums}, {size} FROM ({rows}) AS lines"

    def with_keys(self, keys: Sequence[Key], *extra_columns: str) -> str:
        """Return a COPY statement for the rows with the given keys, with ``extra_columns``."""
        columns = ", ".join(f"own.{name}" for name in [*map(quoted, self.columns), *extra_columns])
        where = f" WHERE {self.condition}" if self.condition else ""
        # The condition is from the publication, and has column names without a table name.
        rows = f"(SELECT {', '.join(['*', *extra_columns])} FROM {self.relation}{where}) AS own"
        return f"COPY (SELECT {columns} FROM {rows} JOIN {self.keys_join(keys)}) TO STDOUT {TO_CSV}"

    def keys_join(self, keys: Sequence[Key]) -> str:
        """Return the keys as a relation and the join condition with ``own``: what follows JOIN.

        Key values in text must also have the same text, because 1.5 equals 1.50, and 1 day equals 24 hours.
        """
        arrays = [
            f"ARRAY[{', '.join(literal(as_text(value)) for value in values)}]::text[]"
            for values in zip(*keys, strict=True)
        ]
        names = [f"k{number}" for number in range(len(self.key))]
        conditions = [
            f"own.{quoted(name)} = wanted.{key_column}::{self.types[name]}"
            for name, key_column in zip(self.key, names, strict=True)
        ]
        conditions += [
            f'concat(own.{quoted(name)}) COLLATE "C" = wanted.{key_column}'
            for name, key_column, value in zip(self.key, names, keys[0], strict=True)
            if isinstance(value, str)
        ]
        return f"unnest({', '.join(arrays)}) AS wanted ({', '.join(names)}) ON {' AND '.join(conditions)}"

    def _range(self, after: Bound | None, upto: Bound | None) -> str:
        conditions = [f"({self.condition})"] if self.condition else []
        for sign, bound in ((">", after), ("<=", upto)):
            if bound is not None:
                conditions.append(f"({self._keys}) {sign} ({self._typed_values(bound)})")
        return self.relation + (f" WHERE {' AND '.join(conditions)}" if conditions else "")

    def _typed_values(self, bound: Bound) -> str:
        return ", ".join(
            f"{literal(text)}::{self.types[name]}" for name, text in zip(self.key, bound, strict=True)
        )


def literal(text: str) -> str:
    """Quote a text in a way that does not depend on the session's settings."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def as_text(value: object) -> str:
    """Format a key value as text that PostgreSQL can parse."""
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    return value.isoformat() if isinstance(value, datetime.date) else str(value)
