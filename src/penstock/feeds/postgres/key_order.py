"""The sort order of a table's key, as the server compares values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_quotes
from penstock.feeds.postgres.catalog import Table
from penstock.feeds.postgres.pgoutput import Mask
from penstock.feeds.postgres.server import Connection, Row, Server, Statements, quoted

Key: TypeAlias = tuple[str, ...]
"""The values of a key's columns, as text."""
_INTEGER_TYPES = {20, 21, 23}


class _KeyColumn(NamedTuple):
    name: str
    type: str
    collation: str | None

    def value(self, text: str) -> str:
        """Return SQL that compares a value in its text form like the column."""
        collate = "" if self.collation is None else f" COLLATE {self.collation}"
        return f"({text}::{self.type}{collate})"


class KeyOrder:
    """The sort order of a table's key.

    The order of text depends on collations, so only the server can compare it.
    """

    def __init__(self, table: Table, columns: Sequence[_KeyColumn]) -> None:
        self._columns = columns
        bases = dict(zip(table.relation.names, table.bases, strict=True))
        self._is_integer = len(table.key) == 1 and bases[table.key[0]][0] in _INTEGER_TYPES

    @classmethod
    def of(cls, server: Statements, table: Table) -> KeyOrder:
        """Return the order of a table's key.

        Raises
        ------
        FeedUnavailableError
            When the table has no key, or a key column whose order is unknown.
        """
        if not table.keyed:
            raise server.unavailable(
                "NO_KEY_TO_READ_BY",
                f"the rows of {table.name} cannot be read while they change, because it has no primary key: "
                "add a primary key, or remove the table from the publication; or start the pump with "
                "schema_changes='ignore' (--schema-changes ignore)",
                table=table.name,
            )
        rows = server.fetch("key_columns", oid=table.relation.oid, names=list(table.key))
        found = {row.name: row for row in rows}
        for name in table.key:
            if name not in found:
                raise server.unavailable(
                    "KEY_CHANGED",
                    f"{table.name} no longer has the column {in_quotes(name)}",
                    table=table.name,
                )
            if not found[name].comparable:
                raise server.unavailable(
                    "NO_KEY_TO_READ_BY",
                    f"the rows of {table.name} cannot be read while they change, because the type of its key "
                    f"column {in_quotes(name)}, {found[name].type}, is neither built in nor an enum: remove "
                    "the table from the publication; or start the pump with schema_changes='ignore' "
                    "(--schema-changes ignore)",
                    table=table.name,
                    column=name,
                )
        return cls(table, [_KeyColumn(name, found[name].type, found[name].collation) for name in table.key])

    def clauses(self, connection: Connection, after: Key | None, filtered: str | None, limit: int) -> str:
        """Return the SQL clauses that select the rows after a key, in key order."""
        names = ", ".join(quoted(column.name) for column in self._columns)
        conditions = [f"({filtered})"] if filtered else []
        if after is not None:
            conditions.append(f"({names}) > ({self._values(connection, after)})")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"{where} ORDER BY {names} LIMIT {limit}"

    def clauses_of(self, connection: Connection, keys: Sequence[Key], filtered: str | None) -> str:
        """Return the SQL clauses that select the rows with the given keys."""
        names = ", ".join(quoted(column.name) for column in self._columns)
        condition = f" AND ({filtered})" if filtered else ""
        values = ", ".join(f"({self._values(connection, key)})" for key in keys)
        return f" WHERE ({names}) IN ({values}){condition}"

    def _values(self, connection: Connection, key: Key) -> str:
        from psycopg import sql

        return ", ".join(
            f"{sql.quote(text, connection)}::text::{column.type}"
            for text, column in zip(key, self._columns, strict=True)
        )

    def after(self, server: Server, bound: Key | None, keys: Sequence[pa.StringArray]) -> Mask:
        """Return the mask of the keys (one array for each column) after ``bound``; all if it is None."""
        count = len(keys[0])
        if bound is None or not count:
            return np.ones(count, bool)
        if self._is_integer:
            numbers = keys[0].cast(pa.int64())
            found: Mask = pc.greater(numbers, int(bound[0])).to_numpy(zero_copy_only=False)
            return found
        rows = server.on_connection(lambda connection: self._compare(connection, bound, keys))
        return np.fromiter((row[0] for row in rows), bool, count)

    def _compare(self, connection: Connection, bound: Key, keys: Sequence[pa.StringArray]) -> list[Row]:
        names = [f"c{place}" for place in range(len(keys))]
        values = ", ".join(column.value(name) for name, column in zip(names, self._columns, strict=True))
        condition = f"({values}) > ({self._values(connection, bound)})".replace("%", "%%")
        arrays = ", ".join(f"%({name})s::text[]" for name in names)
        source = f"unnest({arrays}) WITH ORDINALITY AS k ({', '.join(names)}, n)"
        query = f"SELECT {condition} FROM {source} ORDER BY n"
        texts = {name: each.to_pylist() for name, each in zip(names, keys, strict=True)}
        return connection.execute(query.encode(), texts).fetchall()
