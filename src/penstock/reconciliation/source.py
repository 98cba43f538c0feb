"""``SourceTable``: the source of a comparison, a table of a PostgreSQL publication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError, TableRefusedError
from penstock.feeds.postgres import PostgresFeed
from penstock.feeds.postgres.catalog import Tables, load_tables
from penstock.feeds.postgres.row_messages import source_of
from penstock.feeds.postgres.server import Connection, Server, run
from penstock.feeds.postgres.table_rows import (
    lock_table,
    require_trusted_functions,
    texts_of,
    typed,
)
from penstock.feeds.postgres.values import from_text
from penstock.reconciliation.paging import PageSize, pages
from penstock.reconciliation.postgres_sql import COLUMN_TYPES_QUERY, Bound, Checksum, PostgresTable
from penstock.reconciliation.rows import Key, keys_of
from penstock.store.postgres.connection import copy_rows
from penstock.store.statements import bind

T = TypeVar("T")
_VERSION_COLUMN = "xmin"
_MAX_KEYS = 500
_INFINITE_TEXTS = pa.array(["infinity", "-infinity"])
NUMERIC = 1700
BINARY_ORDER = frozenset({16, 17, 20, 21, 23, 26, 1082, 1114, 1184, NUMERIC, 2950})
"""Types that all databases sort in the same way: boolean, bytea, integers, dates, times, numeric and uuid."""
TEXT_TYPES = frozenset({25, 1043})


@dataclass(frozen=True)
class SnapshotRows:
    """Rows with requested keys from one snapshot of the source."""

    rows: pa.Table
    versions: dict[Key, str]
    """The id of the transaction that wrote each row."""
    position: int
    """The log position when they were read; all of their changes are before it."""


class SourceTable:
    """The table of a feed, read in short snapshots. ``columns`` are compared; None for all columns."""

    def __init__(self, feed: PostgresFeed, columns: Sequence[str] | None) -> None:
        self.name = str(feed.server)
        self.server = Server(feed.server, self.name, 0.0)
        self._invalid_as_null = feed.invalid_values == "null"
        self._trusted_owners = feed.trusted_owners or ()
        self.last_position = 0
        self.first_position: int | None = None
        try:
            self.tables = self._load(feed)
            self.table = self.tables.tables[0]
            self.key = self._checked_key()
            self.schema = self._compared_schema(columns)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.server.close()

    def _load(self, feed: PostgresFeed) -> Tables:
        tables = load_tables(self.server, feed.publication, feed.tables)
        if len(tables.tables) > 1:
            raise InvalidInputError(
                f"the publication {in_quotes(feed.publication)} has {len(tables.tables)} tables, and only "
                f"one can be compared at a time: name it in the URL, table={tables.tables[0].name}",
                condition="INVALID_INPUT.SEVERAL_TABLES",
                parameter="source",
            )
        return tables.reading_as(self.server, feed.types or {})

    def _checked_key(self) -> tuple[str, ...]:
        if not self.table.keyed:
            raise TableRefusedError(
                f"{self.table.name} has no primary key or other replica identity, which is required to find "
                "its rows in the copy: add a primary key, or set replica identity using index",
                condition="TABLE_REFUSED.NO_KEY",
                table=self.table.name,
            )
        types = {field.name: field.type for field in self.table.fields()}
        inexact = [name for name in self.table.key if pat.is_floating(types[name])]
        if inexact:
            raise TableRefusedError(
                f"the key {in_quotes(inexact[0])} of {self.table.name} is {types[inexact[0]]}, and rows are "
                "found only by exact values: read it as text, type=COLUMN:text in the URL",
                condition="TABLE_REFUSED.INEXACT_KEY",
                table=self.table.name,
            )
        return self.table.key

    def _compared_schema(self, columns: Sequence[str] | None) -> pa.Schema:
        fields = {field.name: field for field in self.table.fields()}
        unknown = [name for name in columns or () if name not in fields]
        if unknown:
            raise InvalidInputError(
                f"{self.table.name} has no column {in_quotes(unknown[0])}."
                f"{did_you_mean(unknown[0], fields)} It has {', '.join(fields)}",
                condition="INVALID_INPUT.UNKNOWN_COLUMN",
                parameter="columns",
            )
        return pa.schema(
            [
                arrow_field
                for name, arrow_field in fields.items()
                if columns is None or name in {*columns, *self.key}
            ]
        )

    @cached_property
    def _column_types(self) -> dict[str, tuple[str, bool]]:
        text = bind(COLUMN_TYPES_QUERY, "postgres").encode()
        rows = self.server.on_connection(
            lambda connection: connection.execute(text, {"oid": self.table.relation.oid}).fetchall()
        )
        return {name: (kind, is_ordered) for name, kind, is_ordered in rows}

    @cached_property
    def sql(self) -> PostgresTable:
        types = {name: kind for name, (kind, _) in self._column_types.items()}
        names = tuple(self.schema.names)
        return PostgresTable(source_of(self.table), self.table.filter or "", names, self.key, types)

    @cached_property
    def key_types(self) -> dict[str, int]:
        """The type ids of the key columns, with domains resolved."""
        names = self.table.relation.names
        return {name: self.table.bases[names.index(name)][0] for name in self.key}

    @cached_property
    def is_ordered(self) -> bool:
        """Whether all databases sort the keys in the same way: by value, or by UTF-8 bytes."""
        return all(
            name not in dict(self.table.read_as)
            and (kind in BINARY_ORDER or (kind in TEXT_TYPES and self._column_types[name][1]))
            for name, kind in self.key_types.items()
        )

    def _run_in_snapshot(self, work: Callable[[Connection], T]) -> tuple[T, int]:
        """Run work in a short snapshot; also return a log position after all changes in the snapshot."""

        def read(connection: Connection) -> tuple[T, int]:
            require_trusted_functions(self.server, [self.table], self._trusted_owners)
            with connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                lock_table(self.server, connection, self.table)
                result = work(connection)
                (row,) = run(connection, "position")
                return result, int(row.position)

        result, position = self.server.on_connection(read)
        if self.first_position is None:
            self.first_position = position
        self.last_position = position
        return result, position

    def _run_copy(
        self, text: str, names: Sequence[str], *, may_fail: bool = False
    ) -> tuple[pa.Table | None, int]:
        """Run a COPY statement; return None for its rows if it ``may_fail`` and a literal is invalid."""

        def read(connection: Connection) -> pa.Table | None:
            try:
                with connection.transaction():
                    return texts_of(copy_rows(connection, text), names)
            except self.server.psycopg.DataError:
                if not may_fail:
                    raise
                return None

        return self._run_in_snapshot(read)

    def _typed(self, texts: pa.Table) -> pa.Table:
        for name in self.key:
            kind = self.schema.field(name).type
            if pat.is_temporal(kind) and pc.any(pc.is_in(texts[name], value_set=_INFINITE_TEXTS)).as_py():
                raise TableRefusedError(
                    f"{self.table.name} has an infinite {in_quotes(name)} in its key, which copies cannot "
                    "store: read the column as text, type=COLUMN:text in the URL",
                    condition="TABLE_REFUSED.INFINITE_KEY",
                    table=self.table.name,
                )
        return typed(self.server, self.table, texts, invalid_as_null=self._invalid_as_null)

    def rows(self, after: Bound | None, upto: Bound | None) -> pa.Table:
        """Read the rows of a range."""
        texts, _ = self._run_copy(self.sql.rows(after, upto), self.schema.names)
        assert texts is not None
        return self._typed(texts)

    def bound(self, after: Bound | None, upto: Bound | None, count: int) -> Bound | None:
        """Return the key of the nth row of a range; None if the range has fewer rows."""
        text = self.sql.bound(after, upto, count).encode()
        row, _ = self._run_in_snapshot(lambda connection: connection.execute(text).fetchone())
        return None if row is None else tuple(row)

    def checksum(self, after: Bound | None, upto: Bound | None) -> Checksum:
        text = self.sql.checksum(after, upto).encode()
        row, _ = self._run_in_snapshot(lambda connection: connection.execute(text).fetchone())
        assert row is not None
        return Checksum(*row)

    def key_at(self, bound: Bound) -> Key:
        """Convert a key from text to values."""
        arrays = [
            from_text(pa.array([text]), self.schema.field(name).type)
            for name, text in zip(self.key, bound, strict=True)
        ]
        return keys_of(pa.table(arrays, names=list(self.key)))[0]

    def pages(self, rows: int) -> Iterator[pa.Table]:
        """Yield all rows in key order, in short snapshots."""

        def read(after: Bound | None, count: int) -> pa.Table:
            texts, _ = self._run_copy(self.sql.rows(after, None, count), self.schema.names)
            assert texts is not None
            return texts

        return map(self._typed, pages(read, self.key, rows))

    def find(self, keys: Sequence[Key]) -> Iterator[SnapshotRows]:
        """Read the rows with the given keys, in pages."""
        size = PageSize(_MAX_KEYS)
        for part in size.parts(keys):
            for found in self._find_rows(part):
                size.record_bytes(found.rows.nbytes)
                yield found

    def _find_rows(self, keys: Sequence[Key]) -> Iterator[SnapshotRows]:
        names = [*self.schema.names, _VERSION_COLUMN]
        texts, position = self._run_copy(self.sql.with_keys(keys, _VERSION_COLUMN), names, may_fail=True)
        if texts is not None:
            rows = self._typed(texts.select(self.schema.names))
            found_keys = keys_of(rows.select(list(self.key)))
            yield SnapshotRows(
                rows, dict(zip(found_keys, texts[_VERSION_COLUMN].to_pylist(), strict=True)), position
            )
        elif len(keys) > 1:
            half = len(keys) // 2
            yield from self._find_rows(keys[:half])
            yield from self._find_rows(keys[half:])
        else:
            # The copy has a text that is not a valid value of the key's type, so the source has no such row.
            yield SnapshotRows(self.schema.empty_table(), {}, position)
