"""The tables of a publication: what their columns are called in Arrow, and what tells their rows apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from penstock.changes.contract import ChangeContract
from penstock.changes.feeds.changelog import METADATA_FIELDS
from penstock.changes.feeds.postgres.pgoutput import Column, Relation
from penstock.changes.feeds.postgres.server import Server
from penstock.changes.feeds.postgres.values import arrow_type
from penstock.errors import FeedUnavailable
from penstock.names import did_you_mean, in_quotes

SEQUENCE, UNCHANGED_COLUMNS, TABLE, KEY = "_commit_sequence", "_unchanged", "_table", "_key"
_ADDED = (
    pa.field(SEQUENCE, pa.int64(), nullable=False),
    pa.field(UNCHANGED_COLUMNS, pa.list_(pa.field("element", pa.string()))),
    *METADATA_FIELDS,
)
_NAMES = (pa.field(TABLE, pa.string(), nullable=False), pa.field(KEY, pa.string(), nullable=False))


@dataclass(frozen=True)
class Table:
    """A table of the publication, as a query found it when it began."""

    relation: Relation
    types: tuple[pa.DataType, ...]
    """The columns' Arrow types."""
    key: tuple[str, ...]
    """The columns that tell rows apart; all of them where there is no key and the replica identity is full."""
    keyed: bool
    """Whether the key is one, so that its columns are never null."""
    filter: str | None = None
    """The publication's condition on rows."""
    partitioned: bool = False

    @property
    def name(self) -> str:
        return self.relation.name

    def fields(self) -> list[pa.Field]:
        """The table's columns."""
        return [
            pa.field(column.name, kind, nullable=not (self.keyed and column.name in self.key))
            for column, kind in zip(self.relation.columns, self.types, strict=True)
        ]


@dataclass(frozen=True)
class Tables:
    """The tables of a feed."""

    tables: tuple[Table, ...]
    several: bool
    """Whether rows of all tables come in one form, with a struct for each table."""
    changes_rows: bool
    """Whether updates or deletes are published; else nothing has to tell rows apart."""

    def columns(self) -> dict[str, Table]:
        """The tables by the name of their struct column: the table's, with the schema where two have the same."""
        plain = [table.relation.table for table in self.tables]
        return {
            (each if plain.count(each) == 1 else f"{table.relation.schema}_{each}"): table
            for each, table in zip(plain, self.tables, strict=True)
        }

    def schema(self) -> pa.Schema:
        """The columns of the feed."""
        if not self.several:
            return pa.schema([*self.tables[0].fields(), *_ADDED])
        structs = []
        for name, table in self.columns().items():
            fields = [field.with_nullable(True) for field in table.fields()]
            structs.append(pa.field(name, pa.struct(fields)))
        return pa.schema([*_NAMES, *structs, *_ADDED])

    def contract(self) -> ChangeContract | None:
        """What the feed promises."""
        row_id: tuple[str, ...] = (TABLE, KEY) if self.several else self.tables[0].key
        if not row_id or not all(table.key for table in self.tables):
            return None
        return ChangeContract(
            row_id=row_id,
            nullable_row_id=not self.several and not self.tables[0].keyed,
            intermediate_changes=True,
            whole_commits=True,
            sequence=SEQUENCE,
            unchanged=UNCHANGED_COLUMNS,
        )


def find(server: Server, publication: str, chosen: Sequence[str] | None) -> Tables:
    """The tables of a publication, all or those that are chosen.

    Raises
    ------
    FeedUnavailable
        PUBLICATION_MISSING, TABLE_NOT_PUBLISHED, NO_TABLES, NO_REPLICA_IDENTITY or RESERVED_COLUMN.
    """
    found = server.all("publication", publication=publication)
    if not found:
        raise missing_publication(server, publication)
    changes_rows = bool(found[0].changes_rows)
    tables = published(server, publication)
    if chosen is not None:
        tables = [_named(server, publication, tables, name) for name in chosen]
    if not tables:
        raise server.unavailable(
            "NO_TABLES",
            f"the publication {publication!r} has no tables: alter publication {publication} add table …",
        )
    for table in tables:
        _check(server, table, changes_rows)
    several = len(tables) > 1
    known = Tables(tuple(tables), several, changes_rows)
    _check_names(server, known)
    return known


def published(server: Server, publication: str) -> list[Table]:
    """The tables that a publication has now."""
    rows = server.all("columns", publication=publication)
    return [_table(list(group)) for _, group in groupby(rows, key=lambda row: row.oid)]


def missing_publication(server: Server, publication: str) -> FeedUnavailable:
    return server.unavailable(
        "PUBLICATION_MISSING",
        f"there is no publication {publication!r} in this database: create publication {publication} for table …",
        publication=publication,
    )


def _table(rows: list[Any]) -> Table:
    first = rows[0]
    columns = tuple(Column(row.name, row.type, row.modifier) for row in rows)
    key = tuple(row.name for row in rows if row.key)
    full = first.identity == "f"
    usable = first.identity != "n"
    return Table(
        Relation(first.oid, first.schema, first.table, columns),
        tuple(arrow_type(row.base_type, row.base_modifier) for row in rows),
        (key or (tuple(row.name for row in rows) if full else ())) if usable else (),
        keyed=usable and bool(key),
        filter=first.rowfilter,
        partitioned=first.kind == "p",
    )


def _named(server: Server, publication: str, tables: Sequence[Table], name: str) -> Table:
    exact = [table for table in tables if table.name == name]
    found = exact or [table for table in tables if table.relation.table == name]
    if len(found) == 1:
        return found[0]
    names = [table.name for table in tables]
    if found:
        raise server.unavailable(
            "TABLE_AMBIGUOUS", f"the table {name!r} is in several schemas: say which, as in {found[0].name!r}"
        )
    raise server.unavailable(
        "TABLE_NOT_PUBLISHED",
        f"the publication {in_quotes(publication)} does not have the table {in_quotes(name)}.{did_you_mean(name, names)} It "
        f"has {', '.join(names) or 'none'}; alter publication {publication} add table {name}",
        table=name,
    )


def _check(server: Server, table: Table, changes_rows: bool) -> None:
    if changes_rows and not table.key:
        raise server.unavailable(
            "NO_REPLICA_IDENTITY",
            f"nothing tells the rows of {table.name} apart: give it a primary key, or alter table {table.name} replica "
            "identity full; or publish inserts only",
            table=table.name,
        )


def _check_names(server: Server, tables: Tables) -> None:
    names = [name.lower() for name in tables.schema().names]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise server.unavailable(
            "RESERVED_COLUMN",
            f"{doubled!r} would be the name of two columns, apart from upper and lower case: rename the table's",
            column=doubled,
        )
