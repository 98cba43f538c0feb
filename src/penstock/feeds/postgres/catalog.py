"""The tables of a publication: what their columns are called in Arrow, and what identifies their rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import FeedUnavailable
from penstock.feeds.contract import ChangeContract
from penstock.feeds.postgres.pgoutput import Column, Relation
from penstock.feeds.postgres.server import Statements
from penstock.feeds.postgres.values import AS_TYPES, arrow_type
from penstock.feeds.protocol import METADATA_FIELDS

SEQUENCE, UNCHANGED_COLUMNS, TABLE, KEY = "_commit_sequence", "_unchanged", "_table", "_key"
_ADDED = (
    pa.field(SEQUENCE, pa.int64(), nullable=False),
    pa.field(UNCHANGED_COLUMNS, pa.list_(pa.field("element", pa.string()))),
    *METADATA_FIELDS,
)
_NAMES = (pa.field(TABLE, pa.string(), nullable=False), pa.field(KEY, pa.string(), nullable=False))
_FIRST_OF_USERS = 16_384
"""Types below this number are PostgreSQL's own."""
BaseType = tuple[int, int]
"""What a column's type is made of, domains resolved: the type's object id, and its modifier."""


@dataclass(frozen=True)
class Table:
    """A table of the publication, as a query is planned with it."""

    relation: Relation
    bases: tuple[BaseType, ...]
    """The columns' types, domains resolved."""
    key: tuple[str, ...]
    """The columns that identify rows; all of them where there is no key and the replica identity is full."""
    keyed: bool
    """Whether the key is one, so that its columns are never null."""
    filter: str | None = None
    """The publication's condition on rows."""
    partitioned: bool = False
    read_as: tuple[tuple[str, str], ...] = ()
    """Columns that are read as text or double."""

    @property
    def name(self) -> str:
        return self.relation.name

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        """The columns' Arrow types."""
        read_as = dict(self.read_as)
        return tuple(
            AS_TYPES[read_as[column.name]] if column.name in read_as else arrow_type(*base)
            for column, base in zip(self.relation.columns, self.bases, strict=True)
        )

    def fields(self) -> list[pa.Field]:
        """The table's columns."""
        return [
            pa.field(column.name, kind, nullable=not (self.keyed and column.name in self.key))
            for column, kind in zip(self.relation.columns, self.types, strict=True)
        ]


@dataclass(frozen=True)
class Tables:
    """The tables of a feed, as a query is planned with them."""

    tables: tuple[Table, ...]
    several: bool
    """Whether rows of all tables come in one form, with a struct for each table."""
    changes_rows: bool
    """Whether updates or deletes are published; else nothing has to identify rows."""
    chosen: bool = False
    """Whether the feed names its tables, rather than taking all of the publication."""
    domains: Mapping[int, BaseType] = field(default_factory=dict, hash=False)
    """What the domains among the types are made of."""
    some_columns: bool = False
    """Whether the reader names the columns that it wants, so that it does not mind others."""

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

    def base(self, column: Column) -> BaseType:
        """The type of a column, domains resolved."""
        return self.domains.get(column.type, (column.type, column.modifier))

    def made_of(self, relation: Relation, now: Table | None) -> Table:
        """The table of a relation that the log has.

        Parameters
        ----------
        now
            The same table as the catalog has it, where it does.
        """
        key, keyed = identity_key(relation, now)
        return Table(
            relation,
            tuple(self.base(column) for column in relation.columns),
            key,
            keyed,
            filter=now.filter if now else None,
            partitioned=bool(now and now.partitioned),
        )

    def as_logged(self, relations: Iterable[Relation]) -> Tables:
        """The tables as the log has them from a position on.

        Rows are written with the table as it was then. So a table is what the first row that is still to be read was written
        with; where there is none, it is what the catalog has.

        Parameters
        ----------
        relations
            Those of the rows that are still to be read, in the order of the log.
        """
        first: dict[str | int, Relation] = {}
        now = {table.relation.oid: table for table in self.tables}
        names = {table.name: table for table in self.tables}
        for relation in relations:
            table = now.get(relation.oid) or names.get(relation.name)
            if table is None and self.chosen:
                continue
            first.setdefault(table.name if table else relation.oid, relation)
        logged = [
            self.made_of(first[table.name], table) if table.name in first else table for table in self.tables
        ]
        # Tables that have left the publication since, with rows that have not been read.
        gone = [self.made_of(relation, None) for place, relation in first.items() if isinstance(place, int)]
        tables = sorted([*logged, *gone], key=lambda table: table.name) if gone else logged
        return replace(self, tables=tuple(tables), several=len(tables) > 1)

    def reading(self, types: Mapping[str, str]) -> Tables:
        """The tables with some columns read as text or double.

        Parameters
        ----------
        types
            By the column's name, or the table's and the column's.

        Raises
        ------
        KeyError
            With the name of a column that no table has.
        """
        left = set(types)
        tables = []
        for table in self.tables:
            found = []
            for column in table.relation.columns:
                names = (f"{table.name}.{column.name}", f"{table.relation.table}.{column.name}", column.name)
                left -= set(names)
                kind = next((types[name] for name in names if name in types), None)
                if kind is not None:
                    found.append((column.name, kind))
            tables.append(replace(table, read_as=tuple(found)))
        if left:
            raise KeyError(min(left))
        return replace(self, tables=tuple(tables))

    def to_json(self) -> str:
        """The tables as text, for another process."""
        tables = [
            {
                "relation": relation_to_json(table.relation),
                "bases": table.bases,
                "key": table.key,
                "keyed": table.keyed,
                "filter": table.filter,
                "partitioned": table.partitioned,
                "read_as": table.read_as,
            }
            for table in self.tables
        ]
        return json.dumps(
            {
                "tables": tables,
                "several": self.several,
                "changes_rows": self.changes_rows,
                "chosen": self.chosen,
                "domains": list(self.domains.items()),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Tables:
        found = json.loads(text)
        tables = tuple(
            Table(
                relation_from_json(each["relation"]),
                tuple((kind, modifier) for kind, modifier in each["bases"]),
                tuple(each["key"]),
                each["keyed"],
                each["filter"],
                each["partitioned"],
                tuple((name, kind) for name, kind in each["read_as"]),
            )
            for each in found["tables"]
        )
        domains = {oid: (kind, modifier) for oid, (kind, modifier) in found["domains"]}
        return cls(tables, found["several"], found["changes_rows"], found["chosen"], domains)


def identity_key(relation: Relation, now: Table | None) -> tuple[tuple[str, ...], bool]:
    """The columns that identify a relation's rows, and whether they are a key.

    With the replica identity full the log has all columns, and does not say which are the primary key: the catalog does.
    """
    names = tuple(column.name for column in relation.columns)
    identity = tuple(column.name for column in relation.columns if column.key)
    if identity and relation.identity != "f":
        return identity, True
    # Without a replica identity there are inserts alone, and any key will do.
    if now is not None and now.keyed and set(now.key) <= set(names):
        return now.key, True
    return identity, False


def relation_to_json(relation: Relation) -> dict[str, Any]:
    columns = [[column.name, column.type, column.modifier, column.key] for column in relation.columns]
    return {
        "oid": relation.oid,
        "schema": relation.schema,
        "table": relation.table,
        "identity": relation.identity,
        "columns": columns,
    }


def relation_from_json(found: Mapping[str, Any]) -> Relation:
    columns = tuple(Column(*each) for each in found["columns"])
    return Relation(found["oid"], found["schema"], found["table"], columns, found["identity"])


def find(server: Statements, publication: str, chosen: Sequence[str] | None) -> Tables:
    """The tables of a publication as the catalog has them, all or those that are chosen.

    Raises
    ------
    FeedUnavailable
        PUBLICATION_MISSING, TABLE_NOT_PUBLISHED, NO_TABLES, NO_REPLICA_IDENTITY or RESERVED_COLUMN.
    """
    found = server.all("publication", publication=publication)
    if not found:
        raise missing_publication(server, publication)
    tables, domains = published(server, publication)
    if chosen is not None:
        tables = [_named(server, publication, tables, name) for name in chosen]
    if not tables:
        raise server.unavailable(
            "NO_TABLES",
            f"the publication {publication!r} has no tables: alter publication {publication} add table …",
        )
    changes_rows = bool(found[0].changes_rows)
    for table in tables:
        _check(server, table, changes_rows)
    known = Tables(tuple(tables), len(tables) > 1, changes_rows, chosen is not None, domains)
    check_names(server, known)
    return known


def published(server: Statements, publication: str) -> tuple[list[Table], dict[int, BaseType]]:
    """The tables that a publication has now, and what the domains among their types are made of."""
    rows = server.all("columns", publication=publication)
    domains = domains_of(server, {row.type for row in rows})
    return [_table(list(group), domains) for _, group in groupby(rows, key=lambda row: row.oid)], domains


def domains_of(server: Statements, types: Collection[int]) -> dict[int, BaseType]:
    """What the domains among some types are made of."""
    own = sorted(each for each in types if each >= _FIRST_OF_USERS)
    found = server.all("domains", oids=own) if own else ()
    return {row.oid: (row.type, row.modifier) for row in found}


def missing_publication(server: Statements, publication: str) -> FeedUnavailable:
    return server.unavailable(
        "PUBLICATION_MISSING",
        f"there is no publication {publication!r} in this database: create publication {publication} for table …",
        publication=publication,
    )


def _table(rows: list[Any], domains: Mapping[int, BaseType]) -> Table:
    first = rows[0]
    full, usable = first.identity == "f", first.identity != "n"
    columns = tuple(Column(row.name, row.type, row.modifier, full or (usable and row.key)) for row in rows)
    primary = tuple(row.name for row in rows if row.key) if usable else ()
    return Table(
        Relation(first.oid, first.schema, first.table, columns, first.identity),
        tuple(domains.get(row.type, (row.type, row.modifier)) for row in rows),
        primary or (tuple(row.name for row in rows) if full else ()),
        keyed=bool(primary),
        filter=first.rowfilter,
        partitioned=first.kind == "p",
    )


def _named(server: Statements, publication: str, tables: Sequence[Table], name: str) -> Table:
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


def _check(server: Statements, table: Table, changes_rows: bool) -> None:
    if changes_rows and not table.key:
        raise server.unavailable(
            "NO_REPLICA_IDENTITY",
            f"nothing identifies the rows of {table.name}: give it a primary key, or alter table {table.name} replica "
            "identity full; or publish inserts only",
            table=table.name,
        )


def check_names(server: Statements, tables: Tables) -> None:
    """Refuse names that two columns would have.

    Raises
    ------
    FeedUnavailable
        RESERVED_COLUMN.
    """
    names = [name.lower() for name in tables.schema().names]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise server.unavailable(
            "RESERVED_COLUMN",
            f"{doubled!r} would be the name of two columns, apart from upper and lower case: rename the table's",
            column=doubled,
        )
